"""Rows of tables by index, alone and in bags, forward and both passes through autograd."""

import functools

import torch
import torch.nn.functional as F

import metalcore

from ...harness.case import DTYPES, Comparison, family, forward_backward, size_text

# (rows, depth, bags, indices of a bag); without bags each index is a result.
SHAPES = {
    "gpu": [(128256, 4096, 16384, 1), (50257, 768, 32768, 1), (128256, 1024, 4096, 32), (1000000, 128, 16384, 50)],
    "simulator": [(1000, 256, 512, 1), (1000, 256, 64, 8)],
    "quick": [(20, 8, 4, 1), (20, 8, 4, 3)],
}


@family
def embedding(scale):
    return [
        case(kind, shape, dtype, scale)
        for kind in ("forward", "forward+backward")
        for shape in SHAPES[scale]
        for dtype in DTYPES
    ]


def case(kind, shape, dtype, scale):
    rows, depth, bags, each = shape
    alone = each == 1

    @functools.lru_cache(maxsize=1)
    def indices(device):
        return torch.randint(rows, (bags,) if alone else (bags, each), device=device)

    def ours(table):
        if alone:
            return metalcore.embedding(indices(table.device), table)
        return metalcore.embedding_bag(indices(table.device), table, mode="sum")

    def theirs(table):
        if alone:
            return F.embedding(indices(table.device), table)
        return F.embedding_bag(indices(table.device), table, mode="sum")

    forward = kind == "forward"
    moved = bags * each + bags  # rows that the forward pass reads and writes; the gradient of the table is whole
    targets = {"share": 0.85 if alone else 0.8, "speedup": 0.98} if forward else {"speedup": 1.0}
    return Comparison(
        name=f"{'embedding' if alone else 'embedding_bag'} {kind}",
        shape=size_text(shape),
        dtype=dtype,
        ours=ours,
        theirs=theirs,
        bind=functools.partial if forward else forward_backward,
        inputs=lambda device: (torch.randn(rows, depth, device=device).to(dtype),),
        bytes=(moved if forward else moved + bags + rows) * depth * dtype.itemsize,
        graph=forward,  # PyTorch's sort of the indices asks the host
        targets=targets if scale == "gpu" else {},
    )
