"""The picture of a speed-up map: a panel per op, with the numbers in the cells. Needs matplotlib."""

from __future__ import annotations

from . import maps

ACROSS = 4
MISSED = "#c0261c"


def draw(figure_class, family, results):
    """A figure of all grids; cells that miss a target have a red frame."""
    grids = maps.grids(results)
    across = min(ACROSS, len(grids))
    down = -(-len(grids) // across)
    tallest = max(len(grid.sizes) for grid in grids)
    figure = figure_class(
        figsize=(max(7, 3.6 * across + 0.8), 1.2 + (1.1 + 0.26 * tallest) * down), layout="constrained"
    )
    axes = list(figure.subplots(down, across, squeeze=False).flat)
    for panel, grid in zip(axes, grids):
        _panel(panel, grid)
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


def _panel(axes, grid):
    for row, n in enumerate(grid.sizes):
        for column, batch in enumerate(grid.batches):
            result = grid.cells.get((n, batch))
            missed = result is not None and bool(maps.misses([result]))
            face = maps.colour(result)
            axes.add_patch(_square(column, row, face, MISSED if missed else "white"))
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
    """The colours of the cells, as matplotlib's."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, LogNorm

    steps = 256
    ratios = [maps.SLOWEST * (maps.FASTEST / maps.SLOWEST) ** (step / (steps - 1)) for step in range(steps)]
    return ScalarMappable(LogNorm(maps.SLOWEST, maps.FASTEST), ListedColormap([maps.shade(r) for r in ratios]))
