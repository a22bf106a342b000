"""A picture of a comparison: every case's error in units of the tolerance, by op. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .comparison import Comparison

__all__ = ["draw"]

_LEAST, _MOST = 1e-4, 1e2


def draw(comparisons: Sequence[Comparison], path: Path) -> bool:
    """Writes a PNG, and returns False where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    ops = sorted({comparison.op for comparison in comparisons}, reverse=True)
    figure = Figure(figsize=(8, 1.2 + 0.2 * len(ops)), layout="constrained")
    axes = figure.add_subplot()
    for right, color, label in ((True, "tab:blue", "right"), (False, "tab:red", "wrong")):
        chosen = [comparison for comparison in comparisons if comparison.right == right]
        axes.scatter(
            [min(max(comparison.error, _LEAST), _MOST) for comparison in chosen],
            [ops.index(comparison.op) for comparison in chosen],
            s=12,
            color=color,
            label=f"{label}: {len(chosen)}",
        )
    axes.axvline(1, color="black", linewidth=1)
    axes.set(xscale="log", xlim=(_LEAST / 2, _MOST * 2), xlabel="largest error, in units of the tolerance")
    axes.set_yticks(range(len(ops)), ops, fontsize=7)
    axes.legend(loc="lower right", fontsize=7)
    figure.savefig(path, dpi=120)
    return True
