"""Selective state spaces of Mamba 1 and 2 and their step, against loops over positions of PyTorch's ops."""

import torch

import metalcore
from metalcore.sequence._mamba_chunk_scan import _reference as _heads
from metalcore.sequence._selective_scan import _reference
from metalcore.sequence._selective_state_update import _update

from ...harness.case import DTYPES, KINDS, Comparison, family

# batch, channels, length, states of Mamba 2.8B. PyTorch calls some ops for each position.
SHAPES = {
    "gpu": [(1, 5120, 2048, 16), (8, 5120, 2048, 16), (1, 5120, 16384, 16)],
    "simulator": [(1, 64, 128, 16)],
    "quick": [(1, 8, 16, 4)],
}
# batch, length, heads, channels of a head, states of Mamba 2's 2.7B
HEADS = {"gpu": [(1, 2048, 80, 64, 128)], "simulator": [(1, 128, 2, 32, 64)], "quick": [(1, 16, 2, 4, 20)]}
# batch, heads, channels of a head, states: Mamba 1's 2.8B and Mamba 2's 2.7B
STEPS = {
    "gpu": [(64, 1, 5120, 16), (64, 80, 64, 128), (1, 80, 64, 128)],
    "simulator": [(2, 4, 32, 64)],
    "quick": [(1, 2, 8, 4)],
}


def ours(u, delta, A, B, C, D, z, bias):
    return metalcore.selective_scan(u, delta, A, B, C, D, z, bias, True)


def theirs(u, delta, A, B, C, D, z, bias):
    return _reference(u, delta, A, B, C, D, z, bias, True)


def our_heads(x, dt, A, B, C, D, z, bias):
    return metalcore.mamba_chunk_scan_combined(x, dt, A, B, C, 256, D, z, bias, dt_softplus=True)


def their_heads(x, dt, A, B, C, D, z, bias):
    return _heads(x, dt, A, B, C, 256, D, z, bias, dt_softplus=True)


def our_step(state, *arguments):
    return metalcore.selective_state_update(state, *arguments, dt_softplus=True)


def their_step(state, x, dt, A, B, C, D, z, bias):
    return _update(state, x, dt, A, B, C, D, z, bias, True, None)


@family
def selective_scan(scale):
    for shape in SHAPES[scale]:
        for kind in KINDS:
            for dtype in DTYPES:
                yield case(kind, shape, dtype, scale)
    for shape in HEADS[scale]:
        for kind in KINDS:
            for dtype in DTYPES:
                yield heads_case(kind, shape, dtype, scale)
    for shape in STEPS[scale]:
        for dtype in DTYPES:
            yield step(shape, dtype, scale)


def case(kind, shape, dtype, scale):
    batch, channels, length, states = shape

    def inputs(device):
        # The channels are neighbours in memory, as a projection leaves them.
        u, delta, z = (torch.randn(batch, length, channels, device=device).to(dtype).mT for _ in range(3))
        B, C = (torch.randn(batch, length, states, device=device).to(dtype).mT for _ in range(2))
        A = -torch.arange(1.0, states + 1, device=device).expand(channels, states).contiguous()
        D, bias = torch.ones(channels, device=device), torch.full((channels,), -4.0, device=device)
        return u, delta, A, B, C, D, z, bias

    passes = {"forward": 4, "backward": 7, "forward+backward": 11}[kind]  # over tensors of u's shape
    return Comparison(
        name=f"selective_scan {kind}",
        shape="x".join(map(str, shape)),
        dtype=dtype,
        ours=ours,
        theirs=theirs,
        bind=KINDS[kind],
        inputs=inputs,
        bytes=passes * batch * channels * length * dtype.itemsize,
        targets={"speedup": 1.0} if scale == "gpu" else {},
    )


def heads_case(kind, shape, dtype, scale):
    batch, length, heads, dim, states = shape

    def inputs(device):
        x, z = (torch.randn(batch, length, heads, dim, device=device).to(dtype) for _ in range(2))
        B, C = (torch.randn(batch, length, 1, states, device=device).to(dtype) for _ in range(2))
        dt, A = torch.randn(batch, length, heads, device=device).to(dtype), -torch.arange(1.0, heads + 1, device=device)
        return x, dt, A, B, C, torch.ones(heads, device=device), z, torch.full((heads,), -4.0, device=device)

    passes = {"forward": 1, "backward": 2, "forward+backward": 3}[kind]
    return Comparison(
        name=f"mamba_chunk_scan_combined {kind}",
        shape="x".join(map(str, shape)),
        dtype=dtype,
        ours=our_heads,
        theirs=their_heads,
        bind=KINDS[kind],
        inputs=inputs,
        bytes=passes * 3 * batch * length * heads * dim * dtype.itemsize,  # x, z and the result
        flops=passes * 4 * batch * length * heads * dim * states,  # a state learns and is read
        peak="matmul_float32" if dtype == torch.float32 else "matmul_bfloat16",
        targets={"speedup": 1.0} if scale == "gpu" else {},
    )


def step(shape, dtype, scale):
    batch, heads, dim, states = shape

    def inputs(device):
        state = torch.randn(batch, heads, dim, states, device=device)
        x, z = (torch.randn(batch, heads, dim, device=device).to(dtype) for _ in range(2))
        B, C = (torch.randn(batch, 1, states, device=device).to(dtype) for _ in range(2))
        if heads == 1:  # Mamba 1
            dt, A = torch.randn_like(x), -torch.rand(heads, dim, states, device=device)
            D, bias = torch.ones(heads, dim, device=device), torch.zeros(heads, dim, device=device)
        else:  # Mamba 2, whose heads have one number each
            dt, A = x[..., :1].expand_as(x), -torch.rand(heads, 1, 1, device=device).expand(heads, dim, states)
            D, bias = (torch.ones(heads, 1, device=device).expand(heads, dim) for _ in range(2))
        return state, x, dt, A, B, C, D, z, bias

    return Comparison(
        name="selective_state_update",
        shape="x".join(map(str, shape)),
        dtype=dtype,
        ours=our_step,
        theirs=their_step,
        inputs=inputs,
        bytes=2 * batch * heads * dim * states * 4,  # the state
        targets={"share": 0.8, "speedup": 1.0} if scale == "gpu" and batch > 1 else {},
    )
