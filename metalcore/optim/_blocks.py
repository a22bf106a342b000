"""Parameters as batches of matrices of one shape."""

from __future__ import annotations

import torch

__all__ = ["Blocks"]


class Blocks:
    """How a parameter is divided into blocks, none with a side longer than `longest`. Its rows are its first dimension,
    and its columns all others. Blocks have one shape: zeros fill what the last ones lack.

    Attributes:
        shape: of a block.
        count: how many there are.
    """

    def __init__(self, size: torch.Size, longest: int):
        self._size = size
        self._sides = size[0], size[1:].numel()
        self._counts = [-(-side // longest) for side in self._sides]
        self.shape = tuple(-(-side // count) for side, count in zip(self._sides, self._counts))
        self.count = self._counts[0] * self._counts[1]

    def split(self, tensor: torch.Tensor) -> torch.Tensor:
        """(count, *shape)."""
        matrix = tensor.reshape(self._sides)
        if self.count == 1:
            return matrix.unsqueeze(0)
        (down, across), (m, n) = self._counts, self.shape
        rows, columns = self._sides
        padded = torch.nn.functional.pad(matrix, (0, across * n - columns, 0, down * m - rows))
        return padded.view(down, m, across, n).transpose(1, 2).reshape(self.count, m, n)

    def join(self, blocks: torch.Tensor) -> torch.Tensor:
        """The tensor that `split` divided."""
        (down, across), (m, n) = self._counts, self.shape
        rows, columns = self._sides
        whole = blocks.view(down, across, m, n).transpose(1, 2).reshape(down * m, across * n)
        return whole[:rows, :columns].reshape(self._size)
