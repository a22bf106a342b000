"""causal_conv1d with silu, of both layouts in memory, and its step, against PyTorch's ops that transformers calls."""

import torch
import torch.nn.functional as F

import metalcore

from ...harness.case import DTYPES, KINDS, Comparison, family, of_all

WIDTH = 4
# batch, channels, length
SHAPES = {
    "gpu": [(8, 8192, 2048), (1, 8192, 16384), (8, 2560, 2048)],
    "simulator": [(1, 64, 256)],
    "quick": [(1, 8, 16)],
}
STEPS = {"gpu": [(64, 8192), (1, 8192)], "simulator": [(4, 256)], "quick": [(2, 8)]}


def ours(x, weight):
    return metalcore.causal_conv1d(x, weight, activation="silu")


def theirs(x, weight):
    y = F.conv1d(x, weight[:, None], padding=weight.shape[1] - 1, groups=weight.shape[0])
    return F.silu(y[..., : x.shape[2]])


def our_step(x, state, weight):
    return metalcore.causal_conv1d_update(x, state, weight, activation="silu")


def their_step(x, state, weight):
    every = torch.cat([state, x[..., None]], -1)
    state.copy_(every[..., 1:])
    return F.silu((every * weight).sum(-1))


@family
def causal_conv1d(scale):
    yield from of_all(case, scale, ("channels first", "channels last"), KINDS, SHAPES[scale], DTYPES)
    for batch, channels in STEPS[scale]:
        for dtype in DTYPES:
            yield step(batch, channels, dtype, scale)


def case(layout, kind, shape, dtype, scale):
    batch, channels, length = shape

    def inputs(device):
        x = torch.randn(shape, device=device).to(dtype)
        # The same numbers side by side along the channels.
        x = x if layout == "channels first" else x.mT.contiguous().mT
        return x, torch.randn(channels, WIDTH, device=device).to(dtype)

    passes = {"forward": 2, "backward": 3, "forward+backward": 5}[kind]
    return Comparison(
        name=f"causal_conv1d {layout} {kind}",
        shape=f"{batch}x{channels}x{length}",
        dtype=dtype,
        ours=ours,
        theirs=theirs,
        bind=KINDS[kind],
        inputs=inputs,
        bytes=passes * batch * channels * length * dtype.itemsize,
        targets={"share": 0.8, "speedup": 1.0} if scale == "gpu" else {},
    )


def step(batch, channels, dtype, scale):
    def inputs(device):
        shapes = (batch, channels), (batch, channels, WIDTH - 1), (channels, WIDTH)
        x, state, weight = (torch.randn(each, device=device).to(dtype) for each in shapes)
        return x, state, weight

    return Comparison(
        name="causal_conv1d_update",
        shape=f"{batch}x{channels}",
        dtype=dtype,
        ours=our_step,
        theirs=their_step,
        inputs=inputs,
        bytes=batch * channels * (2 + 2 * (WIDTH - 1)) * dtype.itemsize,
        targets={"speedup": 1.0} if scale == "gpu" else {},
    )
