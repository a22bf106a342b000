"""causal_conv1d and its derivative in PyTorch's ops, in float32 or float64. Both are differentiable to any order."""

from __future__ import annotations

import torch
import torch.nn.functional as F

__all__ = ["WIDTHS", "check", "convolve", "gradients", "wide"]

WIDTHS = range(2, 9)


def check(op, x, weight, bias, seq_idx=None, cu_seqlens=None, state=None, *, any_width=False):
    """Checks what the host side checks, with its messages; PyTorch's ops take any width."""

    def require(holds, message):
        if not holds:
            raise RuntimeError(f"metalcore::{op}: {message}")

    require(x.dim() == 3, f"x must have 3 dimensions, and is {list(x.shape)}")
    batch, channels, length = x.shape
    widths = "1 or more" if any_width else f"{WIDTHS[0]} to {WIDTHS[-1]}"
    require(
        weight.dim() == 2
        and weight.shape[0] == channels
        and (weight.shape[1] > 0 if any_width else weight.shape[1] in WIDTHS),
        f"weight must be [{channels}, {widths}], not {list(weight.shape)}",
    )
    require(
        bias is None or bias.shape == (channels,), f"bias must be [{channels}], not {list(getattr(bias, 'shape', ()))}"
    )
    require(
        seq_idx is None or cu_seqlens is None and state is None,
        "seq_idx goes neither with cu_seqlens nor with initial_state",
    )
    if seq_idx is not None:
        require(
            seq_idx.dtype == torch.int32 and seq_idx.shape == (batch, length),
            f"seq_idx must be int32 of the shape {[batch, length]}, and is "
            f"{str(seq_idx.dtype).removeprefix('torch.')} of {list(seq_idx.shape)}",
        )
    if cu_seqlens is not None:
        require(
            cu_seqlens.dim() == 1 and cu_seqlens.shape[0] >= 1 and batch == 1,
            "cu_seqlens must be a vector of sequences' ends after 0, and x have one batch entry; they are "
            f"{list(cu_seqlens.shape)} and {list(x.shape)}",
        )
    if state is not None:
        expected = [batch if cu_seqlens is None else cu_seqlens.shape[0] - 1, channels, weight.shape[1] - 1]
        require(list(state.shape) == expected, f"initial_state must be {expected}, not {list(state.shape)}")


def wide(x):
    return x if x.dtype == torch.float64 else x.float()


def _taps(x, width, seq_idx, cu_seqlens, state):
    """Returns (source, index): source[..., index] has the window of each position, flattened, and the source is x with
    the states and a zero behind it."""
    batch, channels, length = x.shape
    position = torch.arange(length, device=x.device)
    behind = torch.arange(width - 1, -1, -1, device=x.device)
    number = torch.zeros_like(position)
    states = x.new_zeros(batch, channels, 0)
    if cu_seqlens is not None:
        ends = cu_seqlens[1:].long()
        number = torch.searchsorted(ends, position, right=True)
        starts = torch.cat([ends.new_zeros(1), ends])
        start = starts[number][None]
        if state is not None:
            states = state.transpose(0, 1).flatten(1)[None]
    elif seq_idx is not None:
        changes = torch.ones_like(seq_idx, dtype=torch.bool)
        changes[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
        start = torch.where(changes, position, 0).cummax(1).values if length else position[None]
    else:
        start = torch.zeros_like(position)[None]
        states = states if state is None else state
    age = (position - start)[..., None]
    zero = length + states.shape[-1]
    of_state = length + number[:, None] * (width - 1) + width - 1 + age - behind
    if state is None:
        of_state = torch.full_like(of_state, zero)
    index = torch.where(behind <= age, (position[:, None] - behind).expand_as(of_state), of_state.clamp(max=zero))
    source = torch.cat([wide(x), wide(states), wide(x.new_zeros(batch, channels, 1))], -1)
    return source, index.flatten(1)[:, None].expand(batch, channels, -1)


def _windows(source, index, width):
    return source.gather(-1, index).unflatten(-1, (index.shape[-1] // width, width))


def _padded(y, seq_idx):
    return y if seq_idx is None else y.masked_fill((seq_idx < 0)[:, None], 0.0)


def convolve(x, weight, bias, seq_idx, cu_seqlens, state, silu):
    """Computes causal_conv1d."""
    width = weight.shape[1]
    kernel, addend = wide(weight), None if bias is None else wide(bias)
    if seq_idx is None and cu_seqlens is None and x.numel():
        before = x.new_zeros(*x.shape[:2], width - 1) if state is None else state.to(x.dtype)
        y = F.conv1d(wide(torch.cat([before, x], -1)), kernel[:, None], addend, groups=x.shape[1])
    else:
        source, index = _taps(x, width, seq_idx, cu_seqlens, state)
        y = (_windows(source, index, width) * kernel[:, None]).sum(-1)
        y = _padded(y if addend is None else y + addend[:, None], seq_idx)
    return (F.silu(y) if silu else y).to(x.dtype)


def gradients(grad, x, weight, bias, seq_idx, cu_seqlens, state, silu):
    """Computes causal_conv1d's gradients of x, weight, bias and state."""
    width = weight.shape[1]
    source, index = _taps(x, width, seq_idx, cu_seqlens, state)
    windows, wide_weight = _windows(source, index, width), wide(weight)[:, None]
    g = _padded(wide(grad), seq_idx)
    if silu:
        y = (windows * wide_weight).sum(-1)
        y = _padded(y if bias is None else y + wide(bias)[:, None], seq_idx)
        s = torch.sigmoid(y)
        g = g * (s * (1 + y * (1 - s)))
    if seq_idx is not None:
        windows = windows.masked_fill((seq_idx < 0)[:, None, :, None], 0.0)
    gw, gb = (g[..., None] * windows).sum((0, 2)).to(weight.dtype), g.sum((0, 2))
    by_source = torch.zeros_like(source).scatter_add(-1, index, (g[..., None] * wide_weight).flatten(2))
    gx, gstate = by_source[..., : x.shape[2]].to(x.dtype), None
    if state is not None:
        gstate = by_source[..., x.shape[2] : -1]
        if cu_seqlens is not None:
            gstate = (
                gstate[0].unflatten(-1, (-1, width - 1)).transpose(0, 1) if state.shape[0] else torch.zeros_like(state)
            )
        gstate = gstate.to(state.dtype)
    return gx, gw, None if bias is None else gb.to(bias.dtype), gstate
