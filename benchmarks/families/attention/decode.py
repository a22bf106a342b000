"""Tokens of models with packed weights, and attention of few queries to many keys, contiguous and in pages.

Shares are those of reading keys and values once.
"""

import math

import torch
import torch.nn.functional as F

import metalcore

from ...harness import generation
from ...harness.case import DTYPES, Comparison, size_text

# Keys, heads, queries. There are 8 heads of keys, of 128 numbers; from 16,384 keys on, memory is the limit.
SHAPES = {
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


def cases(scale):
    contiguous = [case(*shape, dtype, scale) for shape in SHAPES[scale] for dtype in DTYPES]
    keys, heads, _ = SHAPES[scale][-1]
    in_pages = [paged(min(keys, 16384), heads, page_size, scale) for page_size in PAGE_SIZES]
    models = [generation.decode(model, context, torch.bfloat16, target) for model, context, target in MODELS[scale]]
    return contiguous + in_pages + models


def targets(keys, scale):
    return {"share": 0.7} if scale == "gpu" and keys >= 16384 else {}


def moved(keys, dtype):
    return 2 * KV_HEADS * keys * SIZE * dtype.itemsize


def case(keys, heads, queries, dtype, scale):
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
        targets=targets(keys, scale),
    )


def paged(keys, heads, page_size, scale):
    """PyTorch has no attention over pages: it gathers them first."""
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
        targets=targets(keys, scale),
    )
