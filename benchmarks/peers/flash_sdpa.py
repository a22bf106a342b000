"""Launches of metal-flash-sdpa of kernels-community, whose tiles are those of PyTorch's own attention on `mps`."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from .mlx import NAMES
from .published import Launch, Launches, Published, checkout, struct_argument

FILE = "sdpa-metal/scaled_dot_product_attention.metal"


class FlashSDPA:
    """The kernels of a checkout's folder metal-flash-sdpa, or of the checkout."""

    def __init__(self, folder):
        file = checkout("--flash-sdpa", folder, FILE, f"metal-flash-sdpa/{FILE}")
        self.published = Published(file, (Path(folder).resolve(),))

    def attention(self, causal, q, k, v):
        """The sequences are packed: their tokens lie in a row, and a tensor says where each begins."""
        batch, heads, length, size = q.shape
        keys = k.shape[2]
        rows, columns, simdgroups = (16, 8, 2) if size == 256 else (32, 16 if size >= 128 else 32, 4)
        packed = [tensor.transpose(1, 2).contiguous() for tensor in (q, k, v)]
        out = torch.empty_like(packed[0])
        begins = [torch.arange(0, (batch + 1) * n, n, dtype=torch.int32, device=q.device) for n in (length, keys)]
        parameters = struct_argument(
            "6i2f7i12q4i",
            *(batch, heads, size, 0, 0, heads // k.shape[1], size**-0.5, 1.0, *[0] * 19),
            *(batch * length, batch * keys, length, keys),
        )
        launch = Launch(
            self.published,
            {200: False, 201: False, 300: False, 301: causal},
            f"steel_attention_{NAMES[q.dtype]}_bq{rows}_bk{columns}_bd{size}_wm{simdgroups}_wn1_maskbool_",
            (*packed, out, parameters, None, None, *begins),
            (math.ceil(length / rows), heads, batch),
            (32, simdgroups, 1),
        )
        return Launches(out.transpose(1, 2), launch)
