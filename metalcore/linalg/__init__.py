"""Linear algebra with the arguments, results and errors of torch.linalg."""

from ._qr import qr

__all__ = ["qr"]
