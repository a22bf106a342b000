"""Speed-up maps: a grid per op, a row per size of the matrices, a column per batch.

A result that has a "cell" is shown in a grid, in text, Markdown, HTML and as a heat map, and has no line of its own.
"""

from __future__ import annotations

import html
import math

# It marks a cell whose PyTorch time is a multiple of a smaller batch's.
ABOUT = "~"
MISSING = "-"
NOTE = (
    "PyTorch's time over metalcore's, by the size n of n x n matrices and the batch. "
    f"{ABOUT}: PyTorch's time is that of a smaller batch, times as much as the batch is larger. "
    f"{MISSING}: not measured."
)


def is_map(results):
    return any("cell" in result for result in results)


class Grid:
    """The cells of one op."""

    def __init__(self, op, results):
        self.op = op
        self.cells = {(result["cell"]["n"], result["cell"]["batch"]): result for result in results}
        self.sizes, self.batches = (sorted({key[axis] for key in self.cells}) for axis in (0, 1))

    def text(self, n, batch):
        return cell_text(self.cells.get((n, batch)))

    def rows(self):
        """Returns texts, a row per size."""
        return [[str(n), *(self.text(n, batch) for batch in self.batches)] for n in self.sizes]

    @property
    def head(self):
        return [f"{self.op}: n", *(f"batch {batch}" for batch in self.batches)]


def grids(results):
    ops = dict.fromkeys(result["name"] for result in results)
    return [Grid(op, [result for result in results if result["name"] == op]) for op in ops]


def cell_text(result):
    if result is None:
        return MISSING
    if "error" in result:
        return "error"
    ratio = result["speedup"]["median"]
    text = f"{ratio:.0f}" if ratio >= 9.95 else f"{ratio:.2g}"
    return (ABOUT if "theirs_batch" in result else "") + text


def misses(results):
    """Returns the cells that deserve a line of their own: they failed, or missed a target."""
    return [
        result
        for result in results
        if "error" in result or not all(target["met"] for target in result.get("targets", ()))
    ]


def text(results):
    """Returns lines for a terminal."""
    lines = [NOTE]
    for grid in grids(results):
        widths = [max(len(cell), 6) for cell in grid.head]
        rows = [grid.head, *grid.rows()]
        lines += ["", *("  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows)]
    return lines


def markdown(results):
    lines = [NOTE]
    for grid in grids(results):
        lines += ["", "| " + " | ".join(grid.head) + " |", "|" + "---|" * len(grid.head)]
        lines += ["| " + " | ".join(row) + " |" for row in grid.rows()]
    return lines


def page(results):
    """Returns HTML tables, whose cells have the heat map's colours."""
    lines = [f"<p>{html.escape(NOTE)}</p>"]
    for grid in grids(results):
        lines += ["<table>", "<tr>" + "".join(f"<th>{html.escape(cell)}</th>" for cell in grid.head) + "</tr>"]
        for n in grid.sizes:
            lines.append(f"<tr><td>{n}</td>" + "".join(_cell(grid, n, batch) for batch in grid.batches) + "</tr>")
        lines.append("</table>")
    return lines


def _cell(grid, n, batch):
    face = colour(grid.cells.get((n, batch)))
    return f'<td style="background:{face};color:{ink(face)}">{html.escape(grid.text(n, batch))}</td>'


# The logarithm of the speed-up decides the colour: red below 1, white at 1, blue above.
SLOWEST, FASTEST = 0.1, 1000.0
RED, WHITE, BLUE, GREY = (192, 38, 28), (255, 255, 255), (70, 130, 195), (225, 225, 225)


def colour(result):
    """Returns a colour as "#rrggbb"."""
    if result is None or "error" in result:
        return web(GREY)
    return shade(result["speedup"]["median"])


def shade(ratio):
    """Returns the colour of a speed-up, as "#rrggbb"."""
    ratio = min(max(ratio, SLOWEST), FASTEST)
    end, farthest = (RED, SLOWEST) if ratio < 1 else (BLUE, FASTEST)
    share = math.log(ratio) / math.log(farthest)
    return web(round(white + share * (other - white)) for white, other in zip(WHITE, end))


def web(channels):
    """Returns red, green and blue of 0 to 255 as "#rrggbb"."""
    return "#" + bytes(channels).hex()


def ink(face):
    """Returns "black" or "white", whichever has more contrast with a colour (WCAG 2.2's relative luminance)."""

    def linear(value):
        return value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4

    red, green, blue = (linear(int(face[i : i + 2], 16) / 255) for i in (1, 3, 5))
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return "black" if (luminance + 0.05) ** 2 > 1.05 * 0.05 else "white"
