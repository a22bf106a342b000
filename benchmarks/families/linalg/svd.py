"""Reduced SVD of batches and of single matrices, against torch.linalg.svd."""

import functools
import math

import torch

import metalcore

from ...harness.case import Comparison, size_text

LEAST = 1 / 1.1

# Each shape has the least speedup that is wanted.
SHAPES = {
    "gpu": {
        (4096, 32, 32): 2,
        (16384, 16, 16): 3,
        (256, 128, 64): 100,
        (1024, 64, 64): 100,
        (4096, 4, 4): LEAST,
        (16384, 8, 8): LEAST,
        (64, 24, 24): LEAST,
        (64, 128, 128): LEAST,
        (4096, 48, 16): LEAST,
        (1, 16, 16): LEAST,
        (1, 32, 32): LEAST,
        (1, 64, 64): LEAST,
        (128, 128): LEAST,
        (1000, 32): LEAST,
    },
    "simulator": dict.fromkeys([(256, 8, 8), (64, 16, 16), (16, 32, 32), (2, 64, 64)]),
    "quick": dict.fromkeys([(8, 8, 8), (2, 40, 24)]),
}


def cases(scale):
    return [case(shape, least) for shape, least in SHAPES[scale].items()]


def case(shape, least):
    return Comparison(
        name="svd",
        shape=size_text(shape),
        dtype=torch.float32,
        ours=functools.partial(metalcore.svd, full_matrices=False),
        theirs=functools.partial(torch.linalg.svd, full_matrices=False),
        inputs=lambda device: (torch.randn(shape, device=device),),
        bytes=least_bytes(shape),
        graph=False,  # torch.linalg.svd calls cuSOLVER for each matrix, and the host's part counts
        variant=lambda a: metalcore.explain("svd", a, full_matrices=False).variant,
        targets={"speedup": least} if least else {},
    )


def least_bytes(shape):
    """The op reads A, and writes U, S and Vh, in float32."""
    *batch, m, n = shape
    k = min(m, n)
    return 4 * math.prod(batch) * (m * n + m * k + k + k * n)
