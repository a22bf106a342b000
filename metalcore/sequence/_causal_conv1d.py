"""Convolutions of channels along time."""

from __future__ import annotations

import torch
from torch import Tensor

from .._core.operators import autograd, cpu_kernel, derive, fake_kernel
from .._core.registry import Op, Sample, register
from .._core.routing import INT32_MAX, accelerated, alike, require_floats, require_integers, require_tensors
from .._core.samples import integers
from .._core.tensors import in_int32
from ._taps import WIDTHS, check, convolve, gradients

__all__ = ["causal_conv1d"]


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Convolves each channel with its own window, which ends at the position: y[l] = bias + sum over k of
    weight[k] x[l - (width - 1) + k], as causal_conv1d_fn of the package causal-conv1d.

    Args:
        x: (batch, channels, length): float32, float16 or bfloat16, any strides: a view of (batch, length, channels) is
            read and written along the channels. It is computed in float32.
        weight: (channels, width) of x's dtype or float32. The kernels have widths of 2 to 8; PyTorch's ops take others.
        bias: (channels,) of the weight's dtype, or None.
        seq_idx: (batch, length), integers, or None: neighbouring positions with the same number are a sequence, of
            which no other sequence sees anything. Negative numbers are padding, whose results are 0.
        initial_state: what comes before each sequence, of x's dtype: (sequences, channels, width - 1 or more), of which
            the last width - 1 count. By default that is 0. There is none with seq_idx.
        return_final_state: whether the last width - 1 positions of each sequence, with its initial state before them,
            are returned as well: the initial state of what follows. There is none with seq_idx.
        activation: "silu" or "swish", which is the same, or None.
        cu_seqlens: (sequences + 1,), integers, or None: x has one batch entry, in which sequence i begins at position
            cu_seqlens[i] and ends before cu_seqlens[i + 1]. The first of them is 0. Positions behind the last sequence
            are one without a state.

    Returns:
        y, or (y, final state). y has x's shape and dtype. Its channels are side by side in memory if x's are, or else
        it is contiguous. Both have gradients of any order. The weight's and the bias's are summed in a fixed order, so
        that the same inputs give the same bits.

    Raises:
        ValueError: the activation is unknown, or seq_idx is given with cu_seqlens or with a state.
        TypeError: an argument is no tensor, or has numbers of another kind.
        RuntimeError: shapes do not go together.

    Example:
        >>> x, weight = torch.randn(1, 6, 10, device="mps"), torch.randn(6, 4, device="mps")
        >>> y, state = metalcore.causal_conv1d(x, weight, return_final_state=True, activation="silu")
        >>> y.shape, state.shape
        (torch.Size([1, 6, 10]), torch.Size([1, 6, 3]))
    """
    silu = is_silu("causal_conv1d", activation)
    require_tensors("causal_conv1d", x=x, weight=weight)
    require_tensors(
        "causal_conv1d", optional=True, bias=bias, seq_idx=seq_idx, initial_state=initial_state, cu_seqlens=cu_seqlens
    )
    require_integers("causal_conv1d", seq_idx=seq_idx, cu_seqlens=cu_seqlens)
    if seq_idx is not None and (cu_seqlens is not None or initial_state is not None or return_final_state):
        raise ValueError("causal_conv1d: seq_idx goes with neither cu_seqlens nor a state: give cu_seqlens instead")
    seq_idx, cu_seqlens = (None if t is None else in_int32(t, x.device) for t in (seq_idx, cu_seqlens))
    before = initial_state
    if before is not None and weight.dim() == 2 and before.dim() == 3:
        before = before[..., max(before.shape[-1] - weight.shape[1] + 1, 0) :]
    inputs = x, weight, bias, seq_idx, cu_seqlens, before, silu
    if takes(x, weight, bias, before, seq_idx, cu_seqlens):
        y = _convolve(*inputs)
    else:
        require_floats("causal_conv1d", x=x, weight=weight, bias=bias, initial_state=initial_state)
        check("causal_conv1d", *inputs[:-1], any_width=True)
        y = convolve(*inputs)
    return (y, _final_state(x, weight.shape[1] - 1, cu_seqlens, before)) if return_final_state else y


def is_silu(op, activation):
    if activation not in (None, "silu", "swish"):
        raise ValueError(f"{op}: activation must be 'silu', 'swish' or None, not {activation!r}")
    return activation is not None


_INT32 = frozenset({torch.int32})


def takes(x, weight, bias, state, *numbers):
    """Returns whether the kernels take tensors of these dtypes and numbers of elements."""
    return (
        alike(x, state)
        and accelerated(x, weight, bias)
        and all(t is None or accelerated(t, dtypes=_INT32) and t.device == x.device for t in numbers)
        and weight.dtype in (x.dtype, torch.float32)
        and (bias is None or bias.dtype == weight.dtype)
        and weight.dim() == 2
        and weight.shape[1] in WIDTHS
        and x.numel() <= INT32_MAX
    )


def _final_state(x, kept, cu_seqlens, state):
    """Returns the last `kept` positions of each sequence, with its state before them."""
    if cu_seqlens is None:
        before = x.new_zeros(*x.shape[:2], kept) if state is None else state
        if x.shape[2] >= kept:
            return x[..., x.shape[2] - kept :].clone()
        return torch.cat([before[..., x.shape[2] :].to(x.dtype), x], -1)
    # Numbers outside of the tensor, or that descend, count as the nearest place that is possible.
    starts = cu_seqlens[:-1, None].long().clamp(0, x.shape[2])
    ends = cu_seqlens[1:, None].long().clamp(max=x.shape[2]).maximum(starts)
    position = ends - kept + torch.arange(kept, device=x.device)
    if x.shape[2] == 0:
        return x.new_zeros(len(starts), x.shape[1], kept) if state is None else state.clone()
    found = x[0][:, position.clamp(min=0)].transpose(0, 1)
    inside = (position >= starts)[:, None]
    if state is None:
        return found.where(inside, 0.0)
    earlier = (position - starts + kept).clamp(0, kept - 1)[:, None].expand_as(found)
    return found.where(inside, state.to(x.dtype).gather(-1, earlier))


# CPU and fake kernels


def result_of(x):
    """Returns a tensor of x's shape, with its channels side by side if x has them so."""
    if x.stride(1) != 1:
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    return x.new_empty_strided(x.shape, (x.shape[1] * x.shape[2], 1, x.shape[1]))


