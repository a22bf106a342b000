"""The sections of every_kernel.py for linear algebra: device -> [(what, result)]."""

import itertools

import torch
from rows import FAMILIES, tuned
from section_inputs import random

import metalcore

QR_HEIGHTS = (1, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257, 512, 513, 1024, 1025, 2049)
QR_WIDTHS = (1, 3, 8, 9, 16, 17, 32, 33, 64, 65, 129)


def qr(device):
    """The smallest matrices whose plan takes a kernel that no plan before took."""
    taken = set()
    shapes = sorted(itertools.product(QR_HEIGHTS, QR_WIDTHS), key=lambda shape: shape[0] * shape[1])
    for family, mode, (m, n) in itertools.product(FAMILIES, ("reduced", "complete", "r"), shapes):
        with tuned(family):
            kernels = set(metalcore.explain("qr", (m, n), mode=mode).kernels)
            if not kernels <= taken:
                taken |= kernels
                for tensor in metalcore.qr(random(device, torch.float32, 3, m, n), mode):
                    yield f"qr {m}x{n} {mode}", tensor


def lstsq(device):
    for m, n, sides in ((50, 6, 2), (100, 6, 2), (200, 40, 5), (400, 20, 5), (2500, 6, 3)):
        A, B = random(device, torch.float32, 2, m, n), random(device, torch.float32, 2, m, sides)
        for tensor in metalcore.lstsq(A, B)[:2]:
            yield f"lstsq {m}x{n}", tensor


def cholesky(device):
    """The smallest matrices whose plan takes a kernel that no plan before took."""
    taken = set()
    for family, n in itertools.product(FAMILIES, (1, 5, 9, 17, 33, 65, 129, 257)):
        with tuned(family):
            kernels = set(metalcore.explain("cholesky", (n, n)).kernels)
            if not kernels <= taken:
                taken |= kernels
                a = metalcore.linalg.syrk(random(device, torch.float32, 3, n, n), torch.eye(n, device=device))
                for upper in (False, True):
                    yield f"cholesky {n}", metalcore.cholesky(a, upper=upper)


def lu(device):
    """Factorizations and solutions that take every kernel with the least work. The plan is the baseline's, since an
    NVIDIA GPU's plan leaves large matrices to PyTorch."""
    with tuned("baseline"):
        for m, n in (
            (1, 1),
            (2, 2),
            (3, 3),
            (4, 4),
            (7, 5),
            (12, 12),
            (30, 20),
            (40, 60),
            (100, 30),
            (170, 170),
            (520, 520),
            (1030, 20),
        ):
            A = random(device, torch.float32, 3, m, n)
            for part in metalcore.lu(A):
                yield f"lu {m}x{n}", part
        for n, right in (
            (4, 9),
            (8, 3),
            (8, 8),
            (12, 4),
            (12, 12),
            (32, 1),
            (32, 12),
            (32, 32),
            (40, 9),
            (64, 4),
            (170, 3),
        ):
            A, B = random(device, torch.float32, 3, n, n), random(device, torch.float32, 3, n, right)
            yield f"solve {n} {right}", metalcore.solve_ex(A, B)[0]
            LU, pivots, _ = metalcore.lu_factor_ex(A)
            yield f"lu_solve {n} {right}", metalcore.lu_solve(LU, pivots, B, adjoint=True)
            yield f"inv {n}", metalcore.inv_ex(A)[0]
            yield f"det {n}", metalcore.det(A / n)
        for rows in (513, 1025, 2049, 4097, 8193, 16385):
            yield f"lu_factor {rows}", metalcore.lu_factor_ex(random(device, torch.float32, rows, 5))[0]


