"""Matrices in float32, by name, that linear algebra must be able to treat."""

import torch

EPS = torch.finfo(torch.float32).eps
# Every order to 40 has each remainder of a block's width; larger ones lie about the multiples of 16.
ORDERS = [*range(1, 41), *(16 * k + offset for k in range(3, 9) for offset in (-1, 0, 1))]
# A matrix of more elements is one of few: small ones have shown what a kernel does with each.
SMALL = 80 * 80


def matrices(m, n):
    """m x n: well and badly conditioned, graded, rank-deficient, of extreme magnitude. Large ones are half of these."""
    k = min(m, n)
    rank = max(1, k // 3)
    rows, columns = torch.arange(m).double()[:, None], torch.arange(n).double()
    down = 10.0 ** torch.linspace(30, -30, m).double()[:, None]
    across = 10.0 ** torch.linspace(-30, 30, n).double()
    random = torch.randn(m, n).double()
    return _float(
        {
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
        },
        {"zero", "equal columns", "identity", "triangular", "rows from 1e-30 to 1e30", "all about 1e-30"}
        if m * n > SMALL
        else (),
    )


def of_spectrum(values, m=None):
    """A random m x n matrix with these n singular values; symmetric with these eigenvalues where m is None."""
    values = torch.as_tensor(values).double()
    n = len(values)
    right = torch.linalg.qr(torch.randn(n, n).double()).Q
    left = right if m is None else torch.linalg.qr(torch.randn(m, n).double()).Q
    return left * values @ right.mT


def symmetric(n):
    """n x n symmetric: random, graded, clustered and repeated eigenvalues, rank-deficient, of extreme magnitude."""
    random = torch.randn(n, n).double()
    random = random + random.mT
    scale = 10.0 ** torch.linspace(0, -15, n).double()
    low_rank = torch.randn(n, max(1, n // 3)).double()
    index = torch.arange(n).double()
    return _float(
        {
            "random": random,
            "positive definite": random @ random.mT + torch.eye(n),
            "rank-deficient": low_rank @ low_rank.mT,
            "zero": torch.zeros(n, n),
            "identity": torch.eye(n),
            "diagonal": torch.diag(index - n / 2),
            "ones": torch.ones(n, n),
            "Hilbert": 1 / (1 + index[:, None] + index),
            "graded": scale[:, None] * random * scale,
            "clustered": of_spectrum(1 + 1e-6 * torch.rand(n).double()),
            "plus and minus one": of_spectrum(1 - 2 * (index % 2)),
            "two clusters": of_spectrum(1 + 1e3 * (index > n / 2)),
            "all about 1e30": random / n * 1e30,
            "all about 1e-30": random * 1e-30,
        },
        {"positive definite", "zero", "identity", "diagonal", "ones", "two clusters", "all about 1e-30"}
        if n * n > SMALL
        else (),
    )


def positive_definite(n):
    """n x n symmetric positive-definite, also when rounded to float32: well and badly conditioned, graded, of extreme
    magnitude."""
    random = torch.randn(n, n).double()
    random = random @ random.mT / n + torch.eye(n)
    scale = 10.0 ** torch.linspace(15, -15, n).double()
    # A factorization in float32 may fail where the least eigenvalue is below n eps of the largest.
    values = torch.logspace(0, 1, n).double().sub(1) / 9 * (1 - 20 * n * EPS) + 20 * n * EPS
    return _float(
        {
            "random": random,
            "identity": torch.eye(n),
            "diagonal": torch.diag(torch.arange(n) + 0.5),
            "tridiagonal": 2 * torch.eye(n) - torch.eye(n).roll(1, 0).tril(-1) - torch.eye(n).roll(-1, 0).triu(1),
            "badly conditioned": of_spectrum(values),
            "clustered": of_spectrum(1 + 1e-6 * torch.rand(n).double()),
            "from 1e30 to 1e-30": scale[:, None] * random * scale,
            "from 1e-30 to 1e30": scale.flip(0)[:, None] * random * scale.flip(0),
            "all about 1e30": random * 1e30,
            "all about 1e-30": random * 1e-30,
        },
        {"identity", "diagonal", "tridiagonal", "clustered", "from 1e-30 to 1e30"} if n * n > SMALL else (),
    )


def _float(named, without):
    return {name: matrix.float() for name, matrix in named.items() if name not in without}


def norm(x):
    """The Frobenius norms of a batch."""
    return torch.linalg.matrix_norm(x.double())


def unit(A):
    """A in float64, each matrix divided by its largest magnitude (zero stays zero), and those magnitudes."""
    largest = A.double().abs().amax(dim=(-2, -1), keepdim=True).clamp(min=1e-300)
    return A.double() / largest, largest


def check_below(errors, bound, what, names):
    """Fails with the name of the matrix whose error is above the bound."""
    for name, error in zip(names, errors):
        assert error <= bound, f"{name}: {what} to {error:.3g} instead of {bound:.3g}"
