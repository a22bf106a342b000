"""Decompositions of batches and of single matrices, and what uses them, against torch.linalg's functions."""

import functools
import math

import torch

import metalcore

from ...harness.case import Comparison, family, size_text

NO_SLOWER = 1 / 1.1


def sizes(text):
    """Yields (shape, right sides, least speedup or None) of each word such as `2048x2048`, `4096x32x32=2` or
    `64x8x8,3`."""
    for word in text.split():
        size, _, least = word.partition("=")
        shape, _, sides = size.partition(",")
        over, _, under = least.partition("/")
        yield tuple(map(int, shape.split("x"))), int(sides or 0), float(over) / float(under or 1) if over else None


def normal(device, shape, sides):
    """Returns A and, where there are right sides, B."""
    return tuple(torch.randn(size, device=device) for size in (shape, *([(*shape[:-1], sides)] if sides else [])))


def matrices(
    name, words, *, ours=None, theirs=None, inputs=normal, numbers=None, flops=None, least=None, label=None, **more
):
    """Returns a comparison of an op with its namesake in torch.linalg for each size in a text.

    Args:
        inputs: (device, shape, sides) -> the tensors.
        numbers: (m, n, sides) -> how many float32 numbers a matrix makes the op read and write at least.
        flops: (m, n, sides) -> the operations for a matrix.
        least: the speedup that is wanted of sizes that do not say it.
        label: what cases are named, in place of the op.
        more: `sides_text` for the shape; `options` of explain, or None where the op has no variants; the `dtype`.
    """

    def case(shape, sides, bound, sides_text=", {}", options=(), dtype=torch.float32):
        *batch, m, n = shape
        bound, count = bound or least, math.prod(batch)
        return Comparison(
            name=label or name,
            shape=size_text(shape) + (sides_text.format(sides) if sides else ""),
            dtype=dtype,
            ours=ours or getattr(metalcore, name),
            theirs=theirs or getattr(torch.linalg, name),
            inputs=lambda device: inputs(device, shape, sides),
            bytes=4 * count * numbers(m, n, sides) if numbers else 0,
            flops=round(count * flops(m, n, sides)) if flops else 0,
            # PyTorch's functions call cuSOLVER for each matrix, set up pointers or wait, and the host's part counts.
            graph=False,
            variant=None if options is None else lambda *x: metalcore.explain(name, *x, **dict(options)).variant,
            targets={"speedup": bound} if bound else {},
        )

    return [case(*size, **more) for size in sizes(words)]


def positive_definite(device, shape, sides):
    a = torch.randn(shape, device=device)
    return (a @ a.mT / shape[-1] + torch.eye(shape[-1], device=device),)


@family
def cholesky(scale):
    """Times Cholesky factorization of batches and of single matrices, against torch.linalg.cholesky_ex."""
    # linalg_map has all sizes and batches.
    words = {
        "gpu": "4096x32x32=2 1024x128x128=2 16384x8x8 16384x16x16 4096x64x64 256x256x256 64x512x512 16x1024x1024"
        " 512x512 2048x2048",
        "simulator": "1024x8x8 256x16x16 64x32x32 8x128x128 512x512",
        "quick": "8x8x8 2x64x64",
    }
    return matrices(
        "cholesky",
        words[scale],
        ours=metalcore.cholesky_ex,
        theirs=torch.linalg.cholesky_ex,
        inputs=positive_definite,
        numbers=lambda m, n, sides: n * (n + 1) // 2 + n * n,  # one triangle of A, and the whole of L
        flops=lambda m, n, sides: n**3 / 3,  # Golub and Van Loan, Matrix Computations, 4.2
    )


def qr_numbers(m, n, sides):
    """Counts the numbers that the op moves: it reads A, and writes Q and R."""
    k = min(m, n)
    return m * n + m * k + k * n


def qr_flops(m, n, sides):
    """Counts operations: the factorization and the reduced Q (Golub and Van Loan, Matrix Computations, 5.2)."""
    k = min(m, n)
    factor = 4 * m * n * k - 2 * (m + n) * k**2 + 4 * k**3 / 3
    return factor + 2 * m * k**2 - 2 * k**3 / 3


@family
def qr(scale):
    """Times reduced QR of batches and of single matrices, against torch.linalg.qr."""
    words = {
        "gpu": "16384x16x16=1500 4096x32x32=600 16384x64x32=300 1024x128x128=40 4096x8x8 1024x48x48 256x128x64"
        " 64x256x256 512x512 1024x1024 2048x2048=1/1.5 4096x4096 4000x36=1 100000x16 64x2048",
        "simulator": "1024x8x8 256x16x16 64x32x32 16x128x64 8x128x128 4000x36 512x512",
        "quick": "8x8x8 2x64x32",
    }
    return matrices("qr", words[scale], numbers=qr_numbers, flops=qr_flops)


def reflectors(device, shape, sides):
    return tuple(x.to(device) for x in metalcore.geqrf(torch.randn(shape, device=device)))


def reflectors_and_target(device, shape, sides):
    return *reflectors(device, shape, sides), torch.randn(shape, device=device)