def triangular(device):
    """The smallest systems whose plan takes a kernel that no plan before took."""
    taken = set()
    batches = {1: (1, 300), 3: (1,), 5: (3, 1024), 12: (3,), 20: (3,), 64: (512,), 128: (256,)}  # columns -> batches
    orders = (3, 9, 17, 33, 65, 129, 520, 1025)
    systems = sorted(
        ((n, k, batch) for k in batches for batch in batches[k] for n in orders),
        key=lambda system: system[0] * (system[0] + system[1]) * system[2],
    )
    for family, (n, k, batch) in itertools.product(FAMILIES, systems):
        with tuned(family):
            kernels = set(metalcore.explain("solve_triangular", (batch, n, n), (batch, n, k)).kernels)
            if not kernels <= taken:
                taken |= kernels
                A = torch.randn(batch, n, n) / n**0.5 / 2 + torch.eye(n)
                B = random(device, torch.float32, batch, n, k)
                yield f"solve_triangular {n} {k}", metalcore.solve_triangular(A.to(device), B, upper=True)


JACOBI_SIZES = (8, 16, 32, 64, 100)


def svd(device):
    for m, n in itertools.combinations_with_replacement(JACOBI_SIZES, 2):
        for full_matrices, compute_uv in ((False, True), (True, True), (False, False)):
            A = random(device, torch.float32, 3, m, n)
            A[1] = 0  # svd_complete makes its left singular vectors
            for tensor in torch.ops.metalcore.svd(A, full_matrices, compute_uv):
                yield f"svd {m}x{n}", tensor
    with tuned("apple7"):
        for n in (32, 64):
            for tensor in torch.ops.metalcore.svd(random(device, torch.float32, 3, n, n), False, True):
                yield f"svd {n}x{n}, few registers", tensor
    with tuned("baseline"):
        for batch in (1, 13):  # threadgroups share the rows of one matrix, and not those of 13
            for tensor in torch.ops.metalcore.svd(random(device, torch.float32, batch, 140, 140), False, True):
                yield f"svd {batch} 140x140", tensor
        for tensor in torch.ops.metalcore.svd(random(device, torch.float32, 1, 3072, 3072), False, True):
            yield "svd of wide blocks", tensor
    with tuned("hopper"):
        for tensor in torch.ops.metalcore.svd(random(device, torch.float32, 1, 512, 512), False, True):
            yield "svd by the polar decomposition", tensor


def eigh(device):
    for n, compute_v in itertools.product((*JACOBI_SIZES, 140), (True, False)):
        for tensor in torch.ops.metalcore.eigh(random(device, torch.float32, 3, n, n), "L", compute_v):
            yield f"eigh {n}x{n}", tensor
    for family, n in (("hopper", 600), ("hopper", 1100), ("baseline", 600)):
        with tuned(family):
            for tensor in torch.ops.metalcore.eigh(random(device, torch.float32, 1, n, n), "L", True):
                yield f"eigh {n}x{n}", tensor


def eigh_tridiagonal(device):
    for n, compute_v in itertools.product((20, 70), (True, False)):
        d, e = random(device, torch.float32, 3, n), random(device, torch.float32, 3, n - 1)
        for tensor in torch.ops.metalcore.eigh_tridiagonal(d, e, compute_v):
            yield f"eigh_tridiagonal {n}", tensor
    with tuned("hopper"):
        d, e = random(device, torch.float32, 8192, 9), random(device, torch.float32, 8192, 8)
        yield "eigh_tridiagonal, many values", torch.ops.metalcore.eigh_tridiagonal(d, e, False)[0]


def eig(device):
    for n, is_complex, compute_v in itertools.product((16, 32, 60, 65), (False, True), (True, False)):
        A = random(device, torch.float32, 3, n, n, 2)
        for tensor in torch.ops.metalcore.eig(torch.view_as_complex(A) if is_complex else A[..., 0], compute_v):
            yield f"eig {n}x{n}", tensor


def schur(device):
    for n, is_complex, sweeps in itertools.product((32, 60, 65), (False, True), (True, False)):
        A = random(device, torch.float32, 3, n, n, 2)
        for tensor in torch.ops.metalcore.schur(torch.view_as_complex(A) if is_complex else A[..., 0], sweeps):
            yield f"schur {n}x{n}", tensor


