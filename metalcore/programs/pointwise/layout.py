"""How a kernel walks its tensors: dimensions that can be one become one, and the innermost is read in vectors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

TILE_THREADS = 256  # of a threadgroup


class Tile(NamedTuple):
    """A square of the two innermost dimensions, which a threadgroup computes.

    Attributes:
        side: elements.
        tensors: the numbers of those that lie across: dimension 1 is their innermost one. A threadgroup reads their
            squares along it, into memory that its threads share.
        vector: how many consecutive elements of these a thread reads at once.
    """

    side: int
    tensors: tuple[int, ...]
    vector: int

    @property
    def pitch(self) -> int:
        """From one row of a tile to the next: one element more, so that columns lie in different banks."""
        return self.side + 1

    def rows_apart(self, vector: int) -> int:
        """Returns the distance from one row of a thread to its next, where threads take vectors of a tile."""
        return TILE_THREADS * vector // self.side


class Layout(NamedTuple):
    """Sizes and strides from the innermost dimension outwards, in elements.

    Attributes:
        sizes: at least one.
        strides: for each tensor (outputs, then inputs), one per dimension.
        vector: how many consecutive elements a thread takes; then the innermost stride is 0 or 1 of each tensor that
            no tile has.
        wide: whether indices need 64 bits.
        rows: from how many places of dimension 1 a thread takes them.
        tile: what a threadgroup computes, if tensors lie across.
    """

    sizes: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]
    vector: int
    wide: bool
    rows: int = 1
    tile: Tile | None = None

    @property
    def in_rows(self) -> bool:
        """Whether a thread walks over rows."""
        return self.rows > 1 or self.tile is not None

    @property
    def threads(self) -> tuple[int, int, int]:
        outer = (*self.sizes[1:], 1, 1)
        if self.tile:
            across, along = (-(-size // self.tile.side) for size in (self.sizes[0], outer[0]))
            return across * TILE_THREADS, along, math.prod(outer[1:])
        return -(-self.sizes[0] // self.vector), -(-outer[0] // self.rows), math.prod(outer[1:])

    @property
    def threadgroup(self) -> tuple[int, int, int]:
        if self.tile:
            return TILE_THREADS, 1, 1
        # A square, where a tensor's neighbours lie across: threads beside each other then share its cache lines.
        across = len(self.sizes) > 1 and any(of[0] > 1 and of[1] == 1 for of in self.strides)
        left, group = 256, []
        for size in self.threads:
            group.append(min(left, 16 if across else left, 1 << max(0, size - 1).bit_length()))
            left //= group[-1]
        return group[0], group[1], min(group[2], 64)

    @property
    def numbers(self) -> list[int]:
        """What the kernel is told: the sizes, and each tensor's strides."""
        return [*self.sizes, *(stride for strides in self.strides for stride in strides)]


def layout(
    shape: Sequence[int], tensors: Sequence[tuple[Sequence[int], int, int]], *, row_major: bool = False
) -> Layout:
    """Returns the layout of tensors that are all expanded to a shape without zeros.

    Args:
        tensors: (strides, element size in bytes, address modulo 16) of each. The walk is in the first one's order.
        row_major: walk in the order of the dimensions instead.
    """
    sizes, strides = collapsed(shape, [strides for strides, _, _ in tensors], row_major)
    extents = (sum((size - 1) * stride for size, stride in zip(sizes, of)) for of in strides)
    wide = max(math.prod(sizes), *extents) >= 1 << 31
    return Layout(sizes, strides, vector_of(sizes, strides, tensors), wide)


def collapsed(shape, strides, row_major=False):
    """Returns the sizes and each tensor's strides, from the innermost dimension outwards, where neighbours that can be
    one dimension are one."""
    first = [0] * len(shape) if row_major or not strides else strides[0]
    order = sorted((d for d in range(len(shape)) if shape[d] != 1), key=lambda d: (first[d], -d))
    sizes: list[int] = []
    collapsed_strides: list[list[int]] = [[] for _ in strides]
    for d in order:
        if sizes and all(of[d] == inner[-1] * sizes[-1] for of, inner in zip(strides, collapsed_strides)):
            sizes[-1] *= shape[d]
            continue
        sizes.append(shape[d])
        for of, inner in zip(strides, collapsed_strides):
            inner.append(of[d])
    if not sizes:
        return (1,), tuple((0,) for _ in strides)
    return tuple(sizes), tuple(map(tuple, collapsed_strides))


def vector_of(
    sizes: Sequence[int],
    strides: Sequence[Sequence[int]],
    tensors: Sequence[tuple[Sequence[int], int, int]],
    most: int = 16,
) -> int:
    """Returns 16 bytes of the smaller dtypes; fewer elements where rows or addresses are not multiples of that."""
    read = [(of, size, address) for of, (_, size, address) in zip(strides, tensors) if of[0]]
    if any(of[0] != 1 for of, _, _ in read):
        return 1
    if not read:
        return 1
    smallest, largest = min(size for _, size, _ in read), max(size for _, size, _ in read)
    preferred = min(most, 16 if largest == 1 else 8 if smallest <= 2 and len(read) <= 8 else 4)
    for vector in (16, 8, 4):
        rows = len(sizes) == 1 or sizes[0] % vector == 0
        aligned = all(
            address % min(16, size * vector) == 0 and all(stride % vector == 0 for stride in of[1:])
            for of, size, address in read
        )
        if vector <= preferred and rows and aligned and sizes[0] >= vector:
            return vector
    return 1


def geometry(tensor: torch.Tensor, shape: Sequence[int]) -> tuple[tuple[int, ...], int, int]:
    """Returns the strides of a tensor expanded to a shape, its element size and its address modulo 16."""
    missing = len(shape) - tensor.dim()
    own = zip(tensor.shape, tensor.stride(), shape[missing:])
    strides = (*(0,) * missing, *(0 if size != wanted else stride for size, stride, wanted in own))
    address = tensor.storage_offset() * tensor.element_size() if tensor.is_meta else tensor.data_ptr()
    return strides, tensor.element_size(), address % 16  # pyright: ignore[reportReturnType]