@family
def householder(scale):
    """Times reflectors of batches and single matrices: geqrf, householder_product, ormqr, against PyTorch's."""
    words = {
        "gpu": "16384x8x8 4096x32x32 1024x128x128 64x256x256 512x512 1024x1024 2048x2048 2048x64",
        "simulator": "256x16x16 16x128x64 512x512",
        "quick": "8x8x8",
    }

    def flops(m, n, sides):
        return 2 * m * n**2 - 2 * n**3 / 3  # Golub and Van Loan, Matrix Computations, 5.2; m >= n

    two = {"numbers": lambda m, n, sides: 2 * m * n, "flops": flops, "least": NO_SLOWER}
    three = {
        "numbers": lambda m, n, sides: 3 * m * n,
        "flops": lambda m, n, sides: 4 * m * n**2 - 2 * n**3,
        "least": NO_SLOWER,
    }
    return [
        case
        for word in words[scale].split()
        for case in (
            *matrices("geqrf", word, theirs=torch.geqrf, **two),
            *matrices("householder_product", word, inputs=reflectors, **two),
            *matrices("ormqr", word, theirs=torch.ormqr, inputs=reflectors_and_target, **three),
        )
    ]


@family
def lstsq(scale):
    """Times least squares of full rank, against torch.linalg.lstsq; drivers that find the rank have a CPU's only."""
    words = {
        "gpu": "100000x6,3=1 1000000x6,3=1 100000x16,1=1 100000x32,1=1 20000x60,4 3000x4,1 4096x16x8,1=1 1024x64x16,2=1"
        " 256x128x64,64=1 1024x256x128,1",
        "simulator": "20000x6,3 256x16x8,1 8x128x64,64",
        "quick": "2000x6,3 4x16x8,1",
    }
    return matrices(
        "lstsq",
        words[scale],
        ours=lambda A, B: metalcore.lstsq(A, B)[:2],
        theirs=lambda A, B: torch.linalg.lstsq(A, B)[:2],
        numbers=lambda m, n, sides: m * (n + sides) + n * sides,
        # Golub and Van Loan, Matrix Computations, 5.3: the reflectors of A, applied to B as well.
        flops=lambda m, n, sides: 2 * n * n * (m - n / 3) + 4 * m * n * sides,
        sides_text=" {} sides",
    )


def well_conditioned(device, shape, sides):
    n = shape[-1]
    A, B = normal(device, shape, sides)
    return A / n**0.5 + 2 * torch.eye(n, device=device), B


@family
def solve_triangular(scale):
    """Times triangular systems of batches and single matrices, against torch.linalg.solve_triangular."""
    words = {
        "gpu": "16384x4x4,1 16384x16x16,16 4096x32x32,1 4096x32x32,32 1024x64x64,1 1024x64x64,64 1024x128x128,1"
        " 1024x128x128,128 128x256x256,256 16x512x512,512 16x1024x1024,1 128x128,128 512x512,1 512x512,512 2048x2048,1"
        " 2048x2048,2048",
        "simulator": "1024x8x8,8 64x32x32,32 8x128x128,128 300x300,1",
        "quick": "8x8x8,1 2x40x40,8",
    }
    return matrices(
        "solve_triangular",
        words[scale],
        ours=functools.partial(metalcore.solve_triangular, upper=False),
        theirs=functools.partial(torch.linalg.solve_triangular, upper=False),
        inputs=well_conditioned,
        numbers=lambda m, n, sides: n * (n + 1) // 2 + 2 * n * sides,
        flops=lambda m, n, sides: n * n * sides,
        least=NO_SLOWER if scale == "gpu" else None,
    )


def factors(device, shape, sides):
    A, B = normal(device, shape, sides)
    return *torch.linalg.lu_factor(A), B


# Matrices that are read and written beside B and X: A, and LU, or P, L and U, or the inverse.
LU_MATRICES = {"lu_factor": 2, "lu": 4, "inv": 2}


def lu_flops(name, n, sides):
    """Counts operations: the factorization, and two triangular systems for each column of B or of the identity (Golub
    and Van Loan, Matrix Computations, 3.2 and 3.1)."""
    factor = 0 if name == "lu_solve" else 2 * n**3 / 3
    return factor + (4 * n**3 / 3 if name == "inv" else 2 * n * n * sides)


@family
def lu(scale):
    """Times LU factorizations, solutions, inverses and determinants of batches and matrices, against torch.linalg's."""
    words = {
        "gpu": (
            ("solve", "4096x32x32,1=2 4096x32x32,32=2 1024x128x128,1=2 1024x128x128,128=2"),
            ("inv", "100000x3x3=5"),
            ("lu_factor", "16384x4x4=1 16384x16x16=1 4096x32x32=1 1024x64x64=1 1024x128x128=1 128x256x256=1"),
            ("lu_factor", "16x512x512=1 512x512 2048x2048"),
            ("lu", "1024x64x64"),
            ("solve", "16384x4x4,1 128x256x256,1 2048x2048,1"),
            ("lu_solve", "1024x64x64,1 128x256x256,16"),
            ("inv", "4096x32x32 1024x128x128 1024x1024"),
            ("det", "16384x8x8"),
            ("slogdet", "1024x128x128"),
        ),
        "simulator": (
            ("lu_factor", "256x16x16 16x100x100 300x300"),
            ("solve", "256x16x16,4 16x100x100,1"),
            ("inv", "4096x3x3"),
        ),
        "quick": (
            ("lu_factor", "8x8x8"),
            ("solve", "2x40x40,3"),
            ("lu_solve", "2x8x8,1"),
            ("inv", "8x3x3"),
            ("det", "4x5x5"),
        ),
    }
    return [
        case
        for name, text in words[scale]
        for case in matrices(
            name,
            text,
            inputs=factors if name == "lu_solve" else normal,
            numbers=lambda m, n, sides, name=name: n * n * LU_MATRICES.get(name, 1) + 2 * n * sides,
            flops=lambda m, n, sides, name=name: lu_flops(name, n, sides),
            least=NO_SLOWER if scale == "gpu" else None,
        )
    ]
