"""Eigenvalues and singular values of batches and of single matrices, and functions that use them."""

import functools

import torch

import metalcore

from ...harness.case import family
from .decompositions import NO_SLOWER, matrices


@family
def eig(scale):
    """Eigenvalues and eigenvectors of general matrices, batches and single ones, against torch.linalg.eig."""
    words = {
        "gpu": "1024x32x32=50 1024x64x64=50 4096x8x8 1024x16x16 64x100x100 16x128x128 32x32 64x64 128x128 256x256",
        "simulator": "256x8x8 64x16x16 16x32x32 2x64x64",
        "quick": "8x8x8 2x40x40",
    }
    return matrices(
        "eig",
        words[scale],
        numbers=lambda m, n, sides: n * (3 * n + 2),  # L and V are complex
        least=NO_SLOWER if scale == "gpu" else None,
    )


def symmetric(device, shape, sides):
    A = torch.randn(shape, device=device)
    return (A + A.mT,)


@family
def eigh(scale):
    """Eigenvalues and eigenvectors of symmetric matrices, batches and single ones, against torch.linalg.eigh."""
    words = {
        "gpu": "4096x16x16=2 16384x32x32=2 1024x64x64=100 4096x4x4 16384x8x8 64x24x24 64x128x128 1x16x16 1x32x32"
        " 1x64x64 128x128 512x512 1024x1024 2048x2048=1.5 4096x4096=1.5",
        "simulator": "256x8x8 64x16x16 16x32x32 2x64x64",
        "quick": "8x8x8 2x40x40",
    }
    return matrices(
        "eigh",
        words[scale],
        inputs=symmetric,
        numbers=lambda m, n, sides: n * (2 * n + 1),
        least=NO_SLOWER if scale == "gpu" else None,
    )


def svd_numbers(m, n, sides):
    """Counts the numbers that the op moves: it reads A, and writes U, S and Vh."""
    k = min(m, n)
    return m * n + m * k + k + k * n


@family
def svd(scale):
    """Times reduced SVD of batches and of single matrices, against torch.linalg.svd."""
    words = {
        "gpu": "4096x32x32=2 16384x16x16=3 256x128x64=100 1024x64x64=100 4096x4x4 16384x8x8 64x24x24 64x128x128"
        " 4096x48x16 1x16x16 1x32x32 1x64x64 128x128 1000x32 1024x1024 2048x2048 4096x4096=3",
        "simulator": "256x8x8 64x16x16 16x32x32 2x64x64",
        "quick": "8x8x8 2x40x24",
    }
    reduced = {"full_matrices": False}
    return matrices(
        "svd",
        words[scale],
        ours=functools.partial(metalcore.svd, **reduced),
        theirs=functools.partial(torch.linalg.svd, **reduced),
        numbers=svd_numbers,
        options=reduced,
        least=NO_SLOWER if scale == "gpu" else None,
    )


@family
def spectral(scale):
    """Functions that use singular values or eigenvalues: pinv, matrix_rank, cond, svd_lowrank."""
    words = {
        "gpu": "16384x16x16 4096x32x32 1024x64x64 256x128x64 512x512",
        "simulator": "256x8x8 64x32x32",
        "quick": "2x8x8",
    }
    square = {"gpu": "16384x16x16 4096x32x32 1024x64x64 512x512", "simulator": "256x8x8 64x32x32", "quick": "2x8x8"}
    # The shapes are those of weight matrices.
    weights = {"gpu": "4096x4096 11008x4096 64x1024x256", "simulator": "512x256", "quick": "40x20"}
    wanted = {"least": NO_SLOWER, "options": None}
    ours, theirs = (functools.partial(function, hermitian=True) for function in (metalcore.pinv, torch.linalg.pinv))
    comparisons = [
        *matrices("pinv", words[scale], **wanted),
        *matrices("pinv", square[scale], label="pinv, hermitian", ours=ours, theirs=theirs, **wanted),
        *matrices("matrix_rank", words[scale], **wanted),
        *matrices("cond", words[scale], **wanted),
    ]
    for q in (6, 32) if scale == "gpu" else (6,):
        ours, theirs = (functools.partial(function, q=q) for function in (metalcore.svd_lowrank, torch.svd_lowrank))
        label = f"svd_lowrank of rank {q}"
        comparisons += matrices("svd_lowrank", weights[scale], label=label, ours=ours, theirs=theirs, **wanted)
    return comparisons
