"""Cholesky factorization of batches and of single matrices, against torch.linalg.cholesky_ex."""

import math

import torch

import metalcore

from ..harness.case import Comparison, size_text

# With the least speedup that is wanted: nowhere may a call take more than 1.1 times PyTorch's time.
NO_SLOWER = 1 / 1.1
SIZES = (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
BATCHES = (1, 16, 256, 1024, 4096, 16384)
LARGEST = 2**28  # entries in a batch: a gigabyte
WANTED = {(4096, 32, 32): 2, (1024, 128, 128): 2}
SHAPES = {
    "gpu": {(batch, n, n): WANTED.get((batch, n, n), NO_SLOWER) for n in SIZES for batch in BATCHES
            if batch * n * n <= LARGEST},
    "cpu": dict.fromkeys([(1024, 8, 8), (256, 16, 16), (64, 32, 32), (8, 128, 128), (512, 512)]),
    "quick": dict.fromkeys([(8, 8, 8), (2, 64, 64)]),
}


def cases(scale):
    return [case(shape, least) for shape, least in SHAPES[scale].items()]


def case(shape, least):
    return Comparison(
        name="cholesky", shape=size_text(shape), dtype=torch.float32, ours=metalcore.cholesky_ex,
        theirs=torch.linalg.cholesky_ex, inputs=lambda device: (positive_definite(shape, device),),
        bytes=least_bytes(shape), flops=flops(shape),
        graph=False,  # torch's op of a batch allocates arrays of pointers on the host; that is part of its time
        variant=lambda a: metalcore.explain("cholesky", a).variant, targets={"speedup": least} if least else {})


def positive_definite(shape, device):
    a = torch.randn(shape, device=device)
    return a @ a.mT / shape[-1] + torch.eye(shape[-1], device=device)


def least_bytes(shape):
    """One triangle of A read, the whole of L written, in float32."""
    *batch, n, _ = shape
    return 4 * math.prod(batch) * (n * (n + 1) // 2 + n * n)


def flops(shape):
    """n³/3 (Golub and Van Loan, Matrix Computations, 4.2)."""
    *batch, n, _ = shape
    return round(math.prod(batch) * n**3 / 3)
