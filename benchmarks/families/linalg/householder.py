"""Householder reflectors, of batches and of single matrices: geqrf, householder_product and ormqr against PyTorch's."""

import math

import torch

import metalcore

from ...harness.case import Comparison, size_text

SHAPES = {
    "gpu": [
        (16384, 8, 8),
        (4096, 32, 32),
        (1024, 128, 128),
        (64, 256, 256),
        (512, 512),
        (1024, 1024),
        (2048, 2048),
        (2048, 64),
    ],
    "simulator": [(256, 16, 16), (16, 128, 64), (512, 512)],
    "quick": [(8, 8, 8)],
}


def cases(scale):
    return [case(shape) for shape in SHAPES[scale] for case in (geqrf, householder_product, ormqr)]


def geqrf(shape):
    *batch, m, n = shape
    flops = math.prod(batch) * (2 * m * n**2 - 2 * n**3 / 3)  # Golub and Van Loan, Matrix Computations, 5.2; m >= n
    return comparison(
        "geqrf", shape, metalcore.geqrf, torch.geqrf, lambda device: (torch.randn(shape, device=device),), 2, flops
    )


def householder_product(shape):
    *batch, m, n = shape
    flops = math.prod(batch) * (2 * m * n**2 - 2 * n**3 / 3)
    return comparison(
        "householder_product",
        shape,
        metalcore.householder_product,
        torch.linalg.householder_product,
        lambda device: reflectors(shape, device),
        2,
        flops,
    )


def ormqr(shape):
    *batch, m, n = shape
    flops = math.prod(batch) * (4 * m * n**2 - 2 * n**3)
    return comparison(
        "ormqr",
        shape,
        metalcore.ormqr,
        torch.ormqr,
        lambda device: (*reflectors(shape, device), torch.randn(shape, device=device)),
        3,
        flops,
    )


def reflectors(shape, device):
    return tuple(x.to(device) for x in metalcore.geqrf(torch.randn(shape, device=device)))


def comparison(name, shape, ours, theirs, inputs, matrices, flops):
    return Comparison(
        name=name,
        shape=size_text(shape),
        dtype=torch.float32,
        ours=ours,
        theirs=theirs,
        inputs=inputs,
        bytes=4 * matrices * math.prod(shape),
        flops=round(flops),
        graph=False,
        variant=lambda *given: metalcore.explain(name, *given).variant,
        targets={"speedup": 1 / 1.1},
    )
