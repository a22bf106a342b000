"""Products with packed weights: metalcore.quant.quantized_linear against ggml's kernels, and PyTorch's with float16.

Memory's limit reads the packed weights once. ggml's x and results are float32.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from metalcore.quant import dequantize, quantized_linear, type_of
from metalcore.quant._types import packed_sample

from ..harness.case import size_text
from .comparison import LIMITS, calls, exact, peer_case
from .ggml import GGML, MATVEC, NAMES

# Rows of weights x weights of a row: of Q4_K, and of other types.
SHAPES = {
    "gpu": [(4096, 14336), (14336, 4096), (4096, 4096), (128256, 4096)],
    "simulator": [(256, 1024)],
    "quick": [(64, 512)],
}
OTHER_SHAPES = {scale: shapes[:1] for scale, shapes in SHAPES.items()}
# Rows of x beyond one, with Q4_K of 4096 x 4096.
ROWS = {"gpu": (32, 512), "simulator": (32,), "quick": (32,)}
CHECKED = 64  # rows of the weights


def add_options(parser):
    parser.add_argument(
        "--ggml", required=True, metavar="DIR", help="a checkout of ggml-org/llama.cpp or ggml-org/ggml"
    )
    parser.add_argument("--type", nargs="+", choices=list(MATVEC), help="types of weights (all)")


def cases(options, scale):
    peer, found = GGML(options.ggml), []
    for name in options.type or MATVEC:
        for shape in SHAPES[scale] if name == "Q4_K" else OTHER_SHAPES[scale]:
            found += [against_ggml(peer, name, shape, 1, dtype) for dtype in (torch.float32, torch.float16)]
            found.append(against_float16(name, shape, 1))
    if options.type is None or "Q4_K" in options.type:
        shape = SHAPES[scale][min(2, len(SHAPES[scale]) - 1)]
        for rows in ROWS[scale]:
            found += [against_ggml(peer, "Q4_K", shape, rows, torch.float16), against_float16("Q4_K", shape, rows)]
    return found


def fields(name, shape, rows):
    size = shape[0] * shape[1] // type_of(name).block * type_of(name).nbytes
    return {"shape": size_text((rows, *shape)), "bytes": size, "flops": 2 * rows * shape[0] * shape[1]}


def reference(name, packed, x):
    return exact(x) @ exact(dequantize(packed[:CHECKED], name, dtype=torch.float32)).T


def against_ggml(peer, name, shape, rows, dtype):
    """Ours has x in `dtype`."""

    def inputs(device):
        return packed_sample(name, *shape, device=device), torch.randn(rows, shape[1], device=device)

    def ours(packed, x):
        return functools.partial(quantized_linear, x.to(dtype), packed, name)

    return peer_case(
        name=f"{name}, x in {NAMES[dtype]}, ggml",
        inputs=inputs,
        ours=ours,
        theirs=functools.partial(peer.matvec if rows == 1 else peer.matmul, name),
        reference=functools.partial(reference, name),
        limit=LIMITS[torch.float32 if rows == 1 and dtype == torch.float32 else torch.float16],
        **fields(name, shape, rows),
    )


def against_float16(name, shape, rows):
    def inputs(device):
        packed = packed_sample(name, *shape, device=device)
        return packed, dequantize(packed, name, dtype=torch.float16), torch.randn(rows, shape[1], device=device).half()

    return peer_case(
        name=f"{name}, x in f16, PyTorch with float16 weights",
        dtype=torch.float16,
        inputs=inputs,
        ours=calls(lambda packed, weight, x: quantized_linear(x, packed, name)),
        theirs=calls(lambda packed, weight, x: F.linear(x, weight)),
        reference=lambda packed, weight, x: reference(name, packed, x),
        limit=LIMITS[torch.float16],
        **fields(name, shape, rows),
    )
