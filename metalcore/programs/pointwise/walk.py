"""How a reduction's kernel walks its tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from .layout import Layout, collapsed, layout
from .numbers import Unsupported

ROW_THREADS = 256
MOST_STEPS = 512  # that a thread takes before its sum goes into another one
FEW_STEPS = 32  # so few elements are left to one thread
PARALLEL = 1 << 17  # threads that keep a GPU busy


class Walk(NamedTuple):
    """The kept dimensions, one result for each of their indices, and the reduced ones.

    Attributes:
        kept: sizes, and strides of the inputs, then of the results.
        reduced: of the inputs.
        threads: of a threadgroup that shares a result; 1 where a thread has a result of its own.
        chunks: the parts of the reduced elements that are reduced apart.
        per_chunk: elements of each; the last may have fewer.
    """

    kept: Layout
    reduced: Layout
    threads: int
    chunks: int
    per_chunk: int

    @property
    def results(self) -> int:
        return math.prod(self.kept.sizes)

    @property
    def numbers(self) -> list[int]:
        return [math.prod(self.reduced.sizes), self.per_chunk, self.results, *self.kept.numbers, *self.reduced.numbers]

    @property
    def grid(self) -> tuple[int, int, int]:
        return self.results * self.threads, self.chunks, 1

    @property
    def threadgroup(self) -> tuple[int, int, int]:
        return (self.threads if self.threads > 1 else min(256, 1 << (self.results - 1).bit_length())), 1, 1


def walk(
    shape: Sequence[int],
    dims: Sequence[int],
    inputs: Sequence[tuple[Sequence[int], int, int]],
    results: Sequence[Sequence[int]],
    *,
    is_ordered: bool = False,
) -> Walk:
    """Returns the walk over inputs of a shape (as for layout()), of which `dims` are reduced.

    Args:
        results: the strides of each result in the kept dimensions.
        is_ordered: whether the reduced elements are counted in the order of the dimensions.
    """
    others = [d for d in range(len(shape)) if d not in dims]
    kept_sizes, kept_strides = collapsed(
        [shape[d] for d in others], [*([strides[d] for d in others] for strides, _, _ in inputs), *results]
    )
    kept = Layout(kept_sizes, kept_strides, 1, False)
    extents = (sum((size - 1) * stride for size, stride in zip(shape, strides)) for strides, _, _ in inputs)
    if max(math.prod(shape), *extents) >= 1 << 31:
        raise Unsupported(f"a reduction of {list(shape)} elements needs indices of 64 bits")
    sizes = [shape[d] for d in dims]
    count, results_count = math.prod(sizes), math.prod(kept_sizes)
    by_threads = count <= FEW_STEPS or _is_along_results(inputs, others, dims)
    reduced_inputs = [
        ([strides[d] for d in dims], size, _row_address(strides, others, size, at)) for strides, size, at in inputs
    ]
    if count == 0:
        reduced = Layout((0,), tuple((0,) for _ in inputs), 1, False)
    else:
        reduced = layout(sizes, reduced_inputs, row_major=is_ordered)
        if by_threads or is_ordered:
            reduced = reduced._replace(vector=1)
    threads = 1 if by_threads or results_count * ROW_THREADS >= 1 << 32 else ROW_THREADS
    if threads > 1 and count <= 32 * 8:
        threads = 32
    steps = max(1, count // (threads * reduced.vector))
    chunks = min(-(-steps // 8), max(-(-steps // MOST_STEPS), min(256, PARALLEL // max(1, results_count * threads)), 1))
    unit = threads * reduced.vector
    per_chunk = -(-max(count, 1) // (chunks * unit)) * unit
    return Walk(kept, reduced, threads, max(1, -(-count // per_chunk)), per_chunk)


def _is_along_results(inputs, kept, dims):
    """Returns whether neighbours in memory belong to different results."""
    strides = inputs[0][0] if inputs else ()
    return min((strides[d] for d in kept if strides[d]), default=1 << 62) < min(  # pyright: ignore[reportOperatorIssue]
        (strides[d] for d in dims if strides[d]), default=1 << 62
    )


def _row_address(strides, kept, size, address):
    """Returns what a row's address may be modulo 16."""
    return math.gcd(address, 16, *(strides[d] * size for d in kept)) % 16
