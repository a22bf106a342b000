"""scaled_dot_product_attention, forward and backward, against PyTorch's.

An operation is one of the products that the formula needs: two in the forward pass, five in the backward pass, half of
them if it is causal. The memory column's bytes are those of queries, keys, values and results, read and written once.
"""

import functools
import math

import torch
import torch.nn.functional as F

import metalcore

from ...harness import models
from ...harness.case import DTYPES as ALL_DTYPES
from ...harness.case import Comparison, backward, family, size_text

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


@family
def attention(scale):
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


# Keys, heads, queries. There are 8 heads of keys, of 128 numbers; from 16,384 keys on, memory is the limit.
DECODE_SHAPES = {
    "gpu": [
        (1024, 32, 1),
        (4096, 32, 1),
        (16384, 8, 1),
        (16384, 32, 1),
        (16384, 32, 4),
        (16384, 32, 8),
        (65536, 32, 1),
        (131072, 32, 1),
    ],
    "simulator": [(1024, 8, 1), (1024, 32, 1)],
    "quick": [(64, 8, 1)],
}
KV_HEADS, SIZE = 8, 128
PAGE_SIZES = (1, 16, 256)
# Models, tokens of the prompt, and the tokens per second that are the target.
MODELS = {
    "gpu": [("llama-3-8b", 512, 200), ("llama-3-8b", 4096, None), ("llama-1b", 512, 600), ("llama-15m", 512, None)],
    "simulator": [("llama-15m", 16, None)],
    "quick": [("llama-tiny", 8, None)],
}


@family
def decode(scale):
    """Times tokens of models with packed weights, and attention of few queries to many keys, contiguous and in pages.

    Shares are those of reading keys and values once.
    """
    contiguous = [decode_case(*shape, dtype, scale) for shape in DECODE_SHAPES[scale] for dtype in ALL_DTYPES]
    keys, heads, _ = DECODE_SHAPES[scale][-1]
    in_pages = [paged(min(keys, 16384), heads, page_size, scale) for page_size in PAGE_SIZES]
    tokens = [models.decode(model, context, torch.bfloat16, target) for model, context, target in MODELS[scale]]
    return contiguous + in_pages + tokens


def decode_targets(keys, scale):
    return {"share": 0.7} if scale == "gpu" and keys >= 16384 else {}


def moved(keys, dtype):
    return 2 * KV_HEADS * keys * SIZE * dtype.itemsize


def decode_case(keys, heads, queries, dtype, scale):
    def inputs(device):
        shapes = (1, heads, queries, SIZE), (1, KV_HEADS, keys, SIZE), (1, KV_HEADS, keys, SIZE)
        return tuple(torch.randn(shape, device=device).to(dtype) for shape in shapes)

    return Comparison(
        name=f"decode, {heads} heads, {queries} queries",
        shape=size_text((keys, SIZE)),
        dtype=dtype,
        ours=lambda *tensors: metalcore.scaled_dot_product_attention(*tensors, enable_gqa=True),
        theirs=lambda *tensors: F.scaled_dot_product_attention(*tensors, enable_gqa=True),
        inputs=inputs,
        bytes=moved(keys, dtype),
        flops=4 * heads * queries * keys * SIZE,
        variant=lambda *tensors: metalcore.explain("scaled_dot_product_attention", *tensors, enable_gqa=True).variant,
        targets=decode_targets(keys, scale),
    )


def paged(keys, heads, page_size, scale):
    """Returns the case of attention over pages. PyTorch has none: it gathers them first."""
    pages = math.ceil(keys / page_size)
    dtype = torch.bfloat16

    def inputs(device):
        q = torch.randn(1, heads, SIZE, device=device).to(dtype)
        cache = torch.randn(pages, 2, page_size, KV_HEADS, SIZE, device=device).to(dtype)
        numbers = [0, pages], torch.randperm(pages).tolist(), [(keys - 1) % page_size + 1]
        return q, cache, *(torch.tensor(vector, dtype=torch.int32, device=device) for vector in numbers)

    def theirs(q, cache, indptr, indices, last):
        k, v = (pool[indices].flatten(0, 1)[:keys].transpose(0, 1)[None] for pool in cache.unbind(1))
        return F.scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True)

    return Comparison(
        name=f"batch_decode, {heads} heads, pages of {page_size}",
        shape=size_text((keys, SIZE)),
        dtype=dtype,
        ours=metalcore.paged.batch_decode,
        theirs=theirs,
        inputs=inputs,
        bytes=moved(keys, dtype),
        flops=4 * heads * keys * SIZE,
        targets=decode_targets(keys, scale),
    )
