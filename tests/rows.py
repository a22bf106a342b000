"""Row lengths above and below every boundary between variants, as metalcore.explain finds them."""

import contextlib

import metalcore
from metalcore import _C

FAMILIES = _C.tuning_families()
LONGEST = 20000


@contextlib.contextmanager
def tuned(family):
    """Plans as for a GPU family."""
    _C.use_tuning(family)
    try:
        yield
    finally:
        _C.use_tuning("")


def variant(op, length, dtype, backward=False):
    return metalcore.explain(op, (9, length), dtype=dtype, backward=backward).variant


def lengths(op, dtype):
    """1, and the last length of each variant of the op and of its derivative with its neighbours, as planned now."""
    return sorted(_boundaries(op, dtype, False) | _boundaries(op, dtype, True))


def _boundaries(op, dtype, backward):
    found, low = {1, 2, 3}, 1
    for below, above in changes(lambda length: variant(op, length, dtype, backward), 1, LONGEST):
        found |= {below - 1, below, above, above + 1, above + 4}
        low = above
    return found | {low + 100}


def changes(plan, first, last):
    """The pairs of neighbouring sizes from `first` to `last` between which plan(size) changes; none comes back."""
    low = first
    while plan(low) != plan(last):
        below, above = low, last  # of the plan of `low`, and of another one
        while above - below > 1:
            middle = (below + above) // 2
            if plan(middle) == plan(low):
                below = middle
            else:
                above = middle
        yield below, above
        low = above


def variants(op, dtype):
    return {variant(op, length, dtype) for length in lengths(op, dtype)}
