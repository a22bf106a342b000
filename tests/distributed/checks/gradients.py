"""Derivatives of linear algebra on batches in shards, against the same on one device."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import metalcore

BATCH, SIZE = 5, 6  # ranks have different numbers of matrices


def _of_any_signs(U, S, Vh):
    """What does not depend on the signs of singular vectors."""
    return U @ Vh, S


FUNCTIONS = {
    "decompositions": {
        "qr": lambda A, B: metalcore.qr(A),
        "qr, complete": lambda A, B: metalcore.qr(A, mode="complete"),
        "cholesky": lambda A, B: metalcore.cholesky(A @ A.mT),
        "lu": lambda A, B: metalcore.lu(A)[1:],
        "lu_solve": lambda A, B: metalcore.lu_solve(*metalcore.lu_factor(A), B),
        "householder_product": lambda A, B: metalcore.householder_product(A / 16, torch.ones_like(A[..., 0, :])),
        "ormqr": lambda A, B: metalcore.ormqr(A / 16, torch.ones_like(A[..., 0, :]), B),
        "larft": lambda A, B: metalcore.larft(A / 16, torch.ones_like(A[..., 0, :])),
        "polar": lambda A, B: metalcore.polar(A),
    },
    "solutions": {
        "solve": lambda A, B: metalcore.solve(A, B),
        "solve, right": lambda A, B: metalcore.solve(A, B.mT, left=False),
        "solve_triangular": lambda A, B: metalcore.solve_triangular(A, B, upper=True),
        "cholesky_solve": lambda A, B: metalcore.cholesky_solve(B, metalcore.cholesky(A @ A.mT)),
        "inv": lambda A, B: metalcore.inv(A),
        "det": lambda A, B: metalcore.det(A),
        "slogdet": lambda A, B: metalcore.slogdet(A)[1],
        "lstsq": lambda A, B: metalcore.lstsq(A, B).solution,
        "syrk": lambda A, B: metalcore.syrk(A),
    },
    "spectra": {
        "svd": lambda A, B: _of_any_signs(*metalcore.svd(A)),
        "svdvals": lambda A, B: metalcore.svdvals(A),
        "eigh": lambda A, B: (lambda found: (found[0], found[1] ** 2))(metalcore.eigh(A @ A.mT)),
        "eigvalsh": lambda A, B: metalcore.eigvalsh(A @ A.mT),
        "pinv": lambda A, B: metalcore.pinv(A),
        "cond": lambda A, B: metalcore.cond(A),
    },
}


def _derivatives(function, A, B):
    """Results, gradients, and gradients of the gradients' squares."""
    A, B = A.detach().requires_grad_(), B.detach().requires_grad_()
    found = function(A, B)
    results = [found] if isinstance(found, torch.Tensor) else list(found)
    total = sum((result * result).sum() for result in results)
    first = torch.autograd.grad(total, [A, B], create_graph=True, allow_unused=True)
    first = [each for each in first if each is not None]
    second = torch.autograd.grad(sum((each * each).sum() for each in first), A)
    return [*results, *first, *second]


def _error(ours, theirs):
    whole = theirs.full_tensor() if isinstance(theirs, DTensor) else theirs
    return float((ours - whole).detach().abs().max() / (1 + ours.detach().abs().max()))


def linear_algebra(kind):
    """What is wrong with each function: an error, or numbers that differ."""
    mesh, wrong = init_device_mesh("mps", (dist.get_world_size(),)), []
    A = torch.randn(BATCH, SIZE, SIZE, device="mps") + torch.diag(torch.arange(3.0, 3.0 + SIZE, device="mps"))
    B = torch.randn(BATCH, SIZE, 2, device="mps")
    shards = [distribute_tensor(x, mesh, [Shard(0)], src_data_rank=None) for x in (A, B)]
    for name, function in FUNCTIONS[kind].items():
        expected = _derivatives(function, A, B)
        try:
            found = _derivatives(function, *shards)
        except Exception as error:
            wrong.append(f"{name}: {type(error).__name__}: {error}"[:400])
            continue
        errors = [_error(ours, theirs) for ours, theirs in zip(expected, found, strict=True)]
        if not max(errors) <= 1e-4:
            wrong.append(f"{name}: differs by {errors}")
    return wrong
