"""Launches of the Metal kernels of ggml, as its host code makes them."""

from __future__ import annotations

import dataclasses
import math

import torch

from metalcore.quant import type_of

from .published import Launch, Launches, Published, checkout, struct_argument

FOLDERS = ("ggml/src", "src", ".")  # of llama.cpp and whisper.cpp; of ggml
NAMES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
# Each kernel for one row has so many simdgroups of a threadgroup, rows of a simdgroup, bytes of threadgroup memory.
MATVEC = {
    "Q4_0": (2, 4, 16),
    "Q4_1": (2, 4, 16),
    "Q5_0": (2, 4, 16),
    "Q5_1": (2, 4, 16),
    "Q8_0": (4, 2, 256),
    "MXFP4": (2, 2, 128),
    "Q2_K": (2, 4, 0),
    "Q3_K": (2, 2, 0),
    "Q4_K": (2, 2, 0),
    "Q5_K": (2, 1, 0),
    "Q6_K": (2, 2, 0),
    "IQ4_NL": (2, 2, 128),
    "IQ4_XS": (2, 2, 128),
}
UNALIGNED = ("Q5_0",)  # of its blocks of 22 bytes, the kernel reads 4 at once
WORKGROUPS = 32  # that share the keys of a query


class GGML:
    """The kernels of a checkout of ggml or llama.cpp. Numbers are float32, except packed weights, keys and values."""

    def __init__(self, folder):
        file = checkout("--ggml", folder, *(f"{parent}/ggml-metal/ggml-metal.metal" for parent in FOLDERS))
        self.published = Published(file, (file.parent, file.parents[1]), ("GGML_METAL_HAS_BF16",))

    def matvec(self, type, packed, x):
        """Multiplies x (1, weights of a row) by packed weights."""
        rows, length, stride = packed.shape[0], x.shape[1], packed.shape[1]
        simdgroups, of_simdgroup, memory = MATVEC[type]
        out = torch.empty(1, rows, device=x.device)
        parameters = struct_argument(
            "3i4Q3i4Q3i2h",
            *(length, rows, 1, type_of(type).nbytes, stride, stride * rows, stride * rows),
            *(length, 1, 1, 4, 4 * length, 4 * length, 4 * length, rows, 1, of_simdgroup, 1, 1),
        )
        # The simdgroups of Q8_0 share rows; those of other types have their own.
        of_group = of_simdgroup if type == "Q8_0" else of_simdgroup * simdgroups
        launch = Launch(
            dataclasses.replace(self.published, aligned=type not in UNALIGNED),
            {**matmul_constants(simdgroups), 700: False, 701: False},
            f"kernel_mul_mv_{kernel_name(type)}_f32",
            (parameters, packed, x, out),
            (math.ceil(rows / of_group), 1, 1),
            (32, simdgroups, 1),
            memory,
        )
        return Launches(out, launch)

    def matmul(self, type, packed, x):
        """Multiplies x (n, weights of a row) by packed weights, in tiles of 32 x 64."""
        rows, (n, length), stride = packed.shape[0], x.shape, packed.shape[1]
        out = torch.empty(n, rows, device=x.device)
        cut = rows % 64 != 0 or n % 32 != 0
        parameters = struct_argument(
            "2i3Qi4Q2i2h",
            *(length, 1, stride, stride * rows, stride * rows, 1),
            *(4, 4 * length, 4 * length * n, 4 * length * n, rows, n, 1, 1),
        )
        launch = Launch(
            self.published,
            {**matmul_constants(2), 700: length % 32 != 0, 701: cut},
            f"kernel_mul_mm_{kernel_name(type)}_f32",
            (parameters, packed, x, out),
            (math.ceil(n / 32), math.ceil(rows / 64), 1),
            (32, 4, 1),
            8192 if cut else 6144,
        )
        return Launches(out, launch)

    def attention(self, causal, q, k, v):
        """Launches attention of many queries. If it is causal there is a mask, and a pass over it that finds the blocks
        to leave out."""
        batch, heads, length, size = q.shape
        keys = whole(k.shape[2], 64)
        q, out = q.float(), torch.empty(batch, length, heads, size, device=q.device)
        constants, launches, mask, blocks = attention_constants(size, causal, 4), [], None, None
        if causal:
            mask = torch.full((length, keys), -math.inf, device=q.device).triu_(1 + keys - length).half()
            tiles = math.ceil(keys / 64), math.ceil(length / 8), 1
            blocks = torch.empty(tiles[0] * tiles[1] + 32, dtype=torch.int8, device=q.device)
            stride = 2 * length * keys
            parameters = struct_argument("5i3Q", length, keys, length, 1, 1, 2 * keys, stride, stride)
            arguments = parameters, mask, blocks
            launches.append(
                Launch(self.published, constants, "kernel_flash_attn_ext_blk", arguments, tiles, (32, 1, 1))
            )
        unused = out
        arguments = (
            *(attention_parameters(q, k, v, mask, out), q, k, v),
            *(mask if causal else unused, unused, unused, blocks if causal else unused, out),
        )
        launches.append(
            Launch(
                self.published,
                constants,
                f"kernel_flash_attn_ext_{NAMES[k.dtype]}_dk{size}_dv{size}",
                arguments,
                (math.ceil(length / 8), heads, batch),
                (32, 4, 1),
                padded(16 * (size + 2 * padded(size, 64) + 256), 16),
            )
        )
        return Launches(out.transpose(1, 2), *launches)

    def decode(self, q, k, v):
        """Launches attention of few queries: workgroups share the keys, and a second kernel joins their results."""
        batch, heads, queries, size = q.shape
        keys, simdgroups = whole(k.shape[2], 32), 1
        while 2 * 32 * simdgroups * WORKGROUPS < keys and simdgroups < 4:
            simdgroups *= 2
        q, out = q.float(), torch.empty(batch, queries, heads, size, device=q.device)
        rows = queries * heads * batch
        partial = torch.empty(rows * WORKGROUPS * (size + 2), device=q.device)
        constants = attention_constants(size, False, simdgroups)
        return Launches(
            out.transpose(1, 2),
            Launch(
                self.published,
                constants,
                f"kernel_flash_attn_ext_vec_{NAMES[k.dtype]}_dk{size}_dv{size}",
                (attention_parameters(q, k, v, None, out), q, k, v, out, out, out, partial),
                (queries, heads, batch * WORKGROUPS),
                (32, simdgroups, 1),
                padded(2 * simdgroups * (3 * padded(size, 128) + 128), 16),
            ),
            Launch(
                self.published,
                constants,
                "kernel_flash_attn_ext_vec_reduce",
                (struct_argument("i", rows), partial, out),
                (rows, 1, 1),
                (32 * WORKGROUPS, 1, 1),
            ),
        )


