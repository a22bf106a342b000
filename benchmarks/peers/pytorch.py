"""Launches of PyTorch's own Metal kernels, as its host code makes them, and of metal-flash-sdpa of kernels-community,
whose tiles are those of PyTorch's own attention on `mps`. Most of PyTorch's ops on Apple's GPUs run MPSGraph, whose
kernels are not public."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from .mlx import NAMES
from .published import Launch, Launches, Published, checkout, struct_argument

KERNELS = "aten/src/ATen/native/mps/kernels"
TILE = 16
FLASH_SDPA = "sdpa-metal/scaled_dot_product_attention.metal"


class PyTorch:
    """The kernels of a checkout of pytorch/pytorch. Numbers are float32."""

    def __init__(self, folder):
        self.folder = folder

    def matmul(self, a, b):
        """a @ b by the kernel for what MPSGraph does not take, and for all products with PYTORCH_MPS_PREFER_METAL."""
        (m, k), n = a.shape, b.shape[1]
        file = checkout("--pytorch", self.folder, f"{KERNELS}/LinearAlgebra.metal")
        published = Published(file, (Path(torch.__file__).parent / "include",))  # which has c10/metal
        sizes = torch.tensor([m, k, n, 0], dtype=torch.int32, device=a.device)
        strides = struct_argument("6Q", k, 1, n, 1, n, 1)
        arguments = a, b, torch.empty(m, n, device=a.device), strides, sizes
        groups = math.ceil(n / TILE), math.ceil(m / TILE), 1
        return Launch(published, {}, "matmul_float", arguments, groups, (TILE, TILE, 1))


class FlashSDPA:
    """The kernels of a checkout's folder metal-flash-sdpa, or of the checkout."""

    def __init__(self, folder):
        file = checkout("--flash-sdpa", folder, FLASH_SDPA, f"metal-flash-sdpa/{FLASH_SDPA}")
        self.published = Published(file, (Path(folder).resolve(),))

    def attention(self, causal, q, k, v):
        """Launches attention of packed sequences: their tokens lie in a row, and a tensor says where each begins."""
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
