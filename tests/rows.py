"""Row lengths on both sides of every boundary between variants, which metalcore.explain finds."""

import contextlib

import metalcore
from metalcore import _C

LONGEST = 20000


@contextlib.contextmanager
def tuned(family):
    """Inside, plans are those for GPUs of the family."""
    _C.use_tuning(family)
    try:
        yield
    finally:
        _C.use_tuning("")


def _different(families):
    """The first of the families with the same numbers, apart from those of linear algebra's route to the CPU."""
    first = {}
    for family in families:
        with tuned(family):
            entries = [entry for entry in _C.tunables("mps") if not entry["field"].endswith("cpu")]
            first.setdefault(str([(entry["field"], entry["value"]) for entry in entries]), family)
    return list(first.values())


FAMILIES = _different(_C.tuning_families())


def variant(op, length, dtype, backward=False):
    return metalcore.explain(op, (9, length), dtype=dtype, backward=backward).variant


def lengths(op, dtype):
    """Small lengths, and those around each change of variant of the op or of its derivative, for the tuning in use."""
    return sorted(_boundaries(op, dtype, False) | _boundaries(op, dtype, True))


def _boundaries(op, dtype, backward):
    found, low = {1, 2, 3}, 1
    for below, above in changes(lambda length: variant(op, length, dtype, backward), 1, LONGEST):
        found |= {below - 1, below, above, above + 1, above + 4}
        low = above
    return found | {low + 100}


def changes(plan, first, last):
    """The pairs of neighbouring sizes from `first` to `last` between which plan(size) changes. No plan may return."""
    low = first
    while plan(low) != plan(last):
        below, above = low, last  # plan(below) is plan(low), and plan(above) is another one
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
