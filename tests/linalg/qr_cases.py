"""Matrices that a QR decomposition must cope with, and what it must fulfil."""

import torch
from rows import changes, tuned

import metalcore

EPS = torch.finfo(torch.float32).eps

# Below, at and above every boundary between the variants: (m, n), mode -> variant.
SHAPES = {
    "simd": [(1, 1), (2, 3), (7, 8), (8, 8), (8, 9), (9, 5), (16, 16), (17, 16), (3, 17), (32, 32), (33, 32), (64, 32),
             (64, 1)],
    "block": [(65, 1), (64, 33), (33, 33), (20, 128), (64, 64), (65, 65), (128, 128), (129, 64), (256, 64), (257, 32),
              (512, 32), (513, 16), (1024, 16)],
    "tall": [(1025, 16), (1025, 1), (513, 17), (257, 33), (257, 64), (600, 64), (2500, 36), (4200, 60)],
    "blocked": [(20, 129), (129, 65), (129, 129), (140, 300), (257, 65), (530, 70), (1040, 66), (2060, 65)],
}
COMPLETE_SHAPES = {
    "simd": [(8, 3), (9, 9), (20, 32), (32, 1)],
    "block": [(33, 1), (64, 32), (128, 100), (40, 128)],
    "blocked": [(129, 2), (130, 130), (200, 20), (130, 160)],
}


def plan(family, m, n, mode):
    """The variant and the kernels that an m x n matrix takes on GPUs of a family."""
    with tuned(family):
        explanation = metalcore.explain("qr", (m, n), mode=mode)
    return explanation.variant, explanation.kernels


def boundaries(family, mode):
    """Shapes (m, n) on both sides of each change of plan, going down from short to tall, for some widths."""
    shapes = []
    tallest = 600 if mode == "complete" else 5000
    for n in (1, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129):
        for below, above in changes(lambda m: plan(family, m, n, mode), 1, tallest):
            shapes += [(below, n), (above, n)]
    return shapes


def matrices(m, n):
    """Named m x n float32 matrices: well and badly conditioned, rank-deficient, of extreme magnitude."""
    k = min(m, n)
    rank = max(1, k // 3)
    rows, columns = torch.arange(m).double()[:, None], torch.arange(n).double()
    down = 10.0 ** torch.linspace(30, -30, m).double()[:, None]
    across = 10.0 ** torch.linspace(-30, 30, n).double()
    random = torch.randn(m, n).double()
    return {
        name: matrix.float()
        for name, matrix in {
            "random": random,
            "rank-deficient": torch.randn(m, rank).double() @ torch.randn(rank, n).double(),
            "zero": torch.zeros(m, n),
            "zero columns": random * (columns % 2),
            "equal columns": random[:, :1].expand(m, n),
            "identity": torch.eye(m, n),
            "triangular": random.triu(),
            "Hilbert": 1 / (1 + rows + columns),
            "rows from 1e30 to 1e-30": random * down,
            "rows from 1e-30 to 1e30": random * down.flip(0),
            "columns from 1e-30 to 1e30": random * across,
            "all about 1e30": random * 1e30,
            "all about 1e-30": random * 1e-30,
            "1e-30, of rank one": 1e-30 * torch.randn(m, 1).double() @ torch.randn(1, n).double(),
        }.items()
    }


# Where R is well-determined, entry by entry, by the matrix and LAPACK's choice of signs.
DETERMINED = ["random", "zero", "identity", "triangular", "all about 1e30", "all about 1e-30"]


def norm(x):
    return torch.linalg.matrix_norm(x.double())


def check_factors(A, Q, R, mode, names):
    """Q's columns are orthonormal, Q R is A, R is upper triangular with LAPACK's signs. Batch entry i is names[i]."""
    m, n = A.shape[-2:]
    k = min(m, n)
    bound = 10 * max(m, n) * EPS
    largest = A.double().abs().amax(dim=(-2, -1), keepdim=True).clamp(min=1e-300)
    A, Q, R = A.double() / largest, Q.double(), R.double() / largest
    rows = m if mode == "complete" else k
    assert R.shape == (*A.shape[:-2], rows, n)
    assert not R.tril(-1).any()
    if mode == "r":
        assert Q.shape == (0,)
        residual = norm(R.mT @ R - A.mT @ A) / norm(A).square().clamp(min=1e-300)
        _below(residual, 2 * bound, "RᵀR = AᵀA", names)
    else:
        assert Q.shape == (*A.shape[:-2], m, rows)
        _below(norm(Q.mT @ Q - torch.eye(rows)), bound, "QᵀQ = I", names)
        _below(norm(A - Q @ R) / norm(A).clamp(min=1e-300), bound, "A = QR", names)
    expected = torch.linalg.qr(A, mode)
    for i, name in enumerate(names):
        if name in DETERMINED:
            # R's error is the residual's, times what QR's conditioning makes of it: at most cond(A), about n for
            # random matrices.
            difference = norm(R[i] - expected.R[i]) / norm(A[i]).clamp(min=1e-300)
            assert difference <= bound * max(m, n), f"{name}: R differs by {difference:.2g}"
        if name in ("zero", "identity") and mode != "r":
            torch.testing.assert_close(Q[i], expected.Q[i], rtol=0, atol=0)


def _below(errors, bound, what, names):
    for name, error in zip(names, errors):
        assert error <= bound, f"{name}: {what} to {error:.3g} instead of {bound:.3g}"
