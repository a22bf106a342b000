"""Launches of PyTorch's own Metal kernels, as its host code makes them. Most of PyTorch's ops on Apple's GPUs run
MPSGraph, whose kernels are not public."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from .published import Launch, Published, checkout, struct_argument

KERNELS = "aten/src/ATen/native/mps/kernels"
TILE = 16


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
