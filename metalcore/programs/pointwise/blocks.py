"""How much a thread and a threadgroup of an elementwise kernel take: rows, and tiles of operands that lie across."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .layout import Layout, Tile, vector_of

LARGE_SIDE, SMALL_SIDE = 64, 32  # of a tile
MOST_MEMORY = 32 << 10  # bytes of a threadgroup
# Measured on an H200: caches are as good for tensors that are smaller or narrower, and small tiles are better for those
# that have few large ones.
LEAST_IN_TILES = 1 << 16  # elements of a kernel
LEAST_IN_LARGE_TILES = 1 << 21
LEAST_ACROSS = 16  # of both dimensions of a tile
LEAST_THREADS = 1 << 20  # that are left where each takes several rows
ROWS, ROWS_OF_16_BITS, ROWS_OF_ELEMENTS = 2, 4, 8  # of vectors, and of elements that are no vectors


def blocked(plain: Layout, tensors: Sequence[tuple[Sequence[int], int, int]], outputs: int) -> Layout:
    """Returns a layout with tiles or with several rows a thread, where that pays.

    Args:
        tensors: as for layout().
        outputs: how many of them are.
    """
    across = _across(plain, outputs)
    return _with_tile(plain, tensors, across) if across else plain._replace(rows=_rows(plain, tensors, outputs))


def tile_bytes(side: int, size: int) -> int:
    """Returns the memory of a tile."""
    return side * Tile(side, (), 1).pitch * size


def _across(plain, outputs):
    """Returns the numbers of the inputs that lie across, in one dimension, where tiles pay."""
    sizes, dimensions = plain.sizes, {}
    if math.prod(sizes) < LEAST_IN_TILES or sizes[0] < LEAST_ACROSS:
        return ()
    for k, of in enumerate(plain.strides):
        if k >= outputs and of[0] > 1 and 1 in of and sizes[of.index(1)] >= LEAST_ACROSS:
            dimensions.setdefault(of.index(1), []).append(k)
    return max(dimensions.values(), key=len, default=())


def _with_tile(plain, tensors, across):
    """Returns the layout whose dimension 1 is the innermost one of some tensors, with tiles of as many as there is
    memory for."""
    second = plain.strides[across[0]].index(1)
    order = [0, second, *(d for d in range(1, len(plain.sizes)) if d != second)]
    sizes = tuple(plain.sizes[d] for d in order)
    strides = tuple(tuple(of[d] for d in order) for of in plain.strides)

    def vector(first, chosen, most):
        """Returns how many elements of some tensors are read at once along one of the two innermost dimensions."""
        order = [first, 1 - first, *range(2, len(sizes))]
        own = [[strides[k][d] for d in order] for k in chosen]
        return vector_of([sizes[d] for d in order], own, [tensors[k] for k in chosen], most)

    def fitting(side):
        total = [sum(tile_bytes(side, tensors[k][1]) for k in across[: j + 1]) for j in range(len(across))]
        return tuple(k for k, size in zip(across, total) if size <= MOST_MEMORY)

    is_large = math.prod(sizes) >= LEAST_IN_LARGE_TILES and min(sizes[:2]) > SMALL_SIDE
    is_large = is_large and vector(1, across, 4) > 1 and fitting(LARGE_SIDE) == tuple(across)
    side = LARGE_SIDE if is_large else SMALL_SIDE
    read = fitting(side)
    own = vector(0, [k for k in range(len(tensors)) if k not in read], side // 8)
    tile = Tile(side, read, vector(1, read, side // 8))
    return Layout(sizes, strides, own, plain.wide, side // tile.rows_apart(own), tile)


def _rows(plain, tensors, outputs):
    """Returns how many rows a thread takes: several, where it reads some operands once for all of its rows. With more
    operands for each row, or more rows, a thread would need too many registers."""
    if len(plain.sizes) < 2 or any(of[0] > 1 for of in plain.strides):
        return 1
    inputs = [of for of in plain.strides[outputs:] if of[0]]
    of_row = [of for of in inputs if of[1]]
    if not 0 < len(of_row) < len(inputs):
        return 1
    of_16_bits = max(size for _, size, _ in tensors) == 2
    rows = ROWS_OF_ELEMENTS if plain.vector == 1 else ROWS_OF_16_BITS if of_16_bits else ROWS
    rows //= len(of_row)
    while rows > 1 and math.prod(plain.threads) < rows * LEAST_THREADS:
        rows //= 2
    return max(rows, 1)
