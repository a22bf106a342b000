"""Products of matrices, for many rows, for few, and in groups, against PyTorch's."""

import functools

import torch

import metalcore

from ...harness.case import DTYPES, Comparison, backward, family

KINDS = {"forward": functools.partial, "backward": backward}
# rows, columns, terms; members of a group of experts
SHAPES = {
    "gpu": [(4096, 4096, 4096), (512, 14336, 4096), (1, 14336, 4096), (8, 4096, 4096)],
    "simulator": [(128, 256, 256), (1, 1024, 1024)],
    "quick": [(9, 16, 24)],
}
GROUPS = {"gpu": (4096, 2048, 2048, 16), "simulator": (128, 128, 128, 4), "quick": (9, 16, 24, 2)}
PEAKS = {torch.float32: "matmul_float32", torch.float16: "matmul_bfloat16", torch.bfloat16: "matmul_bfloat16"}


def linear(x, weight):
    return metalcore.linear(x, weight)


def biased(x, weight):
    return metalcore.linear(x, weight, weight[:, 0], activation="gelu")


def their_biased(x, weight):
    return torch.nn.functional.gelu(torch.nn.functional.linear(x, weight, weight[:, 0]))


# What b is: columns by terms, or terms by columns.
OPS = {
    "linear": (linear, torch.nn.functional.linear, True),
    "linear + bias + gelu": (biased, their_biased, True),
    "matmul": (metalcore.matmul, torch.matmul, False),
}


@family
def matmul(scale):
    products = [
        case(op, kind, shape, dtype)
        for op in OPS
        for kind in KINDS
        for shape in SHAPES[scale]
        for dtype in DTYPES
        if kind == "forward" or shape[0] > 8 and "bias" not in op
    ]
    return products + [groups(GROUPS[scale], dtype) for dtype in DTYPES]


def case(op, kind, shape, dtype):
    rows, columns, terms = shape
    ours, theirs, transposed = OPS[op]

    def inputs(device):
        b = (columns, terms) if transposed else (terms, columns)
        return tuple(torch.randn(size, device=device).to(dtype) for size in ((rows, terms), b))

    passes = 2 if kind == "backward" else 1
    return Comparison(
        name=f"{op} {kind}",
        shape=f"{rows}x{columns}x{terms}",
        dtype=dtype,
        ours=ours,
        theirs=theirs,
        bind=KINDS[kind],
        inputs=inputs,
        bytes=passes * (rows * terms + terms * columns + rows * columns) * dtype.itemsize,
        flops=passes * 2 * rows * columns * terms,
        peak=PEAKS[dtype],
    )


def groups(sizes, dtype):
    rows, columns, terms, count = sizes

    def inputs(device):
        x, weight = (torch.randn(size, device=device).to(dtype) for size in ((rows, terms), (count, terms, columns)))
        ends = torch.arange(1, count + 1, device=device, dtype=torch.int32) * (rows // count)
        return x, weight, ends

    def theirs(x, weight, ends):
        share = rows // count
        return torch.cat([x[g * share : (g + 1) * share] @ weight[g] for g in range(count)])

    return Comparison(
        name="grouped_gemm",
        shape=f"{rows}x{columns}x{terms}, {count} groups",
        dtype=dtype,
        ours=metalcore.grouped_gemm,
        theirs=theirs,
        inputs=inputs,
        bytes=(rows * terms + count * terms * columns + rows * columns) * dtype.itemsize,
        flops=2 * rows * columns * terms,
        peak=PEAKS[dtype],
    )
