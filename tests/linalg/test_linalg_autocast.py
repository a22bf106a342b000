"""Under torch.autocast linear algebra computes in the dtype it is given, as PyTorch's does on GPUs."""

import pytest
import torch
from rows import tuned

import metalcore


def low_rank(A):
    torch.manual_seed(0)
    return metalcore.svd_lowrank(A, q=3)


def block_reflector(A):
    a, tau = A.tril(-1), A[:, 0]
    return metalcore.larfb(a, metalcore.larft(a, tau), A)


FUNCTIONS = {
    "svd": metalcore.svd,
    "eigh": lambda A: metalcore.eigh(A + A.mT),
    "cholesky": metalcore.cholesky,
    "lu": metalcore.lu,
    "lu_solve": lambda A: metalcore.lu_solve(*metalcore.lu_factor_ex(A)[:2], A),
    "solve": lambda A: metalcore.solve(A, A.mT),
    "inv": metalcore.inv,
    "det": metalcore.det,
    "solve_triangular": lambda A: metalcore.solve_triangular(A, A, upper=True),
    "lstsq": lambda A: metalcore.lstsq(A[:, :4], A)[:2],
    "pinv": lambda A: metalcore.pinv(A[:, :4]),
    "pinv, hermitian": lambda A: metalcore.pinv(A + A.mT, hermitian=True),
    "cond": lambda A: metalcore.cond(A, "fro"),
    "qr": metalcore.qr,
    "householder_product": lambda A: metalcore.householder_product(A, A[:, 0]),
    "ormqr": lambda A: metalcore.ormqr(A, A[:, 0], A),
    "larfb": block_reflector,
    "syrk": metalcore.syrk,
    "svd_lowrank": low_rank,
}
# These record PyTorch's products for autograd, which follow autocast where the backward pass is inside of it.
RECORDED = {"lstsq", "larfb", "svd_lowrank"}


def flat(results):
    return [results] if isinstance(results, torch.Tensor) else list(results)


def matrix(device):
    A = torch.randn(6, 6) / 4
    return (A + A.mT + torch.diag(torch.arange(3.0, 9))).to(device)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_results(device, name):
    A = matrix(device)
    expected = flat(FUNCTIONS[name](A))
    with torch.autocast(device, dtype=torch.bfloat16):
        found = flat(FUNCTIONS[name](A))
    for ours, theirs in zip(found, expected):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)


@pytest.mark.parametrize("name", sorted(set(FUNCTIONS) - RECORDED))
def test_a_backward_pass_inside(device, name):
    A = matrix(device).requires_grad_()
    with tuned("baseline"):  # no function is PyTorch's, whose derivatives follow autocast
        results = [result for result in flat(FUNCTIONS[name](A)) if result.requires_grad]
    directions = [torch.randn_like(result) for result in results]
    (expected,) = torch.autograd.grad(results, A, directions, retain_graph=True)
    with torch.autocast(device, dtype=torch.bfloat16):
        (found,) = torch.autograd.grad(results, A, directions)
    assert torch.equal(found, expected)
