"""Triangular systems of batches and single matrices, against torch.linalg.solve_triangular."""

import math

import torch

import metalcore

from ...harness.case import Comparison, size_text

# (shape of A, right-hand sides). The target is that no case is slower.
SYSTEMS = {
    "gpu": [
        ((16384, 4, 4), 1),
        ((16384, 16, 16), 16),
        ((4096, 32, 32), 1),
        ((4096, 32, 32), 32),
        ((1024, 64, 64), 1),
        ((1024, 64, 64), 64),
        ((1024, 128, 128), 1),
        ((1024, 128, 128), 128),
        ((128, 256, 256), 256),
        ((16, 512, 512), 512),
        ((16, 1024, 1024), 1),
        ((128, 128), 128),
        ((512, 512), 1),
        ((512, 512), 512),
        ((2048, 2048), 1),
        ((2048, 2048), 2048),
    ],
    "simulator": [((1024, 8, 8), 8), ((64, 32, 32), 32), ((8, 128, 128), 128), ((300, 300), 1)],
    "quick": [((8, 8, 8), 1), ((2, 40, 40), 8)],
}


def cases(scale):
    return [case(shape, columns, scale == "gpu") for shape, columns in SYSTEMS[scale]]


def case(shape, columns, with_target):
    *batch, n, _ = shape

    def inputs(device):
        a = torch.randn(shape, device=device) / n**0.5 + 2 * torch.eye(n, device=device)
        return a, torch.randn(*batch, n, columns, device=device)

    count = math.prod(batch)
    return Comparison(
        name="solve_triangular",
        shape=f"{size_text(shape)}, {columns}",
        dtype=torch.float32,
        ours=lambda a, b: metalcore.solve_triangular(a, b, upper=False),
        theirs=lambda a, b: torch.linalg.solve_triangular(a, b, upper=False),
        inputs=inputs,
        bytes=4 * count * (n * (n + 1) // 2 + 2 * n * columns),
        flops=count * n * n * columns,
        graph=False,  # torch's op sets up pointers on the host
        variant=lambda a, b: metalcore.explain("solve_triangular", a, b).variant,
        targets={"speedup": 1 / 1.1} if with_target else {},
    )
