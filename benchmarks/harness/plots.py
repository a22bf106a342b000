"""One picture per family: the times of both sides with the speed-up, and how near each comes to the physical limit,
with targets in red; or a speed-up map. Needs matplotlib."""

from __future__ import annotations

from . import heatmap, maps

OURS, THEIRS, TARGET = "#2563a8", "#8a929c", "#c0261c"


def draw(family, results, machine, path, against="PyTorch"):
    """Writes a PNG, and returns False where matplotlib is missing or nothing was measured. `against` names the other
    side."""
    measured = [result for result in results if "error" not in result]
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    if not measured:
        return False
    figure = (
        heatmap.draw(Figure, family, results) if maps.is_map(results) else _chart(Figure, family, measured, against)
    )
    figure.supxlabel(caption(machine), fontsize=8, color="#555555")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return True


def caption(machine):
    """What was measured, with what and when."""
    commit = machine.get("commit")
    return ", ".join(
        [
            machine["device_name"],
            f"PyTorch {machine['torch']}",
            *([f"metalcore at {commit}"] if commit else []),
            machine["date"][:10],
        ]
    )


def _chart(figure_class, family, results, against):
    shares = any("share" in result for result in results)
    figure = figure_class(figsize=(13 if shares else 8.5, 2.2 + 0.3 * len(results)), layout="constrained")
    axes = figure.subplots(1, 2 if shares else 1, sharey=True, squeeze=False)[0]
    _times(axes[0], results, against)
    if shares:
        _shares(axes[1], results)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=len(labels), frameon=False, fontsize=9)
    figure.suptitle(family, x=0.01, ha="left")
    return figure


def _times(axes, results, against):
    """Draws a point per side and case, joined by a line, with the speed-up beside them. A bar would have no foot,
    since a logarithmic axis has no zero."""
    for row, result in enumerate(results):
        ours, theirs = (result[side]["median"] * 1e3 if side in result else None for side in ("ours", "theirs"))
        if theirs is not None:
            axes.plot([ours, theirs], [row, row], color="#d5d9de", linewidth=3, zorder=1, solid_capstyle="butt")
            axes.annotate(
                f"{_ratio(result)}×",
                (max(ours, theirs), row),
                (8, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
                color=OURS if theirs >= ours else TARGET,
            )
        _targets(axes, row, result, ("seconds",), 1e3)
    _points(axes, results, "theirs", "D", THEIRS, against)
    _points(axes, results, "ours", "o", OURS, "metalcore")
    limits = [(row, result["limit"] * 1e3) for row, result in enumerate(results) if result.get("limit")]
    if limits:
        axes.scatter(
            [time for _, time in limits],
            [row for row, _ in limits],
            s=70,
            marker="|",
            color="black",
            label="physical limit",
            zorder=2,
        )
    axes.set_xscale("log")
    axes.margins(x=0.12)  # room for the speed-ups
    axes.set_xlabel(f"time of a call in ms (log scale); speed-up: {against}'s time over metalcore's")
    axes.set_ylabel("case")
    axes.set_yticks(
        range(len(results)),
        [" ".join(filter(None, [result["name"], result["shape"], result["dtype"]])) for result in results],
        fontsize=8,
    )
    axes.set_ylim(len(results) - 0.4, -0.6)
    axes.grid(axis="x", color="#eeeeee", zorder=0)


def _points(axes, results, side, marker, colour, label):
    found = [(row, result[side]["median"] * 1e3) for row, result in enumerate(results) if side in result]
    if found:
        axes.scatter(
            [time for _, time in found],
            [row for row, _ in found],
            s=32,
            marker=marker,
            color=colour,
            label=label,
            zorder=3,
        )


def _ratio(result):
    ratio = result["speedup"]["median"]
    return f"{ratio:.0f}" if ratio >= 99.5 else f"{ratio:.3g}"


def _shares(axes, results):
    """Draws how near each side is to the physical limit, with the targets."""
    for row, result in enumerate(results):
        if "share" in result:
            _bar(axes, row - 0.2, 100 * result["share"], OURS)
            if "theirs" in result:
                _bar(axes, row + 0.2, 100 * result["limit"] / result["theirs"]["median"], THEIRS)
        _targets(axes, row, result, ("share",), 100)
    axes.set_xlabel("% of the physical limit that is reached")
    axes.set_xlim(0, 1.15 * max(100, axes.get_xlim()[1] / 1.05))


def _bar(axes, row, percent, colour):
    axes.barh(row, percent, 0.36, color=colour)
    axes.annotate(f"{percent:.3g}", (percent, row), (3, 0), textcoords="offset points", va="center", fontsize=7)


def _targets(axes, row, result, quantities, factor):
    """Red lines where the bounds are."""
    for target in result.get("targets", ()):
        if target["quantity"] in quantities:
            axes.plot([factor * target["bound"]] * 2, [row - 0.4, row + 0.4], color=TARGET, linewidth=1.5)