def ldl(device):
    for n, is_complex in itertools.product((20, 60, 65), (False, True)):
        A = random(device, torch.float32, 3, n, n, 2)
        factors = torch.ops.metalcore.ldl_factor_ex(torch.view_as_complex(A) if is_complex else A[..., 0], is_complex)
        for tensor in factors:
            yield f"ldl_factor {n}", tensor
        LD, pivots, _ = factors
        yield f"ldl_solve {n}", torch.ops.metalcore.ldl_solve(LD, pivots, LD, is_complex)


def matrix_functions(device):
    for n, is_complex in itertools.product((8, 16, 32, 40), (False, True)):
        A = random(device, torch.float32, 3, n, n, 2)
        A = torch.view_as_complex(A)
        yield f"matrix_exp {n}", torch.ops.metalcore.matrix_exp(A if is_complex else A.real)
        yield f"square root {n}", torch.ops.metalcore.square_root_triangular(A)
        yield f"sylvester {n}", torch.ops.metalcore.sylvester_triangular(A, A, A)


def complex_linalg(device):
    """The kernels of complex matrices."""

    def made(*shape):
        return torch.view_as_complex(random(device, torch.float32, *shape, 2))

    def all_of(what, results):
        yield from ((what, tensor) for tensor in results)

    ops = torch.ops.metalcore
    shapes = itertools.product((8, 16, 32), (8, 16, 32))
    for m, n in (*shapes, (60, 40), (100, 90), (250, 60), (500, 30), (1000, 15), (3, 0)):
        yield from all_of(f"qr {m}x{n}", ops.qr(made(3, m, n), "reduced" if n else "complete"))
    for m, n in ((8, 8), (16, 8), (16, 16), (32, 20), (60, 60), (100, 40), (100, 90)):
        for full_matrices, compute_uv in ((False, True), (True, True), (False, False)):
            A = made(3, m, n)
            A[1] = 0  # svd_complete makes its left singular vectors
            yield from all_of(f"svd {m}x{n}", ops.svd(A, full_matrices, compute_uv))
    for n, compute_v in itertools.product((8, 16, 32, 64, 100, 140, 600, 1100), (True, False)):
        yield from all_of(f"eigh {n}", ops.eigh(made(600 if n == 32 else 2, n, n), "L", compute_v))
    yield from all_of("eigh 32, few", (*ops.eigh(made(2, 32, 32), "L", True), *ops.eigh(made(2, 32, 32), "L", False)))
    for n in (4, 8, 16, 32, 64, 100):
        A = made(3, n, n)
        yield from all_of(f"cholesky {n}", ops.cholesky_ex(A @ A.mH, False))
    for n, columns in itertools.product((8, 16, 32, 40), (4, 16, 32, 100)):
        A, B = made(3, n, n) + 4 * torch.eye(n, device=device), made(3, n, columns)
        yield f"triangular {n} {columns}", ops.solve_triangular(A, B, False, True, False)
        yield from all_of(f"solve {n} {columns}", ops.solve_ex(A, B, True, False))
    for columns in (60, 128):
        A, B = made(300, 40, 40) + 4 * torch.eye(40, device=device), made(300, 40, columns)
        yield f"triangular, {columns} columns", ops.solve_triangular(A, B, False, True, False)
    yield from all_of("lu 60x12", ops.lu(made(3, 60, 12), True))
    for n in (8, 16, 32, 60, 100):
        A = made(3, n, n) / n**0.5  # determinants are finite
        for results in (ops.lu(A, True), ops.det(A), ops.slogdet(A), ops.inv_ex(A)):
            yield from all_of(f"lu {n}", results)


LINALG = (
    qr,
    lstsq,
    cholesky,
    lu,
    triangular,
    svd,
    eigh,
    eigh_tridiagonal,
    eig,
    schur,
    ldl,
    matrix_functions,
    complex_linalg,
)
