"""Launches of MLX's kernels, as its host code makes them on the GPUs of Pro, Max and Ultra."""

from __future__ import annotations

import functools
import math
from pathlib import Path

import torch

from .published import Launch, Launches, Published, checkout, struct_argument

KERNELS = "mlx/backend/metal/kernels"
NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
VECTOR_NAMES = {torch.bfloat16: "bfloat16_t", torch.float16: "float16_t", torch.float32: "float"}
# The headers of packed weights, one after the other, and a product with a vector of bfloat16, float16 or float32.
PACKED = """
#include "mlx/backend/metal/kernels/utils.h"
#include "mlx/backend/metal/kernels/steel/gemm/gemm.h"
#include "mlx/backend/metal/kernels/quantized_utils.h"
#include "mlx/backend/metal/kernels/{header}.h"
instantiate_kernel("{kernel}", {function}, {name}, {group}, {bits}, false)
"""
# Fewer keys take one pass.
TWO_PASSES = 1024


class MLX:
    """The kernels of a checkout of ml-explore/mlx."""

    def __init__(self, folder):
        def published(name):
            return Published(checkout("--mlx", folder, f"{KERNELS}/{name}.metal"), (Path(folder).resolve(),))

        self._published = published
        self.gemm = published("steel/gemm/kernels/steel_gemm_fused")
        self.attention_file = published("steel/attn/kernels/steel_attention")
        self.vector = published("scaled_dot_product_attention")
        self.folder = folder

    def matvec(self, mode, bits, x, packed, scales, offsets=None):
        """Computes x Wᵀ for one row of x and weights packed as "affine" or "mxfp4" says, where no tile is cut off."""
        rows, length = packed.shape[0], x.shape[1]
        group = length // scales.shape[1]
        header, prefix = ("quantized", "affine") if mode == "affine" else ("fp_quantized", "fp")
        file = checkout("--mlx", self.folder, f"{KERNELS}/{header}.h")
        name, out = VECTOR_NAMES[x.dtype], torch.empty(1, rows, device=x.device, dtype=x.dtype)
        kernel = f"{mode}_qmv_fast_{name}_gs_{group}_b_{bits}_batch_0"
        text = PACKED.format(
            header=header, kernel=kernel, function=f"{prefix}_qmv_fast", name=name, group=group, bits=bits
        )
        # No batch: its shapes and strides are not read.
        sizes, strides = (torch.zeros(1, device=x.device, dtype=dtype) for dtype in (torch.int32, torch.int64))
        batch = 0, sizes, strides, 0, sizes, *[strides] * (2 if offsets is None else 3)
        third = torch.ones(1, device=x.device) if offsets is None else offsets  # a scale of all, which is not read
        arguments = packed, scales, third, x, out, length, rows, *batch
        published = Published(file, (Path(self.folder).resolve(),), text=text)
        constants = {200: True, 201: True, 202: True}
        return Launches(out, Launch(published, constants, kernel, arguments, (1, rows // 8, 1), (32, 2, 1)))

    def matmul(self, layout, swizzle, a, b, for_units=False):
        """Computes a @ b ("nn"), or a @ b.T ("nt"), in tiles of 64 x 64, or by Metal 4's matmul2d in tiles of 128 x
        128."""
        (m, k), n = a.shape, b.shape[1 if layout == "nn" else 0]
        tile, depth, across = (128, 512, 4) if for_units else (64, 16, 2)
        rows, columns = math.ceil(m / tile), math.ceil(n / tile)
        swizzle = swizzle if rows > 3 else 0
        out = torch.empty(m, n, device=a.device, dtype=a.dtype)
        sizes = m, n, k, k, b.shape[1], n, columns, rows
        parameters = struct_argument("8i3q3i", *sizes, m * k, n * k, m * n, swizzle, k // depth, 0)
        # No batch, no addend; the last three say that no tile is cut off.
        aligned = {200: m % tile == 0, 201: n % tile == 0, 202: k % depth == 0}
        launch = Launch(
            self._published("steel/gemm/kernels/steel_gemm_fused_nax") if for_units else self.gemm,
            {10: False, 100: False, 110: False, **aligned},
            f"steel_gemm_fused_{'nax_' if for_units else ''}{layout}_{NAMES[a.dtype]}_{NAMES[a.dtype]}"
            f"_bm{tile}_bn{tile}_bk{depth}_wm{across}_wn{across}",
            (a, b, None, out, parameters, None, None, None),
            (columns << swizzle, math.ceil(rows / (1 << swizzle)), 1),
            (32, across, across),
        )
        return Launches(out, launch)

    def attention(self, causal, q, k, v):
        batch, heads, length, size = q.shape
        keys, block = k.shape[2], 32 if size < 128 else 16
        out = torch.empty(batch, length, heads, size, device=q.device, dtype=q.dtype).transpose(1, 2)
        rows, columns = math.ceil(length / 32), math.ceil(keys / block)
        parameters = struct_argument(
            "6if7i12q",
            *(batch, heads, size, length, keys, heads // k.shape[1], size**-0.5, rows, columns),
            *(length // 32, keys // block, length % 32, keys % block, keys - length),
            *(stride for tensor in (q, k, v, out) for stride in tensor.stride()[:3]),
        )
        name = NAMES[q.dtype]
        launch = Launch(
            self.attention_file,
            {200: length % 32 == 0, 201: keys % block == 0, 300: False, 301: causal, 302: False},
            f"steel_attention_{name}_bq32_bk{block}_bd{size}_wm4_wn1_mask{name}",
            (q, k, v, out, parameters, None, None, None),
            (rows, heads, batch),
            (32, 4, 1),
        )
        return Launches(out, launch)

    def decode(self, q, k, v):
        """Launches attention of few queries: one pass over the keys, or passes over blocks of them and one that joins
        these."""
        batch, heads, queries, size = q.shape
        kv_heads, keys = k.shape[1:3]
        group, out = heads // kv_heads, torch.empty_like(q)
        strides = k.stride(1), k.stride(2), v.stride(1), v.stride(2)
        name, scale = f"{VECTOR_NAMES[q.dtype]}_{size}", float(size**-0.5)
        blocks = blocks_of(group * queries, keys)
        launch = functools.partial(Launch, self.vector, {**dict.fromkeys(range(20, 26), False), 26: blocks})
        if keys < TWO_PASSES:
            arguments = q, k, v, out, group, keys, *strides, scale, *[None] * 7
            return Launches(
                out, launch(f"sdpa_vector_{name}_{size}", arguments, (batch * heads, queries, 1), (1024, 1, 1))
            )
        partial = torch.empty(batch, heads, queries, blocks, size, device=q.device, dtype=q.dtype)
        sums, maxima = (torch.empty(batch, heads, queries, blocks, device=q.device) for _ in range(2))
        # Eight heads of one query have a kernel of their own, without a mask's arguments.
        own = queries == 1 and group == 8 and size in (64, 128) and keys >= 8192
        arguments = q, k, v, partial, sums, maxima, None, keys, *strides, scale, *[None] * (0 if own else 6)
        return Launches(
            out,
            launch(
                f"sdpa_vector_2pass_1_{'gqa_' if own else ''}{name}_{size}",
                arguments,
                (kv_heads, batch, blocks),
                (32, group, queries),
            ),
            launch(
                f"sdpa_vector_2pass_2_{name}",
                (partial, sums, maxima, out, blocks),
                (batch * heads, queries, 1),
                (1024, 1, 1),
            ),
        )


def blocks_of(simdgroups, keys):
    """Returns how many blocks of keys the first pass has on an Ultra."""
    if simdgroups >= 6 and keys >= 16384:
        return 512 if keys < 65536 else 1024
    return 256 if simdgroups <= 2 and keys > 8192 else 128
