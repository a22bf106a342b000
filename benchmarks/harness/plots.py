"""One picture per family: the times of both sides, and the share of the physical limit, with targets in red; or a
speed-up map. Needs matplotlib."""

from __future__ import annotations

from . import heatmap, maps

OURS, THEIRS, TARGET = "#2563a8", "#b8bec6", "#c0261c"


def draw(family, results, path):
    """Writes a PNG; False where matplotlib is missing or nothing was measured."""
    measured = [result for result in results if "error" not in result]
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    if not measured:
        return False
    figure = heatmap.draw(Figure, family, results) if maps.is_map(results) else _bars(Figure, family, measured)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return True


def _bars(figure_class, family, results):
    shares = any("share" in result for result in results)
    figure = figure_class(figsize=(13 if shares else 8, 1.4 + 0.3 * len(results)), layout="constrained")
    axes = figure.subplots(1, 2 if shares else 1, sharey=True, squeeze=False)[0]
    _times(axes[0], results)
    if shares:
        _shares(axes[1], results)
    figure.suptitle(family)
    return figure


def _times(axes, results):
    """A pair of bars per case, on a logarithmic scale."""
    rows = range(len(results))
    axes.barh([row - 0.2 for row in rows], [result["ours"]["median"] * 1e3 for result in results], 0.38, color=OURS,
              label="metalcore")
    pairs = [(row, result["theirs"]["median"] * 1e3) for row, result in zip(rows, results) if "theirs" in result]
    if pairs:
        axes.barh([row + 0.2 for row, _ in pairs], [time for _, time in pairs], 0.38, color=THEIRS, label="PyTorch")
    limits = [(row, result["limit"] * 1e3) for row, result in zip(rows, results) if result.get("limit")]
    if limits:
        axes.plot([time for _, time in limits], [row for row, _ in limits], "|", color="black", markersize=9,
                  label="physical limit")
    for row, result in zip(rows, results):
        _targets(axes, row, result, ("seconds",), 1e3)
    axes.set_xscale("log")
    axes.set_xlabel("ms")
    axes.set_yticks(list(rows), [" ".join(filter(None, [result["name"], result["shape"], result["dtype"]]))
                                 for result in results], fontsize=8)
    axes.set_ylim(len(results) - 0.4, -0.6)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 0), ncols=3, frameon=False, borderaxespad=3.5)


def _shares(axes, results):
    """How near the physical limit is, with the targets."""
    for row, result in enumerate(results):
        if "share" in result:
            axes.barh(row, 100 * result["share"], 0.6, color=OURS)
            axes.text(100 * result["share"], row, f" {100 * result['share']:.3g}", va="center", fontsize=8)
        _targets(axes, row, result, ("share",), 100)
    axes.set_xlabel("% of the physical limit")
    axes.set_xlim(0, 1.1 * axes.get_xlim()[1])


def _targets(axes, row, result, quantities, factor):
    """Red lines where the bounds are."""
    for target in result.get("targets", ()):
        if target["quantity"] in quantities:
            axes.plot([factor * target["bound"]] * 2, [row - 0.4, row + 0.4], color=TARGET, linewidth=1.5)
