"""General square matrices by name that eigenvalue solvers find hard, and the conditions that eig must meet."""

import torch
from matrices import EPS, check_below


def general(n):
    """n x n in float32: defective, ill-conditioned, non-normal, close pairs, graded, of extreme magnitude."""
    random, ones = torch.randn(n, n).double(), torch.ones(n, n).double()
    index = torch.arange(n).double()
    rows, columns = index[:, None], index
    down, up = (10.0 ** torch.linspace(side, -side, n).double() for side in (15, -15))
    above, below = ones.triu(1).tril(1), ones.tril(-1).triu(-1)
    basis = torch.linalg.qr(random).Q
    companion = below.clone()
    companion[:, -1] = -torch.randn(n)
    pairs = torch.diag(1 + index // 2 * 1e-4) + (above - below) * (torch.maximum(rows, columns) % 2)
    return {
        name: matrix.float()
        for name, matrix in {
            "random": random,
            "zero": 0 * ones,
            "identity": torch.eye(n),
            "diagonal": torch.diag(index - n / 2),
            "upper triangular": random.triu(),
            "lower triangular": random.tril(),
            "ones": ones,
            "Grcar": ones.triu().tril(3) - below,
            "Frank": (n - torch.maximum(rows, columns)).triu(-1),
            "Jordan block": 2 * torch.eye(n) + above,
            "Jordan block, transposed": 2 * torch.eye(n) + below,
            "nilpotent": above,
            "defective": basis @ (torch.diag(index // 3) + above * (columns % 3 > 0)) @ basis.mT,
            "companion": companion,
            "Clement": above * columns + below * (n - columns - 1),
            "cyclic": torch.eye(n).roll(1, 0),
            "orthogonal": basis,
            "skew-symmetric": random - random.mT,
            "symmetric": random + random.mT,
            "rank one": random[:, :1] @ random[:1],
            "close pairs": basis @ pairs @ basis.mT,
            "rows from 1e15 to 1e-15": random * down[:, None],
            "columns from 1e-15 to 1e15": random * up,
            "similar, from 1e15 to 1e-15": random * down[:, None] * up,
            "all about 1e30": random * 1e30,
            "all about 1e-30": random * 1e-30,
        }.items()
    }


def general_complex(n):
    """The matrices of general(), each times a number and similar to itself by a diagonal matrix, all of magnitude
    one."""
    phases = torch.polar(torch.ones(n + 1), 6.28 * torch.rand(n + 1))
    turn = phases[n] * phases[:n, None] * phases[:n].conj()
    return {"random, complex": torch.randn(n, n, dtype=torch.complex64)} | {
        name: A * turn for name, A in general(n).items()
    }


def check_eig(A, L, V, names):
    """A V = V L, and the columns of V have norm one. Those of pairs of conjugates, or of a complex A, have a real
    largest entry."""
    n = A.shape[-1]
    assert L.dtype == V.dtype == torch.complex64 and L.shape == A.shape[:-1] and V.shape == A.shape
    columns, turned = V.mT, torch.ones_like(L, dtype=torch.bool)
    if not A.is_complex():
        turned = first = L.imag > 0
        assert torch.equal(L[first].conj(), L[first.roll(1, -1)]) and not first[..., -1].any()
        assert torch.equal(first.roll(1, -1), L.imag < 0)
        assert torch.equal(columns[first].conj(), columns[first.roll(1, -1)])
        assert not columns[L.imag == 0].imag.any()
    magnitudes = columns[turned].abs()
    largest_entries = magnitudes >= (1 - 8 * EPS) * magnitudes.amax(-1, keepdim=True)  # rounding hides which
    assert ((columns[turned].imag == 0) & largest_entries).any(-1).all()
    check_residual(A, L.diag_embed(), V, names)
    norms = torch.linalg.vector_norm(V.to(torch.complex128), dim=-2)
    check_below((norms - 1).abs().amax(-1), n * EPS, "norms of one", names)


def check_residual(A, T, V, names):
    """A V = V T."""
    A, T, V = (x.to(torch.complex128) for x in (A, T, V))
    largest = A.abs().amax(dim=(-2, -1), keepdim=True).clamp(min=1e-300)
    A = A / largest
    residual = torch.linalg.matrix_norm(A @ V - V @ (T / largest))
    bound = 10 * max(A.shape[-1], 8) * EPS
    check_below(residual / torch.linalg.matrix_norm(A).clamp(min=1e-300), bound, "A V = V T", names)


def check_values(A, L, names):
    """For each eigenvalue w there is a matrix A + E, with a small E, that has it: A - w I has a tiny singular value."""
    n, A, L = A.shape[-1], A.to(torch.complex128), L.to(torch.complex128)
    largest = A.abs().amax(dim=(-2, -1), keepdim=True).clamp(min=1e-300)
    A, L = A / largest, L / largest[..., 0]
    norms = torch.linalg.matrix_norm(A).clamp(min=1e-300)
    least = torch.linalg.svdvals(A[..., None, :, :] - L[..., None, None] * torch.eye(n))[..., -1].amax(-1)
    check_below(least / norms, 10 * max(n, 8) * EPS, "eigenvalues", names)
    error = (L.sum(-1) - torch.diagonal(A, dim1=-2, dim2=-1).sum(-1)).abs()
    check_below(error / norms, 10 * max(n, 8) ** 1.5 * EPS, "the trace", names)


def isolated(n):
    """n x n matrices that are triangular in some order of rows and columns, and n x n ones of which a block is not."""
    triangle = torch.randn(n, n).tril()
    block = triangle.clone()
    block[n // 3 : n // 3 + 2, n // 3 : n // 3 + 2] = torch.tensor([[5.0, 1.0], [-2.0, 5.0]])
    order = torch.randperm(n)
    matrices = {"lower triangular": triangle, "Jordan block": torch.eye(n) + torch.ones(n, n).tril(-1).triu(-1)}
    matrices |= {"in another order": triangle[order][:, order], "with a block": block[order][:, order]}
    return matrices