@cpu_kernel("causal_conv1d")
def _(x, weight, bias, seq_idx, cu_seqlens, initial_state, silu):
    check("causal_conv1d", x, weight, bias, seq_idx, cu_seqlens, initial_state)
    return result_of(x).copy_(convolve(x, weight, bias, seq_idx, cu_seqlens, initial_state, silu))


@fake_kernel("causal_conv1d")
def _(x, weight, bias, seq_idx, cu_seqlens, initial_state, silu):
    check("causal_conv1d", x, weight, bias, seq_idx, cu_seqlens, initial_state)
    return result_of(x)


def _places(x, weight, bias, state, wanted):
    """Returns tensors for the gradients; those that do not exist or are not wanted are empty."""
    return (
        result_of(x),
        weight.new_empty(weight.shape if wanted else 0),
        weight.new_empty(weight.shape[0] if wanted and bias is not None else 0),
        x.new_empty(0 if state is None else state.shape),
    )


@cpu_kernel("causal_conv1d_backward")
def _(grad, x, weight, bias, seq_idx, cu_seqlens, initial_state, silu, parameters_wanted):
    check("causal_conv1d_backward", x, weight, bias, seq_idx, cu_seqlens, initial_state)
    found = gradients(grad, x, weight, bias, seq_idx, cu_seqlens, initial_state, silu)
    places = _places(x, weight, bias, initial_state, parameters_wanted)
    return tuple(p.copy_(g) if g is not None and p.shape == g.shape else p for p, g in zip(places, found))


