"""Shapes on both sides of QR's boundaries, and the conditions that a QR decomposition must meet."""

import torch
from matrices import EPS, check_below, norm, unit
from rows import changes, tuned

import metalcore

# variant -> shapes (m, n) below, at and above its boundaries
SHAPES = {
    "simd": [
        (1, 1),
        (2, 3),
        (7, 8),
        (8, 8),
        (8, 9),
        (9, 5),
        (16, 16),
        (17, 16),
        (3, 17),
        (32, 32),
        (33, 32),
        (64, 32),
        (64, 1),
    ],
    "block": [
        (65, 1),
        (64, 33),
        (33, 33),
        (20, 128),
        (64, 64),
        (65, 65),
        (128, 128),
        (129, 64),
        (256, 64),
        (257, 32),
        (512, 32),
        (513, 16),
        (1024, 16),
    ],
    "tall": [(2049, 16), (2049, 1), (2049, 17), (2049, 33), (2049, 64), (2500, 36), (4200, 60)],
    "blocked": [
        (20, 129),
        (129, 65),
        (129, 129),
        (140, 300),
        (257, 65),
        (530, 70),
        (1040, 66),
        (1025, 16),
        (1025, 1),
        (513, 17),
        (257, 33),
        (2048, 64),
        (2060, 65),
    ],
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
    """Shapes (m, n) on both sides of each change of plan, from short to tall, for some widths."""
    shapes = []
    tallest = 600 if mode == "complete" else 5000
    for n in (1, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129):
        for below, above in changes(lambda m: plan(family, m, n, mode), 1, tallest):
            shapes += [(below, n), (above, n)]
    return shapes


# These matrices and LAPACK's choice of signs determine each entry of R well.
DETERMINED = ["random", "zero", "identity", "triangular", "all about 1e30", "all about 1e-30"]


def check_factors(A, Q, R, mode, names):
    """Q's columns are orthonormal, Q R is A, R is upper triangular with LAPACK's signs. Batch entry i is names[i]."""
    m, n = A.shape[-2:]
    k = min(m, n)
    bound = 10 * max(m, n) * EPS
    A, largest = unit(A)
    Q, R = Q.double(), R.double() / largest
    rows = m if mode == "complete" else k
    assert R.shape == (*A.shape[:-2], rows, n)
    assert not R.tril(-1).any()
    if mode == "r":
        assert Q.shape == (0,)
        residual = norm(R.mT @ R - A.mT @ A) / norm(A).square().clamp(min=1e-300)
        check_below(residual, 2 * bound, "RᵀR = AᵀA", names)
    else:
        assert Q.shape == (*A.shape[:-2], m, rows)
        check_below(norm(Q.mT @ Q - torch.eye(rows)), bound, "QᵀQ = I", names)
        check_below(norm(A - Q @ R) / norm(A).clamp(min=1e-300), bound, "A = QR", names)
    expected = torch.linalg.qr(A, mode)
    for i, name in enumerate(names):
        if name in DETERMINED:
            # R's error is the residual's times QR's condition number. That is at most cond(A), which is about n for
            # random matrices.
            difference = norm(R[i] - expected.R[i]) / norm(A[i]).clamp(min=1e-300)
            assert difference <= bound * max(m, n), f"{name}: R differs by {difference:.2g}"
        if name in ("zero", "identity") and mode != "r":
            torch.testing.assert_close(Q[i], expected.Q[i], rtol=0, atol=0)
