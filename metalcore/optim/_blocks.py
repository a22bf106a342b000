"""Parameters as batches of matrices of one shape."""

from __future__ import annotations

import torch

from .._core.tensors import beside, whole

__all__ = ["Blocks"]


class Blocks:
    """How a parameter is divided into blocks, none with a side longer than `longest`. Its rows are its first dimension,
    and its columns all others. Blocks have one shape: zeros fill what the last ones lack.

    Attributes:
        shape: of a block.
        count: how many there are.
        mesh: over which they are divided, where the parameter is a DTensor, or None.
        here: how many of them this rank has.
    """

    def __init__(self, size: torch.Size, longest: int, mesh=None):
        self._size, self.mesh = size, mesh
        self._sides = size[0], size[1:].numel()
        self._counts = [-(-side // longest) for side in self._sides]
        self.shape = tuple(-(-side // count) for side, count in zip(self._sides, self._counts))
        self.count = self.here = self._counts[0] * self._counts[1]
        self._owned = None
        if mesh is not None:
            from ..distributed.matrices import Owned

            self._owned = Owned(mesh, self.count)
            self.here = self._owned.here

    def split(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns (here, *shape)."""
        blocks = self._split(whole(tensor))
        return blocks if self._owned is None else self._owned.part(blocks)

    def _split(self, tensor):
        matrix = tensor.reshape(self._sides)
        if self.count == 1:
            return matrix.unsqueeze(0)
        (down, across), (m, n) = self._counts, self.shape
        rows, columns = self._sides
        padded = torch.nn.functional.pad(matrix, (0, across * n - columns, 0, down * m - rows))
        return padded.view(down, m, across, n).transpose(1, 2).reshape(self.count, m, n)

    def kept(self, part: torch.Tensor) -> torch.Tensor:
        """Returns blocks in the form in which a state has them."""
        return part if self._owned is None else self._owned.state(part)

    def join(self, part: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        """Returns the tensor that `split` divided, placed as the parameter."""
        if self._owned is None:
            return self._join(part)
        return beside(p, self._join(self._owned.whole(part))).redistribute(p.device_mesh, p.placements)  # pyright: ignore

    def _join(self, blocks):
        (down, across), (m, n) = self._counts, self.shape
        rows, columns = self._sides
        whole = blocks.view(down, across, m, n).transpose(1, 2).reshape(down * m, across * n)
        return whole[:rows, :columns].reshape(self._size)
