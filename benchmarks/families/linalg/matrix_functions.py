"""Functions of matrices and indefinite systems, against torch.linalg's, or what PyTorch has in their place."""

import torch

import metalcore

from ...harness.case import family
from .decompositions import matrices, normal


def by_eigenvectors(function):
    """Returns a function of matrices by eigenvectors, which PyTorch has for those that it lacks."""

    def call(A):
        values, vectors = torch.linalg.eig(A)
        return torch.linalg.solve(vectors.mT, (vectors * function(values).unsqueeze(-2)).mT).mT

    return call


def sylvester_by_solve(A, B, Q):
    """Solves the equation A X + X B = Q as one system with m n unknowns."""
    m, n = Q.shape[-2:]
    first = torch.kron(A.contiguous(), torch.eye(n, device=A.device))
    second = torch.kron(torch.eye(m, device=A.device), B.mT.contiguous())
    return torch.linalg.solve(first + second, Q.flatten(-2)).unflatten(-1, (m, n))


def near_identity(device, shape, sides):
    """Returns matrices whose eigenvalues have positive real parts."""
    (A,) = normal(device, shape, 0)
    return (A / (4 * shape[-1] ** 0.5) + torch.eye(shape[-1], device=device),)


def equations(device, shape, sides):
    return *near_identity(device, shape, 0), *near_identity(device, shape, 0), *normal(device, shape, 0)


def symmetric(device, shape, sides):
    A, *B = normal(device, shape, sides)
    return A + A.mT, *B


def indefinite_factors(device, shape, sides):
    A, B = symmetric(device, shape, sides)
    return *metalcore.ldl_factor_ex(A)[:2], B


def positive(device, shape, sides):
    (A,) = normal(device, shape, 0)
    return A @ A.mT / shape[-1] + torch.eye(shape[-1], device=device), sides


# What each op takes beside its namesake in torch.linalg, where it has one.
CASES = {
    "matrix_exp": {"inputs": near_identity},
    "sqrtm": {"inputs": near_identity, "theirs": by_eigenvectors(torch.sqrt), "options": None},
    "logm": {"inputs": near_identity, "theirs": by_eigenvectors(torch.log), "options": None},
    "schur": {"theirs": torch.linalg.eig},  # which computes this form on its way
    "solve_sylvester": {"inputs": equations, "theirs": sylvester_by_solve, "options": None},
    "ldl_factor_ex": {"inputs": symmetric, "options": None},
    "ldl_solve": {"inputs": indefinite_factors},
    "lobpcg": {"inputs": positive, "theirs": torch.lobpcg, "sides_text": ", {} eigenvalues", "options": None},
}
WORDS = {
    "gpu": {
        "matrix_exp": "1024x16x16 1024x32x32 1024x64x64 8x128x128 1000x1000",
        "sqrtm": "1024x32x32 8x128x128",
        "logm": "1024x32x32 8x128x128",
        "schur": "1024x32x32 8x128x128",
        "solve_sylvester": "64x16x16",
        "ldl_factor_ex": "1024x32x32 8x128x128 1000x1000",
        "ldl_solve": "1024x32x32,5 1000x1000,5",
        "lobpcg": "8x128x128,4 1000x1000,8",
    },
    "simulator": {name: "16x16x16" + (",2" if name in ("ldl_solve", "lobpcg") else "") for name in CASES},
    "quick": {name: "2x8x8" + (",2" if name in ("ldl_solve", "lobpcg") else "") for name in CASES},
}


@family
def matrix_functions(scale):
    """Times matrix_exp, sqrtm, logm, schur, solve_sylvester, LDL and lobpcg, against what PyTorch has."""
    return [case for name, words in WORDS[scale].items() for case in matrices(name, words, **CASES[name])]
