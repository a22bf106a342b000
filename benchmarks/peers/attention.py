"""Attention: of many queries, and of few queries to many keys, against MLX's kernels, ggml's and metal-flash-sdpa's.

An operation is one of the two products that the formula needs, half of them if it is causal. Memory's limit reads keys
and values once. ggml's queries and results are float32. Its kernel of few queries relies on simdgroups whose threads
run in lockstep, which they do not on the simulated device: the check of its result fails there.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

import metalcore

from ..harness.case import of_all, size_text
from .comparison import LIMITS, calls, exact, peer_case
from .ggml import GGML
from .mlx import MLX
from .pytorch import FlashSDPA

# (batch, heads, length, head size)
SHAPES = {
    "gpu": [(4, 16, 2048, size) for size in (64, 80, 128)]
    + [(16, 16, 512, 128), (1, 16, 8192, 128), (1, 8, 16384, 128)],
    "simulator": [(2, 4, 128, 64), (2, 4, 128, 128)],
    "quick": [(2, 4, 128, 64)],
}
# (heads, heads of keys, keys, head size), and queries.
DECODE_SHAPES = {
    "gpu": [(32, 8, keys, 128) for keys in (1024, 4096, 16384, 65536, 131072)],
    "simulator": [(8, 2, 1056, 128)],
    "quick": [(8, 2, 1056, 128)],
}
QUERIES = (1, 8)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PEERS = {"mlx": MLX, "ggml": GGML, "flash_sdpa": FlashSDPA}


def add_options(parser):
    parser.add_argument("--mlx", metavar="DIR", help="a checkout of ml-explore/mlx")
    parser.add_argument("--ggml", metavar="DIR", help="a checkout of ggml-org/llama.cpp or ggml-org/ggml")
    parser.add_argument(
        "--flash-sdpa", metavar="DIR", help="metal-flash-sdpa of a checkout of huggingface/kernels-community"
    )


def cases(options, scale):
    peers = {name: PEERS[name](folder) for name in PEERS if (folder := getattr(options, name))}
    if not peers:
        raise ValueError("there is no peer to compare with: name a checkout with --mlx, --ggml or --flash-sdpa")
    comparisons = []
    for peer in peers.values():
        comparisons += of_all(functools.partial(prefill, peer), scale, SHAPES[scale], DTYPES, (True, False))
        if hasattr(peer, "decode"):
            comparisons += of_all(functools.partial(decode, peer), scale, DECODE_SHAPES[scale], QUERIES, DTYPES)
    return comparisons


def random(dtype, *shapes):
    return lambda device: tuple(torch.randn(shape, device=device).to(dtype) for shape in shapes)


def first_head(causal, q, k, v):
    """Returns the first head of the first sequence, in float64."""
    q, k, v = (exact(tensor[:1, :1]) for tensor in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def limit_of(peer, dtype):
    return LIMITS[
        torch.float16 if isinstance(peer, GGML) and dtype == torch.float32 else dtype
    ]  # its products are half


def prefill(peer, shape, dtype, causal, scale):
    batch, heads, length, size = shape
    return peer_case(
        name=f"attention{' causal' if causal else ''}, {type(peer).__name__}",
        shape=size_text(shape),
        dtype=dtype,
        inputs=random(dtype, shape, shape, shape),
        ours=calls(functools.partial(metalcore.scaled_dot_product_attention, is_causal=causal)),
        theirs=functools.partial(peer.attention, causal),
        bytes=4 * batch * heads * length * size * dtype.itemsize,
        flops=4 * batch * heads * length**2 * size // (2 if causal else 1),
        peak="matmul_float32" if dtype == torch.float32 else "matmul_bfloat16",
        reference=functools.partial(first_head, causal),
        limit=limit_of(peer, dtype),
    )


def decode(peer, shape, queries, dtype, scale):
    heads, kv_heads, keys, size = shape
    of_keys = 1, kv_heads, keys, size
    return peer_case(
        name=f"decode, {heads} heads, {queries} queries, {type(peer).__name__}",
        shape=size_text((keys, size)),
        dtype=dtype,
        inputs=random(dtype, (1, heads, queries, size), of_keys, of_keys),
        ours=calls(functools.partial(metalcore.scaled_dot_product_attention, enable_gqa=True)),
        theirs=peer.decode,
        bytes=2 * kv_heads * keys * size * dtype.itemsize,
        reference=functools.partial(first_head, False),
        limit=limit_of(peer, dtype),
    )
