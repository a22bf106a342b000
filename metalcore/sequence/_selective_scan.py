"""Selective state spaces along time, as Mamba has them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .._core.operators import autograd, cpu_kernel, derive, fake_kernel
from .._core.registry import Op, Sample, register
from .._core.routing import INT32_MAX, accelerated, alike, require_floats, require_tensors
from ._scan_formulas import STATES, check, gradients, scan
from ._taps import wide

__all__ = ["in_float32", "run", "selective_scan"]


def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes a selective state space along the positions, as selective_scan_fn of the package mamba-ssm. Each channel
    has states h, which each position decays and adds to:

        h = exp(delta A) h + delta B u
        y = sum over the states of C h + D u, times silu(z)

    Args:
        u: (batch, channels, length): float32, float16 or bfloat16, any strides. It is computed in float32.
        delta: (batch, channels, length) of u's dtype or float32: the step of each position.
        A: (channels, states), real, at most 0 where states decay. More than 128 states are computed in
            parts, in float32.
        B, C: (batch, states, length) or (batch, groups, states, length), where groups divides the channels, of u's
            dtype; or (channels, states) for all positions, which takes more memory.
        D: (channels,), or None for 0.
        z: (batch, channels, length) of u's dtype, or None: a gate.
        delta_bias: (channels,), or None: it is added to delta.
        delta_softplus: whether softplus is taken of that.
        return_last_state: whether the states behind the last position are returned.

    Returns:
        y of u's shape and dtype; or (y, states) with float32 states, (batch, channels, states). Unlike in mamba-ssm the
        states have gradients. Gradients are of any order. The same inputs give the same bits.

    Raises:
        TypeError: an argument is no tensor, or has numbers of another kind, as complex A, B and C.
        RuntimeError: shapes do not go together.

    Source: Gu, Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", 2023.

    Example:
        >>> u, delta = torch.randn(2, 1, 6, 100, device="mps").unbind()
        >>> A, (B, C) = -torch.rand(6, 16, device="mps"), torch.randn(2, 1, 16, 100, device="mps")
        >>> y, states = metalcore.selective_scan(u, delta, A, B, C, delta_softplus=True, return_last_state=True)
        >>> y.shape, states.shape
        (torch.Size([1, 6, 100]), torch.Size([1, 6, 16]))
    """
    op = "selective_scan"
    require_tensors(op, u=u, delta=delta, A=A, B=B, C=C)
    require_tensors(op, optional=True, D=D, z=z, delta_bias=delta_bias)
    require_floats(op, u=u, delta=delta, A=A, B=B, C=C, D=D, z=z, delta_bias=delta_bias)
    if u.dim() != 3 or A.dim() != 2 or A.shape[0] != u.shape[1]:
        raise RuntimeError(
            f"metalcore::{op}: u must be [batch, channels, length] and A [channels, states], and they are "
            f"{list(u.shape)} and {list(A.shape)}"
        )
    _, channels, _ = u.shape
    groups = next((t.shape[1] for t in (B, C) if t.dim() == 4 and t.shape[1] > 1), 1)
    if B.dim() == 2 or C.dim() == 2:  # each channel has its own, whose gradients are sums over positions in float32
        groups, B, C = max(channels, 1), wide(B), wide(C)
    rows = [_rows(op, name, t, u, groups) for name, t in (("B", B), ("C", C))]
    if channels % groups:
        raise RuntimeError(f"metalcore::{op}: B and C have {groups} groups, which do not divide {channels} channels")

    def heads(name, x):
        if x is None or x.shape == u.shape:
            return None if x is None else x.transpose(1, 2).unflatten(2, (groups, channels // groups))
        raise RuntimeError(f"metalcore::{op}: {name} must have u's shape {list(u.shape)}, not {list(x.shape)}")

    def by_channel(name, x):
        if x is None or x.shape[:1] == u.shape[1:2]:
            return None if x is None else in_float32(x).unflatten(0, (groups, channels // groups))
        raise RuntimeError(f"metalcore::{op}: {name} must be [{channels}], not {list(x.shape)}")

    inputs: Any = (heads("u", u), heads("delta", delta), by_channel("A", A), *rows)
    optional = by_channel("D", D), heads("z", z), by_channel("delta_bias", delta_bias), None, None
    inputs = *inputs, *optional, delta_softplus, -torch.inf, torch.inf
    y, states = run(op, *inputs)
    y = y.flatten(2).transpose(1, 2)
    return (y, states.flatten(1, 2)) if return_last_state else y


def _rows(op, name, x, u, groups):
    """Returns B or C as (batch, length, groups, states)."""
    if x.dim() == 2:
        return x.expand(u.shape[0], u.shape[2], -1, -1)
    x = x[:, None] if x.dim() == 3 else x
    if x.dim() != 4 or x.shape[1] not in (1, groups):
        raise RuntimeError(
            f"metalcore::{op}: {name} must be [channels, states], [batch, states, length] or [batch, {groups}, states, "
            f"length], not {list(x.shape)}"
        )
    return x.expand(-1, groups, -1, -1).permute(0, 3, 1, 2)


def in_float32(x: Any) -> Any:
    """Returns floating-point numbers of at least 32 bits, and what is none as it is."""
    return x if x is None or x.dtype in (torch.float32, torch.float64) or not x.is_floating_point() else x.float()


_INT32 = frozenset({torch.int32})


def run(op, x, dt, A, B, C, D, z, dt_bias, state, seq_idx, softplus, low, high):
    """Computes selective_scan of tensors by heads, with the kernels if they take them."""
    inputs = x, dt, A, B, C, D, z, dt_bias, state, seq_idx
    options = bool(softplus), float(low), float(high)
    if _takes(*inputs):
        return _scan(*inputs, *options) if A.shape[2] in STATES else _in_parts(op, inputs, options)
    check(op, *inputs, any_size=True)
    return scan(*inputs, *options)


def _takes(x, dt, A, B, C, D, z, dt_bias, state, seq_idx):
    return (
        alike(x, B, C, z)
        and accelerated(x, dt, A, D, dt_bias, state)
        and dt.dtype in (x.dtype, torch.float32)
        and A.dtype == torch.float32
        and (seq_idx is None or accelerated(seq_idx, dtypes=_INT32) and seq_idx.device == x.device)
        and max(x.numel(), x.shape[:1].numel() * A.numel()) <= INT32_MAX
    )


def _in_parts(op, inputs, options):
    """Computes the results of more states than kernels take, which are sums over parts of the states."""
    check(op, *inputs, any_size=True)
    x, dt, A, B, C, D, z, dt_bias, state, seq_idx = inputs
    u, step, of_B, of_C = (in_float32(t) for t in (x, dt, B, C))
    parts = []
    for part in torch.arange(A.shape[2]).split(STATES[-1]):
        own = slice(int(part[0]), int(part[-1]) + 1)
        before = None if state is None else state[..., own]
        rows = A[..., own], of_B[..., own], of_C[..., own]
        parts.append(_scan(u, step, *rows, None, None, dt_bias, before, seq_idx, *options))
    y = torch.stack([y for y, _ in parts]).sum(0)
    y = y if D is None else y + D * u
    y = y if z is None else y * F.silu(in_float32(z))
    return y.to(x.dtype), torch.cat([states for _, states in parts], -1)


# CPU and fake kernels


def _result_of(x, dtype=None):
    """Returns a tensor of x's shape, whose positions are neighbours in memory if x's are."""
    if x.stride(1) != 1:
        return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    _, length, heads, dim = x.shape
    return x.new_empty_strided(x.shape, (heads * dim * length, 1, dim * length, length), dtype=dtype or x.dtype)


@cpu_kernel("selective_scan")
def _(x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, softplus, low, high):
    check("selective_scan", x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx)
    y, states = scan(x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, softplus, low, high)
    return _result_of(x).copy_(y), states.contiguous()


@fake_kernel("selective_scan")
def _(x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, softplus, low, high):
    check("selective_scan", x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx)
    return _result_of(x), A.new_empty((x.shape[0], *A.shape))


def _with_options(*options):
    """Returns scan() as a function of its tensors."""

    def function(*tensors):
        inputs: Any = tensors + options
        return scan(*inputs)

    return function


def _places(x, dt, A, B, C, D, z, dt_bias, state):
    """Returns tensors for the gradients; those of what is not given are empty."""
    of_parameters = (
        A.new_empty(0) if t is None else torch.empty_like(t, memory_format=torch.contiguous_format)
        for t in (A, B, C, D)
    )
    of_gate = A.new_empty(0) if z is None else _result_of(x)
    of_rest = (A.new_empty(0) if t is None else A.new_empty(t.shape) for t in (dt_bias, state))
    return _result_of(x), _result_of(x, dt.dtype), *of_parameters, of_gate, *of_rest


@cpu_kernel("selective_scan_backward")
def _(grad, grad_state, x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, softplus, low, high):
    check("selective_scan_backward", x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx)
    tensors = x, dt, A, B, C, D, z, dt_bias, initial_states
    with torch.no_grad():
        found = gradients(_with_options(seq_idx, softplus, low, high), tensors, (grad, grad_state))
    return tuple(place if value is None else place.copy_(value) for place, value in zip(_places(*tensors), found))


@fake_kernel("selective_scan_backward")
def _(grad, grad_state, x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, softplus, low, high):
    check("selective_scan_backward", x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx)
    return _places(x, dt, A, B, C, D, z, dt_bias, initial_states)


# Derivatives


def _save(ctx, inputs, output):
    *tensors, softplus, low, high = inputs
    ctx.options = softplus, low, high
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)  # most final states have no gradient


def _backward(ctx, grad, grad_state):
    *tensors, seq_idx = ctx.saved_tensors
    grad = torch.zeros_like(tensors[0]) if grad is None else grad
    found = _gradients(grad, grad_state, *tensors, seq_idx, *ctx.options)
    return *(None if t is None else value for t, value in zip(tensors, found)), None, None, None, None


def _double_backward(ctx, *cotangents):
    """Differentiates gradients()."""
    *tensors, seq_idx = ctx.saved_tensors

    def found(grad, grad_state, *inputs):
        values = gradients(_with_options(seq_idx, *ctx.options), inputs, (grad, grad_state))
        return [grad.new_empty(0) if value is None else value for value in values]

    return *derive(found, tensors, cotangents), None, None, None, None


_scan = autograd("selective_scan", _backward, _save)
_gradients = autograd("selective_scan_backward", _double_backward, _save)


def _reference(u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, return_last_state=False):
    def rows(x):
        if x.dim() == 2:
            return x[None, None].expand(u.shape[0], u.shape[2], -1, -1)
        x = x if x.dim() == 4 else x[:, None]
        return x.permute(0, 3, 1, 2).repeat_interleave(u.shape[1] // x.shape[1], 2)

    def channels(x):
        return None if x is None else x.transpose(1, 2)[..., None]

    y, states = scan(
        channels(u),
        channels(delta),
        A[:, None],
        rows(B),
        rows(C),
        None if D is None else D[:, None],
        channels(z),
        None if delta_bias is None else delta_bias[:, None],
        None,
        None,
        delta_softplus,
        -torch.inf,
        torch.inf,
    )
    y = y[..., 0].transpose(1, 2)
    return (y, states[:, :, 0]) if return_last_state else y


def _sample(name, batch, channels, length, states, *, groups=None, gated=True):
    of_u, of_rows = (batch, channels, length), (batch, *([groups] if groups else []), states, length)
    shapes = [of_u, of_u, (channels, states), of_rows, of_rows, *[(channels,), of_u, (channels,)] * gated]

    def arguments(u, delta, A, B, C, *rest):
        return u, delta, -A.abs(), B, C, *(rest or (None, None, None)), True, True

    return Sample(name, tuple(shapes), arguments=arguments, terms=states + length, backward=length > 0)


register(
    Op(
        "selective_scan",
        selective_scan,
        reference=_reference,
        operators=("selective_scan", "selective_scan_backward"),
        production=lambda batch_size=1, channels=128, length=256, states=16: _sample(
            "", batch_size, channels, length, states
        ),
        samples=lambda: (
            _sample("16 states", 2, 40, 20, 16, gated=False),
            _sample("chunks of 16 states", 1, 6, 200, 16),
            _sample("64 states, groups", 2, 12, 18, 33, groups=3),
            _sample("chunks of 64 states", 1, 3, 193, 17),
            _sample("128 states", 1, 5, 10, 70),
            _sample("chunks of 128 states", 1, 2, 200, 128, gated=False),
            _sample("empty", 1, 6, 0, 4),
        ),
    )
)
