"""Decompositions of complex matrices, and systems with them."""

import functools

import torch

import metalcore

from ...harness.case import family
from .decompositions import NO_SLOWER, matrices


def normal(device, shape, sides):
    """Returns A and, where there are right sides, B."""
    sizes = (shape, *([(*shape[:-1], sides)] if sides else []))
    return tuple(torch.randn(size, dtype=torch.complex64, device=device) for size in sizes)


def hermitian(device, shape, sides):
    (A,) = normal(device, shape, 0)
    return (A + A.mH,)


def positive_definite(device, shape, sides):
    (A,) = normal(device, shape, 0)
    return (A @ A.mH / shape[-1] + torch.eye(shape[-1], device=device),)


@family
def complex_linalg(scale):
    """Times qr, svd, eigh, cholesky, solve and inv of complex64 batches and matrices, against torch.linalg's."""
    words = {
        "gpu": "4096x8x8{0} 1024x16x16{0} 1024x32x32{0} 256x64x64{0} 32x32{0} 64x64{0}",
        "simulator": "64x8x8{0} 16x32x32{0}",
        "quick": "8x8x8{0}",
    }[scale]
    reduced = {"full_matrices": False}
    svd = {
        "ours": functools.partial(metalcore.svd, **reduced),
        "theirs": functools.partial(torch.linalg.svd, **reduced),
    }
    cases = (
        ("qr", {"inputs": normal}),
        ("svd", {"inputs": normal, "options": reduced, **svd}),
        ("eigh", {"inputs": hermitian}),
        ("cholesky_ex", {"inputs": positive_definite}),
        ("solve_ex", {"inputs": normal}),
        ("inv_ex", {"inputs": normal}),
    )
    comparisons = []
    for name, more in cases:
        text = words.format(",4" if name == "solve_ex" else "")
        least = NO_SLOWER if scale == "gpu" else None
        comparisons += matrices(name, text, label=name, dtype=torch.complex64, least=least, **more)
    return comparisons
