"""scaled_dot_product_attention, forward and backward, against PyTorch's.

An operation is one of the products that the formula needs: two in the forward pass, five in the backward pass, half of
them if it is causal. The memory column's bytes are those of queries, keys, values and results, read and written once.
"""

import functools

import torch
import torch.nn.functional as F

import metalcore

from ...harness.case import Comparison, backward, size_text

# (batch, heads, length, head size)
SHAPES = {
    "gpu": [(4, 32, 2048, size) for size in (64, 80, 96, 128, 192, 256)]
    + [(16, 32, 512, 128), (1, 32, 4096, 128), (1, 16, 16384, 128)],
    "simulator": [(1, 2, 256, 64), (1, 2, 256, 128)],
    "quick": [(1, 1, 16, 8)],
}
DTYPES = (torch.bfloat16, torch.float32)
# Operations of an element of the scores for each element of the head size, and tensors that are moved.
PASSES = {"forward": (functools.partial, 4, 4), "backward": (backward, 10, 8)}


def cases(scale):
    return [
        case(kind, shape, dtype, causal)
        for kind in PASSES
        for shape in SHAPES[scale]
        for dtype in DTYPES
        for causal in (True, False)
    ]


def case(kind, shape, dtype, causal):
    bind, operations, tensors = PASSES[kind]
    batch, heads, length, size = shape
    options = {"is_causal": causal}
    return Comparison(
        name=f"attention {kind}{' causal' if causal else ''}",
        shape=size_text(shape),
        dtype=dtype,
        ours=functools.partial(metalcore.scaled_dot_product_attention, **options),
        theirs=functools.partial(F.scaled_dot_product_attention, **options),
        bind=bind,
        inputs=lambda device: tuple(torch.randn(shape, device=device).to(dtype) for _ in range(3)),
        bytes=tensors * batch * heads * length * size * dtype.itemsize,
        flops=operations * batch * heads * length**2 * size // (2 if causal else 1),
        variant=lambda *x: metalcore.explain("scaled_dot_product_attention", *x, **options).variant,
        peak="matmul_float32" if dtype == torch.float32 else "matmul_bfloat16",
    )