def kernel_name(type):
    return type.lower().replace("_k", "_K")


def padded(number, to):
    return math.ceil(number / to) * to


def whole(keys, block):
    if keys % block:
        raise ValueError(f"ggml's attention is called with multiples of {block} keys here, not {keys}")
    return keys


def matmul_constants(simdgroups):
    """Returns the simdgroups of a threadgroup, and the batches and their ratios, which are 1."""
    return {600: simdgroups, 601: 0, 602: 1, 603: 1, 604: 1, 702: 1, 703: 1, 704: 1, 705: 1}


def attention_constants(size, mask, simdgroups):
    """Returns the constants of the mask's pass (100), of many queries (300), of few (400) and of the joining kernel
    (500)."""
    constants = {100: mask, 125: 64, 224: 8, 225: 64, 310: False, 500: size, 501: WORKGROUPS, 423: WORKGROUPS}
    for base in (300, 400):
        constants |= {base: mask, **dict.fromkeys(range(base + 1, base + 5), False)}
        constants |= {base + 20: size, base + 21: size, base + 22: simdgroups}
    return constants


def attention_parameters(q, k, v, mask, out):
    batch, heads, length, size = q.shape

    def strides(tensor):  # in bytes, of a row, of a head and of a batch
        return [tensor.stride(axis) * tensor.element_size() for axis in (2, 1, 0)]

    row = 2 * mask.shape[1] if mask is not None else 0
    of_mask = (length, 1, 1, row, length * row, length * row) if mask is not None else (0,) * 6
    return struct_argument(
        "3i3Q4i3Qi3Q3i3Q3i4fif",
        *(length, heads, batch, *strides(q), k.shape[2], k.shape[1], batch),
        *(size, *strides(k), size, *strides(v), *of_mask),
        *(heads, length, batch, size**-0.5, 0.0, 1.0, 1.0, 1 << int(math.log2(heads)), 0.0),
    )
