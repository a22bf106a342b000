"""The calls that are recorded: samples of the registry, samples of production size, and values at the edges."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._core.registry import Op, Sample

__all__ = ["CASES", "Case", "cases"]

CASES = ("unit", "production", "edge")


class Case(NamedTuple):
    """A call of an op.

    Attributes:
        kind: "unit", "production" or "edge".
        sample: the arguments.
        dtype: their dtype.
    """

    op: Op
    kind: str
    sample: Sample
    dtype: torch.dtype

    @property
    def name(self) -> str:
        """A name that files can have, unique among all cases."""
        words = "".join(letter if letter.isalnum() else "-" for letter in self.sample.name.lower()).split("-")
        return "_".join([self.op.name, self.kind, *filter(None, ["-".join(filter(None, words))]), self.dtype_name])

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


def cases(op: Op, kinds: tuple[str, ...] = CASES, sizes: Mapping[str, Any] | None = None) -> Iterator[Case]:
    """Yields the cases of an op, in all dtypes that it takes. `sizes` are arguments of op.production."""
    for kind in kinds:
        for sample in (op.production(**sizes),) if sizes and kind == "production" else _SAMPLES[kind](op):
            for dtype in sorted(op.dtypes, key=str, reverse=True):
                yield Case(op, kind, sample, dtype)


def _times(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda value: value * factor


def _with_nan(value):
    value = value.clone()
    value.view(-1)[value.numel() // 2] = float("nan")
    return value


def _after(first, second):
    return lambda value: second(first(value))


def _edges(op):
    """Yields the smallest sample with values of other magnitudes, and where an op takes any values, also zeros and a
    NaN. The factors are powers of two, so that they round nothing; float16 holds the results."""
    if op.edge is not None:
        yield from op.edge()
        return
    sample = op.smallest_sample()
    large, tiny = (2.0**2, 2.0**-2) if sample.prepare else (2.0**5, 2.0**-10)
    for name, change in (("large", _times(large)), ("tiny", _times(tiny))):
        prepare = (_after(sample.prepare[0], change), *sample.prepare[1:]) if sample.prepare else (change,)
        yield dataclasses.replace(sample, name=name, prepare=prepare)
    if not sample.prepare:
        yield dataclasses.replace(sample, name="zeros", prepare=(torch.zeros_like,) * len(sample.shapes))
        yield dataclasses.replace(sample, name="a NaN", prepare=(_with_nan,))


_SAMPLES: dict[str, Callable[[Op], Iterator[Sample] | tuple[Sample, ...]]] = {
    "unit": lambda op: tuple(sample for sample in op.samples() if sample.elements),
    "production": lambda op: (op.production(),),
    "edge": _edges,
}
