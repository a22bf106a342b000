"""The next position of a selective state space."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .._core.operators import cpu_kernel, fake_kernel, ops
from .._core.registry import Op, Sample, register
from .._core.routing import INT32_MAX, accelerated, alike, require_floats, require_integers, require_tensors
from .._core.samples import integers
from .._core.tensors import check_written, in_int32
from ._selective_scan import in_float32
from ._taps import wide

__all__ = ["selective_state_update"]


def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
) -> Tensor:
    """Computes the next position of `selective_scan`, or of `mamba_chunk_scan_combined` with heads, and changes the
    state to that behind it, as the function of this name of the package mamba-ssm.

    Args:
        state: (batch, channels, states) or (batch, heads, channels, states), of x's dtype or float32, any strides. It
            is changed.
        x: (batch, channels) or (batch, heads, channels): float32, float16 or bfloat16, any strides.
        dt: of x's shape, and of its dtype or float32. Heads may share a number: an expanded tensor.
        A: (channels, states) or (heads, channels, states).
        B, C: (batch, states) or (batch, groups, states) of x's dtype, where groups divides the heads.
        D, dt_bias: (channels,) or (heads, channels), or None.
        z: of x's shape and dtype, or None: a gate.
        dt_softplus: whether softplus is taken of dt + dt_bias.
        state_batch_indices: (batch,), integers, or None: the row of the state, which has any number of them, for each
            batch entry. An entry with a negative one is padding, whose result is 0.

    Returns:
        The results, of x's shape and dtype. Where a gradient is needed, PyTorch's ops compute it; the state itself has
        none.

    Raises:
        TypeError: an argument is no tensor, or has numbers of another kind.
        RuntimeError: shapes do not go together.

    Example:
        >>> state, x = torch.zeros(1, 6, 16, device="mps"), torch.ones(1, 6, device="mps")
        >>> A, B = -torch.ones(6, 16, device="mps"), torch.ones(1, 16, device="mps")
        >>> metalcore.selective_state_update(state, x, x, A, B, B)[0, :2].tolist(), state[0, 0, 0].item()
        ([16.0, 16.0], 1.0)
    """
    op = "selective_state_update"
    require_tensors(op, state=state, x=x, dt=dt, A=A, B=B, C=C)
    require_tensors(op, optional=True, D=D, z=z, dt_bias=dt_bias, state_batch_indices=state_batch_indices)
    require_integers(op, state_batch_indices=state_batch_indices)
    check_written(op, "state", state)
    indices = None if state_batch_indices is None else in_int32(state_batch_indices, x.device)
    has_heads = state.dim() > 3
    dims = {"state": (state, 3), "x": (x, 2), "dt": (dt, 2), "B": (B, 2), "C": (C, 2), "z": (z, 2)}
    dims |= {"A": (in_float32(A), 2), "D": (D, 1), "dt_bias": (dt_bias, 1)}
    # An argument without heads is that of one head.
    by_head = {
        name: t if t is None or t.dim() != dim else t.unsqueeze(0 if name in ("A", "D", "dt_bias") else 1)
        for name, (t, dim) in dims.items()
    }
    tensors = [by_head[name] for name in ("state", "x", "dt", "A", "B", "C", "D", "z", "dt_bias")]
    differentiated = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    inputs: Any = (*tensors, indices)
    options: Any = (*tensors, bool(dt_softplus), indices)
    if _takes(*inputs) and not differentiated:
        y = ops.selective_state_update(*options)
        torch.autograd.graph.increment_version((state,))
    else:
        require_floats(op, state=state, x=x, dt=dt, A=A, B=B, C=C, D=D, z=z, dt_bias=dt_bias)
        _check(op, *inputs, any_dtype=True)
        y = _update(*options)
    return y if has_heads else y[:, 0]


_INT32 = frozenset({torch.int32})


def _takes(state, x, dt, A, B, C, D, z, dt_bias, indices):
    return (
        alike(x, B, C, z)
        and accelerated(x, state, dt, A, D, dt_bias)
        and all(t is None or t.dtype in (x.dtype, torch.float32) for t in (state, dt, D, dt_bias))
        and A.dtype == torch.float32
        and (indices is None or accelerated(indices, dtypes=_INT32) and indices.device == x.device)
        and x.numel() * A.shape[-1:].numel() <= INT32_MAX
    )


def _check(op, state, x, dt, A, B, C, D, z, dt_bias, indices, *, any_dtype=False):
    """Checks what the host side checks, with its messages."""

    def require(holds, message):
        if not holds:
            raise RuntimeError(f"metalcore::{op}: {message}")

    require(x.dim() == 3, f"x must be [batch, heads, channels], not {list(x.shape)}")
    batch, heads, dim = x.shape
    require(
        state.dim() == 4 and (indices is not None or state.shape[0] == batch),
        f"state must be [{batch}, {heads}, {dim}, states], not {list(state.shape)}",
    )
    states = state.shape[3]
    require(
        B.dim() == 3 and B.shape[1] > 0 and heads % B.shape[1] == 0,
        f"B must be [{batch}, a number that divides {heads}, {states}], not {list(B.shape)}",
    )
    same, float32 = (x.dtype,), (torch.float32,)
    of_rows = batch, B.shape[1], states
    for argument, tensor, dtypes, shape in (
        ("state", state, same + float32, (state.shape[0], heads, dim, states)),
        ("dt", dt, same + float32, x.shape),
        ("A", A, float32, (heads, dim, states)),
        ("B", B, same, of_rows),
        ("C", C, same, of_rows),
        ("D", D, same + float32, (heads, dim)),
        ("z", z, same, x.shape),
        ("dt_bias", dt_bias, same + float32, (heads, dim)),
        ("state_batch_indices", indices, (torch.int32,), (batch,)),
    ):
        if tensor is None or tensor.shape == shape and (any_dtype or tensor.dtype in dtypes):
            continue
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dict.fromkeys(dtypes))
        found = f"{str(tensor.dtype).removeprefix('torch.')} of {list(tensor.shape)}"
        require(False, f"{argument} must be {names} of the shape {list(shape)}, and is {found}")


def _update(state, x, dt, A, B, C, D, z, dt_bias, softplus, indices):
    """Computes the same in PyTorch's ops. It is differentiable."""
    own = state.clone() if indices is None else state[indices.long().clamp(0, state.shape[0] - 1)]
    step = wide(dt) if dt_bias is None else wide(dt) + wide(dt_bias)
    step = (F.softplus(step) if softplus else step)[..., None]
    B, C = (wide(t).repeat_interleave(x.shape[1] // t.shape[1], 1)[:, :, None] for t in (B, C))
    new = (step * A).exp() * wide(own) + step * wide(x)[..., None] * B
    y = (new * C).sum(-1)
    y = y if D is None else y + wide(x) * wide(D)
    y = (y if z is None else y * F.silu(wide(z))).to(x.dtype)
    with torch.no_grad():
        if indices is None:
            state.copy_(new)
            return y
        inside = (indices >= 0) & (indices < state.shape[0])
        state[indices[inside].long()] = new[inside].to(state.dtype)
    y = y.masked_fill((indices >= state.shape[0])[:, None, None], torch.nan)
    return y.masked_fill((indices < 0)[:, None, None], 0.0)


@cpu_kernel("selective_state_update")
def _(state, x, dt, A, B, C, D, z, dt_bias, softplus, state_batch_indices):
    _check("selective_state_update", state, x, dt, A, B, C, D, z, dt_bias, state_batch_indices)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    return y.copy_(_update(state, x, dt, A, B, C, D, z, dt_bias, softplus, state_batch_indices)) if y.numel() else y


@fake_kernel("selective_state_update")
def _(state, x, dt, A, B, C, D, z, dt_bias, softplus, state_batch_indices):
    _check("selective_state_update", state, x, dt, A, B, C, D, z, dt_bias, state_batch_indices)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _call(function, state, *arguments):
    state = state.clone()
    return function(state, *arguments), state


def _reference(state, x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False, state_batch_indices=None):
    if state.dim() > 3:
        return _update(state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, state_batch_indices)
    x, dt, z, B, C = (None if t is None else t[:, None] for t in (x, dt, z, B, C))
    A, D, dt_bias = (None if t is None else t[None] for t in (A, D, dt_bias))
    return _update(state[:, None], x, dt, A, B, C, D, z, dt_bias, dt_softplus, state_batch_indices)[:, 0]


def _sample(name, batch, channels, states, *, heads=None, groups=1, rows=None):
    heads_of = () if heads is None else (heads,)
    of_x, of_rows = (batch, *heads_of, channels), (batch, *([] if heads is None else [groups]), states)
    of_D = *heads_of, channels
    count = batch if rows is None else max(rows) + 1
    shapes = (count, *of_D, states), of_x, of_x, (*of_D, states), of_rows, of_rows, of_D, of_x, of_D

    def arguments(state, x, dt, A, *rest):
        numbers = None if rows is None else integers(rows, x, torch.int32)
        return state, x, dt, -A.abs(), *rest, True, numbers

    return Sample(name, shapes, arguments=arguments, terms=states)


register(
    Op(
        "selective_state_update",
        selective_state_update,
        reference=_reference,
        call=_call,
        operators=("selective_state_update",),
        backward=False,
        integers={"state_batch_indices": torch.int32},
        samples=lambda: (
            _sample("16 states", 3, 40, 16),
            _sample("odd states", 2, 5, 7),
            _sample("64 states, heads", 2, 5, 64, heads=4, groups=2),
            _sample("many states", 1, 3, 152, heads=2),
            _sample("rows", 3, 5, 16, heads=2, rows=(2, -1, 0)),
        ),
    )
)
