"""rope of q and k, (batch, heads, tokens, size) as views of (batch, tokens, heads, size), against PyTorch's ops."""

import functools

import torch

import metalcore

from ...harness.case import DTYPES, KINDS, Comparison, family, of_all

# batch, tokens, heads of q, heads of k, size of a head
SHAPES = {
    "gpu": [(4, 2048, 32, 8, 128), (8, 2048, 16, 16, 64)],
    "simulator": [(1, 128, 8, 2, 64)],
    "quick": [(1, 4, 2, 1, 32)],
}
TARGETS = {"share": 0.8, "speedup": 1.0}


def rotate_half(x):
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


def theirs(q, k, cos, sin):
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def neighbours(q, k, cos, sin):
    return metalcore.rope(q, k, cos, sin, interleaved=True)


def their_neighbours(q, k, cos, sin):
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)

    def rotated(x):
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
        return x * cos + turned * sin

    return rotated(q), rotated(k)


OPS = {"rope": (metalcore.rope, theirs), "rope interleaved": (neighbours, their_neighbours)}


@family
def rope(scale):
    return of_all(case, scale, OPS, KINDS, SHAPES[scale], DTYPES)


def case(op, kind, shape, dtype, scale):
    batch, tokens, q_heads, k_heads, size = shape

    def inputs(device):
        # Leaves whose gradients are wanted: q and k. The tables need none.
        q, k = (
            torch.randn(batch, tokens, heads, size, device=device).to(dtype).transpose(1, 2)
            for heads in (q_heads, k_heads)
        )
        return q, k

    def with_tables(function):
        @functools.cache
        def tables(device):
            angles = torch.rand(1, tokens, size // 2, device=device) * 6
            angles = angles.repeat_interleave(2, -1) if "interleaved" in op else torch.cat((angles, angles), -1)
            return angles.cos().to(dtype), angles.sin().to(dtype)

        return lambda q, k: function(q, k, *tables(q.device))

    directions = 2 if kind == "forward+backward" else 1
    ours, reference = map(with_tables, OPS[op])
    return Comparison(
        name=f"{op} {kind}",
        shape=f"{batch}x{tokens}x({q_heads}+{k_heads})x{size}",
        dtype=dtype,
        ours=ours,
        theirs=reference,
        bind=KINDS[kind],
        inputs=inputs,
        bytes=2 * directions * batch * tokens * (q_heads + k_heads) * size * dtype.itemsize,
        targets=TARGETS if scale == "gpu" else {},
    )
