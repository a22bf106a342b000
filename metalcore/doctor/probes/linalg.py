"""Probes of linear algebra."""

from __future__ import annotations

import torch

from . import Found, error_of, gradients, numbers

__all__ = ["batched_svd", "orthogonal_singular_vectors", "solve_gradients"]

_EPS = torch.finfo(torch.float32).eps


def batched_svd(device: str) -> Found:
    # The reports have the first size that fails: 512 matrices of 16 numbers.
    A = numbers(512, 4, 4)
    U, S, Vh = (each.cpu() for each in torch.linalg.svd(A.to(device)))
    values = torch.linalg.svdvals(A.to(device))
    tall = torch.eye(8, 4) * 4 + numbers(512, 8, 4, seed=1) / 4
    B = numbers(512, 8, 2, seed=2)
    solution = torch.linalg.lstsq(tall.to(device), B.to(device)).solution
    error = max(
        error_of(U @ S.diag_embed() @ Vh, A),
        error_of(values, torch.linalg.svdvals(A.double())),
        error_of(solution, torch.linalg.lstsq(tall.double(), B.double()).solution),
    )
    # The algorithms are backward stable: a small multiple of n roundings, here 16 n. The least squares' condition is
    # below 2, which a factor of 4 covers.
    return Found(error, 64 * 4 * _EPS)


def orthogonal_singular_vectors(device: str) -> Found:
    A = numbers(16, 32, 8) @ numbers(16, 8, 32, seed=1)  # of rank 8
    U = torch.linalg.svd(A.to(device)).U.cpu().double()
    error = error_of(U.mT @ U, torch.eye(32).expand(16, 32, 32))
    return Found(error, 16 * 32 * _EPS)  # Householder's and Jacobi's vectors are orthogonal up to some n roundings


def solve_gradients(device: str) -> Found:
    A, B = 4 * torch.eye(4) + numbers(3, 4, 4) / 2, numbers(3, 4, 2, seed=1)
    ours = gradients(torch.linalg.solve, A.to(device), B.to(device))
    theirs = gradients(torch.linalg.solve, A.double(), B.double())
    error = max(map(error_of, ours, theirs))
    # Two solutions of systems with n = 4 whose condition is below 3, each of 16 n roundings.
    return Found(error, 2 * 16 * 4 * 3 * _EPS)
