"""One picture per family: the times of both sides with the speed-up, and how near each comes to the physical limit,
with targets in red; or a speed-up map. Needs matplotlib."""

from __future__ import annotations

from . import maps

OURS, THEIRS, TARGET = "#2563a8", "#8a929c", "#c0261c"
MAPS_ACROSS = 4


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
    figure = _map(Figure, family, results) if maps.is_map(results) else _chart(Figure, family, measured, against)
    figure.supxlabel(caption(machine), fontsize=8, color="#555555")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return True


def caption(machine):
    """Returns what was measured, with what and when."""
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
    points = [(row, result[side]["median"] * 1e3) for row, result in enumerate(results) if side in result]
    if points:
        axes.scatter(
            [time for _, time in points],
            [row for row, _ in points],
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
    """Draws red lines where the bounds are."""
    for target in result.get("targets", ()):
        if target["quantity"] in quantities:
            axes.plot([factor * target["bound"]] * 2, [row - 0.4, row + 0.4], color=TARGET, linewidth=1.5)


def _map(figure_class, family, results):
    """Returns a figure of all grids; cells that miss a target have a red frame."""
    grids = maps.grids(results)
    across = min(MAPS_ACROSS, len(grids))
    down = -(-len(grids) // across)
    tallest = max(len(grid.sizes) for grid in grids)
    figure = figure_class(
        figsize=(max(7, 3.6 * across + 0.8), 1.2 + (1.1 + 0.26 * tallest) * down), layout="constrained"
    )
    axes = list(figure.subplots(down, across, squeeze=False).flat)
    for panel, grid in zip(axes, grids):
        _map_panel(panel, grid)
    for panel in axes[len(grids) :]:
        panel.set_axis_off()
    bar = figure.colorbar(
        _scale(),
        ax=axes,
        shrink=min(1, 4 / down),
        aspect=30,
        extend="both",
        label="PyTorch's time over metalcore's (log scale)",
    )
    bar.set_ticks([0.1, 1, 10, 100, 1000], labels=["0.1", "1", "10", "100", "1000"])
    figure.suptitle(
        f"{family}: PyTorch's time over metalcore's. A red frame: a target is missed. {maps.ABOUT}: by a smaller batch",
        fontsize=10,
    )
    return figure


def _map_panel(axes, grid):
    for row, n in enumerate(grid.sizes):
        for column, batch in enumerate(grid.batches):
            result = grid.cells.get((n, batch))
            missed = result is not None and bool(maps.misses([result]))
            face = maps.colour(result)
            axes.add_patch(_square(column, row, face, TARGET if missed else "white"))
            axes.text(column, row, grid.text(n, batch), ha="center", va="center", fontsize=7, color=maps.ink(face))
    axes.set_xlim(-0.5, len(grid.batches) - 0.5)
    axes.set_ylim(len(grid.sizes) - 0.5, -0.5)
    axes.set_xticks(range(len(grid.batches)), [str(batch) for batch in grid.batches], fontsize=7)
    axes.set_yticks(range(len(grid.sizes)), [str(n) for n in grid.sizes], fontsize=7)
    axes.set_xlabel("batch", fontsize=7)
    axes.set_ylabel("n", fontsize=7)
    axes.tick_params(length=0)
    axes.set_title(grid.op, fontsize=9)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _square(x, y, face, edge):
    from matplotlib.patches import Rectangle

    return Rectangle((x - 0.46, y - 0.46), 0.92, 0.92, facecolor=face, edgecolor=edge, linewidth=1.2)


def _scale():
    """Returns the colours of the cells, as matplotlib's."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, LogNorm

    steps = 256
    ratios = [maps.SLOWEST * (maps.FASTEST / maps.SLOWEST) ** (step / (steps - 1)) for step in range(steps)]
    return ScalarMappable(LogNorm(maps.SLOWEST, maps.FASTEST), ListedColormap([maps.shade(r) for r in ratios]))
