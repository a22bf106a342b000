"""Functions that use singular values or eigenvalues: pinv, matrix_rank, cond, svd_lowrank."""

import functools

import torch

import metalcore

from ...harness.case import Comparison, size_text

SQUARE = {
    "gpu": [(16384, 16, 16), (4096, 32, 32), (1024, 64, 64), (256, 128, 64), (512, 512)],
    "simulator": [(256, 8, 8), (64, 32, 32)],
    "quick": [(2, 8, 8)],
}
# The shapes are those of weight matrices.
LOWRANK = {"gpu": [(4096, 4096), (11008, 4096), (64, 1024, 256)], "simulator": [(512, 256)], "quick": [(40, 20)]}
OPS = {
    "pinv": (metalcore.pinv, torch.linalg.pinv),
    "pinv, hermitian": (
        functools.partial(metalcore.pinv, hermitian=True),
        functools.partial(torch.linalg.pinv, hermitian=True),
    ),
    "matrix_rank": (metalcore.matrix_rank, torch.linalg.matrix_rank),
    "cond": (metalcore.cond, torch.linalg.cond),
}


def cases(scale):
    found = [
        case(name, *OPS[name], shape)
        for name in OPS
        for shape in SQUARE[scale]
        if "hermitian" not in name or shape[-1] == shape[-2]
    ]
    for q in (6, 32) if scale == "gpu" else (6,):
        ours, theirs = (functools.partial(function, q=q) for function in (metalcore.svd_lowrank, torch.svd_lowrank))
        found += [case(f"svd_lowrank of rank {q}", ours, theirs, shape) for shape in LOWRANK[scale]]
    return found


def case(name, ours, theirs, shape):
    return Comparison(
        name=name,
        shape=size_text(shape),
        dtype=torch.float32,
        ours=ours,
        theirs=theirs,
        graph=False,
        inputs=lambda device: (torch.randn(shape, device=device),),
        targets={"speedup": 1 / 1.1},
    )