@fake_kernel("causal_conv1d_backward")
def _(grad, x, weight, bias, seq_idx, cu_seqlens, initial_state, silu, parameters_wanted):
    check("causal_conv1d_backward", x, weight, bias, seq_idx, cu_seqlens, initial_state)
    return _places(x, weight, bias, initial_state, parameters_wanted)


# Derivatives


def _save(ctx, inputs, output):
    *tensors, ctx.silu = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, grad):
    weight_wanted, bias_wanted = ctx.needs_input_grad[1:3]
    gx, gw, gb, gstate = _gradients(grad, *ctx.saved_tensors, ctx.silu, weight_wanted or bias_wanted)
    state_wanted = ctx.needs_input_grad[5]
    return (
        gx,
        gw if weight_wanted else None,
        gb if bias_wanted else None,
        None,
        None,
        gstate if state_wanted else None,
        None,
    )


def _save_backward(ctx, inputs, output):
    *tensors, ctx.silu, ctx.wanted = inputs
    ctx.save_for_backward(*tensors)


def _double_backward(ctx, *cotangents):
    """Differentiates gradients()."""

    def found(*tensors):
        gx, gw, gb, gstate = gradients(*tensors, silu=ctx.silu)
        none = gx.new_empty(0)
        return gx, gw if ctx.wanted else none, none if gb is None else gb, none if gstate is None else gstate

    return *derive(found, ctx.saved_tensors, cotangents), None, None


_convolve = autograd("causal_conv1d", _backward, _save)
_gradients = autograd("causal_conv1d_backward", _double_backward, _save_backward)


def _reference(
    x, weight, bias=None, seq_idx=None, initial_state=None, return_final_state=False, activation=None, cu_seqlens=None
):
    y = convolve(x, weight, bias, seq_idx, cu_seqlens, initial_state, activation is not None)
    return (y, _final_state(x, weight.shape[1] - 1, cu_seqlens, initial_state)) if return_final_state else y


def _sample(name, shape, width, activation: str | None = "silu", *, last=False, numbers=None, ends=None, states=0):
    channels = shape[2 if last else 1]
    shapes = [shape, (channels, width), (channels,)] + [(states, channels, width - 1)] * (states > 0)

    def arguments(x, weight, bias, *state):
        seq_idx = None if numbers is None else integers(numbers, x, torch.int32).reshape(shape[0], -1)
        cu_seqlens = None if ends is None else integers(ends, x, torch.int32)
        return x.mT if last else x, weight, bias, seq_idx, *(state or [None]), states > 0, activation, cu_seqlens

    # A parameter's gradient has a term for each position.
    return Sample(name, tuple(shapes), arguments=arguments, terms=width + torch.Size(shape).numel() // channels)


def _production(batch_size=2, channels=512, length=256, width=4):
    return _sample("", (batch_size, length, channels), width, last=True)


register(
    Op(
        "causal_conv1d",
        causal_conv1d,
        reference=_reference,
        operators=("causal_conv1d", "causal_conv1d_backward"),
        integers={"seq_idx": torch.int32, "cu_seqlens": torch.int32},
        production=_production,
        samples=lambda: (
            _sample("channels first", (2, 5, 70), 4),
            _sample("channels first, in whole vectors", (2, 3, 128), 4),
            _sample("channels last", (1, 65, 40), 3, None, last=True),
            _sample("wide, with a state", (2, 20, 8), 8, last=True, states=2),
            _sample("shorter than the window", (2, 3, 2), 4, None, states=2),
            _sample("packed", (1, 4, 12), 4, ends=(0, 5, 5, 6, 12), states=4),
            _sample("numbered", (2, 3, 6), 2, numbers=(0, 0, 0, 1, 1, -1, 3, 4, 4, 4, 4, 5)),
            _sample("empty", (2, 3, 0), 4),
        ),
    )
)
