"""The next positions of causal_conv1d."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .._core.operators import cpu_kernel, fake_kernel, ops
from .._core.registry import Op, Sample, register
from .._core.routing import require_floats, require_integers, require_tensors
from .._core.samples import integers
from .._core.tensors import check_written, in_int32
from ._causal_conv1d import is_silu, result_of, takes
from ._taps import check, wide

__all__ = ["causal_conv1d_update"]


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
) -> Tensor:
    """Computes the next positions of `causal_conv1d` and puts them into the state, as the function of this name of the
    package causal-conv1d.

    Args:
        x: (batch, channels) or (batch, channels, new positions): float32, float16 or bfloat16, any strides.
        conv_state: (batch, channels, kept positions) of x's dtype, any strides: at least the last width - 1 positions.
            It is changed: the new positions are shifted in, or with cache_seqlens written over the oldest.
        weight, bias, activation: as causal_conv1d has them.
        cache_seqlens: (batch,), integers, or None: how many positions came before. The state is a ring then, whose
            position p is at p modulo its length.
        conv_state_indices: (batch,), integers, or None: the row of conv_state, which has any number of them, for each
            batch entry. An entry with a negative one is padding, whose result is 0.

    Returns:
        y of x's shape and dtype. Where a gradient is needed, PyTorch's ops compute it; the state itself has none.

    Raises:
        ValueError: the activation is unknown.
        TypeError: an argument is no tensor, or has numbers of another kind.
        RuntimeError: shapes do not go together.

    Example:
        >>> state, weight = torch.zeros(1, 6, 3, device="mps"), torch.ones(6, 4, device="mps")
        >>> metalcore.causal_conv1d_update(torch.ones(1, 6, device="mps"), state, weight).shape
        torch.Size([1, 6])
        >>> state[0, 0].tolist()
        [0.0, 0.0, 1.0]
    """
    op = "causal_conv1d_update"
    silu = is_silu(op, activation)
    require_tensors(op, x=x, conv_state=conv_state, weight=weight)
    numbers = {"cache_seqlens": cache_seqlens, "conv_state_indices": conv_state_indices}
    require_tensors(op, optional=True, bias=bias, **numbers)
    require_integers(op, **numbers)
    check_written(op, "conv_state", conv_state)
    counts, rows = (None if t is None else in_int32(t, x.device) for t in numbers.values())
    entries = x[..., None] if x.dim() == 2 else x
    tensors = x, conv_state, weight, bias
    differentiated = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    if takes(x, weight, bias, conv_state, counts, rows) and not differentiated:
        y = ops.causal_conv1d_update(entries, conv_state, weight, bias, silu, counts, rows)
        torch.autograd.graph.increment_version((conv_state,))
    else:
        require_floats(op, x=x, conv_state=conv_state, weight=weight, bias=bias)
        _check(op, entries, conv_state, weight, bias, counts, rows, any_width=True)
        y = _update(entries, conv_state, weight, bias, silu, counts, rows)
    return y[..., 0] if x.dim() == 2 else y


def _check(op, x, state, weight, bias, counts, rows, any_width=False):
    """Checks what the host side checks, with its messages."""
    check(op, x, weight, bias, any_width=any_width)
    batch, channels, kept = *x.shape[:2], weight.shape[1] - 1
    if (
        state.dim() != 3
        or state.shape[1] != channels
        or state.shape[2] < kept
        or (rows is None and state.shape[0] != batch)
    ):
        raise RuntimeError(
            f"metalcore::{op}: conv_state must be [{batch}, {channels}, {kept} or more], not {list(state.shape)}"
        )
    for name, numbers in (("cache_seqlens", counts), ("conv_state_indices", rows)):
        if numbers is not None and (numbers.dtype != torch.int32 or numbers.shape != (batch,)):
            raise RuntimeError(
                f"metalcore::{op}: {name} must be int32 of the shape {[batch]}, and is "
                f"{str(numbers.dtype).removeprefix('torch.')} of {list(numbers.shape)}"
            )


def _update(x, state, weight, bias, silu, counts, rows):
    """Computes the same in PyTorch's ops. It is differentiable."""
    if x.numel() == 0:  # a window would be longer than what there is
        return x * 1
    length, kept, width = x.shape[2], state.shape[2], weight.shape[1]
    own = state if rows is None else state[rows.long().clamp(0, state.shape[0] - 1)]
    place = torch.arange(kept, device=x.device)
    if counts is not None:  # the oldest position first
        own = own.gather(2, ((counts[:, None] + place) % kept)[:, None].expand_as(own).long())
    every = torch.cat([own, x], -1)
    windows = wide(every)[..., kept - width + 1 :].unfold(-1, width, 1)
    y = (windows * wide(weight)[:, None]).sum(-1)
    y = y if bias is None else y + wide(bias)[:, None]
    y = (F.silu(y) if silu else y).to(x.dtype)
    with torch.no_grad():
        new = every[..., length:].to(state.dtype)
        if counts is not None:
            new = new.gather(2, ((place - counts[:, None] - length) % kept)[:, None].expand_as(new).long())
        if rows is None:
            state.copy_(new)
            return y
        inside = (rows >= 0) & (rows < state.shape[0])
        state[rows[inside].long()] = new[inside]
    y = y.masked_fill((rows >= state.shape[0])[:, None, None], torch.nan)
    return y.masked_fill((rows < 0)[:, None, None], 0.0)


@cpu_kernel("causal_conv1d_update")
def _(x, conv_state, weight, bias, silu, cache_seqlens, conv_state_indices):
    _check("causal_conv1d_update", x, conv_state, weight, bias, cache_seqlens, conv_state_indices)
    return result_of(x).copy_(_update(x, conv_state, weight, bias, silu, cache_seqlens, conv_state_indices))


@fake_kernel("causal_conv1d_update")
def _(x, conv_state, weight, bias, silu, cache_seqlens, conv_state_indices):
    _check("causal_conv1d_update", x, conv_state, weight, bias, cache_seqlens, conv_state_indices)
    return result_of(x)


def _call(function, x, conv_state, *arguments):
    state = conv_state.clone()
    return function(x, state, *arguments), state


def _reference(x, conv_state, weight, bias=None, activation=None, cache_seqlens=None, conv_state_indices=None):
    y = _update(
        x[..., None] if x.dim() == 2 else x,
        conv_state,
        weight,
        bias,
        activation is not None,
        cache_seqlens,
        conv_state_indices,
    )
    return y[..., 0] if x.dim() == 2 else y


def _sample(name, x, state, width, activation: str | None = "silu", *, counts=None, rows=None):
    def arguments(x, state, weight, bias):
        numbers = [None if t is None else integers(t, x, torch.int32) for t in (counts, rows)]
        return x, state, weight, bias, activation, *numbers

    return Sample(name, (x, state, (x[1], width), (x[1],)), arguments=arguments, terms=width)


register(
    Op(
        "causal_conv1d_update",
        causal_conv1d_update,
        reference=_reference,
        call=_call,
        operators=("causal_conv1d_update",),
        backward=False,
        integers={"cache_seqlens": torch.int32, "conv_state_indices": torch.int32},
        samples=lambda: (
            _sample("a position", (3, 40), (3, 40, 3), 4),
            _sample("wide", (3, 5, 1), (3, 5, 11), 8, None),
            _sample("several positions", (2, 5, 3), (2, 5, 4), 3),
            _sample("a ring", (3, 5, 2), (3, 5, 6), 4, counts=(0, 4, 11)),
            _sample("rows", (3, 5, 1), (4, 5, 3), 2, rows=(2, -1, 0)),
        ),
    )
)
