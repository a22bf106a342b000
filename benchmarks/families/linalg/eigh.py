"""Eigenvalues and eigenvectors of symmetric matrices, batches and single ones, against torch.linalg.eigh."""

import math

import torch

import metalcore

from ...harness.case import Comparison, size_text

LEAST = 1 / 1.1

# Each shape has the least speedup that is wanted.
SHAPES = {
    "gpu": {
        (4096, 16, 16): 2,
        (16384, 32, 32): 2,
        (1024, 64, 64): 100,
        (4096, 4, 4): LEAST,
        (16384, 8, 8): LEAST,
        (64, 24, 24): LEAST,
        (64, 128, 128): LEAST,
        (1, 16, 16): LEAST,
        (1, 32, 32): LEAST,
        (1, 64, 64): LEAST,
        (128, 128): LEAST,
    },
    "simulator": dict.fromkeys([(256, 8, 8), (64, 16, 16), (16, 32, 32), (2, 64, 64)]),
    "quick": dict.fromkeys([(8, 8, 8), (2, 40, 40)]),
}


def cases(scale):
    return [case(shape, least) for shape, least in SHAPES[scale].items()]


def case(shape, least):
    return Comparison(
        name="eigh",
        shape=size_text(shape),
        dtype=torch.float32,
        ours=metalcore.eigh,
        theirs=torch.linalg.eigh,
        inputs=lambda device: (symmetric(shape, device),),
        bytes=4 * math.prod(shape[:-1]) * (2 * shape[-1] + 1),
        graph=False,  # torch.linalg.eigh calls cuSOLVER for each matrix, and the host's part counts
        variant=lambda a: metalcore.explain("eigh", a).variant,
        targets={"speedup": least} if least else {},
    )


def symmetric(shape, device):
    A = torch.randn(shape, device=device)
    return A + A.mT
