"""Finds the pattern, and the place, that makes a program's results differ from its module's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .compiling import optimize, source_of
from .options import Options
from .patterns import PATTERNS
from .program import finish
from .rewriting import Pattern
from .tracing import trace

__all__ = ["Finding", "bisect"]


class Finding(NamedTuple):
    """A pattern that makes results wrong.

    Attributes:
        pattern: its name; "" if the results are wrong without any pattern.
        place: the name of the operation that it replaced.
        application: the number of this application among those of the pattern, from 0.
        error: the largest difference of the results.

    Example:
        >>> metalcore.programs.Finding("rope", place="apply_rotary_pos_emb", application=1, error=0.5).pattern
        'rope'
    """

    pattern: str
    place: str
    application: int
    error: float


def bisect(
    module: torch.nn.Module,
    args: tuple = (),
    kwargs: dict | None = None,
    *,
    patterns: Sequence[Pattern] = PATTERNS,
    tolerance: float = 1e-3,
) -> Finding | None:
    """Compiles a module with some of the patterns until it is known which one makes its results wrong.

    Args:
        module, args, kwargs: as for `metalcore.compile`. The module is run as it is for what the results should be.
        patterns: those to try, in order.
        tolerance: the largest difference that is right, relative to the largest number of each result.

    Returns:
        A `Finding`, or None if the results are right with all patterns.

    Example:
        >>> x = torch.randn(2, 4, device="mps")
        >>> print(metalcore.programs.bisect(torch.nn.RMSNorm(4, device="mps").eval(), (x,)))  # none is wrong
        None
    """
    with torch.no_grad():
        expected = [leaf.clone() for leaf in tree_leaves(module(*args, **(kwargs or {}))) if isinstance(leaf, Tensor)]

    def attempt(chosen, limit=None):
        traced = trace(module, args, kwargs)
        with torch.no_grad():
            fused, recipe = optimize(traced.module, chosen, constants=True, by_name=True, limit=limit)
            options = Options(fallback=False)
            program = finish(traced.module, options, fused, source=source_of(traced, recipe, options, fused))
            results = [leaf for leaf in tree_leaves(program(*args, **(kwargs or {}))) if isinstance(leaf, Tensor)]
        return _error(expected, results), fused

    def wrong(count):
        return attempt(patterns[:count])[0] > tolerance

    if not wrong(len(patterns)):
        return None
    error, _ = attempt(())
    if error > tolerance:
        return Finding("", "", 0, error)
    last = _first(wrong, len(patterns)) - 1
    culprit = patterns[last]
    chosen = patterns[: last + 1]
    _, fused = attempt(chosen)
    places = [rewritten.place for rewritten in fused if rewritten.pattern == culprit.name]
    count = _first(lambda n: attempt(chosen, {culprit.name: n})[0] > tolerance, len(places))
    error, _ = attempt(chosen, {culprit.name: count})
    return Finding(culprit.name, places[count - 1], count - 1, error)


def _first(wrong: Callable[[int], bool], most: int) -> int:
    """Returns the smallest number from 1 to `most` that is wrong, if what is wrong stays wrong."""
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        if wrong(middle):
            high = middle
        else:
            low = middle + 1
    return low


def _error(expected, results):
    worst = 0.0
    for a, b in zip(expected, results, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            return float("inf")
        a, b = a.cpu().double(), b.cpu().double()
        if not a.numel():
            continue
        difference = torch.where(a == b, torch.zeros_like(a), (a - b).abs()).max().item()
        scale = a[a.isfinite()].abs().max().item() if a.isfinite().any() else 1.0
        worst = max(worst, float("inf") if difference != difference else difference / max(scale, 1e-30))
    return worst
