"""The selective scan and its derivative in PyTorch's ops, in float32 or float64. Both have gradients of any order."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .._core.operators import differentiating
from ._taps import wide

__all__ = ["STATES", "check", "gradients", "scan"]

STATES = range(129)  # of a channel that the kernels take


def check(op, x, dt, A, B, C, D, z, dt_bias, state, seq_idx, *, any_size=False):
    """Checks what the host side checks, with its messages; PyTorch's ops take any dtypes and number of states."""

    def require(holds, message):
        if not holds:
            raise RuntimeError(f"metalcore::{op}: {message}")

    require(x.dim() == 4, f"x must be [batch, length, heads, channels], not {list(x.shape)}")
    batch, length, heads, dim = x.shape
    require(
        A.dim() == 3 and (any_size or A.shape[2] in STATES),
        f"A must be [{heads}, {dim}, up to {STATES[-1]}], not {list(A.shape)}",
    )
    states = A.shape[2]
    require(
        B.dim() == 4 and B.shape[2] > 0 and heads % B.shape[2] == 0,
        f"B must be [{batch}, {length}, a number that divides {heads}, {states}], not {list(B.shape)}",
    )
    same, float32 = (x.dtype,), (torch.float32,)
    groups = B.shape[2]
    for argument, tensor, dtypes, shape in (
        ("dt", dt, same + float32, x.shape),
        ("A", A, float32, (heads, dim, states)),
        ("B", B, same, (batch, length, groups, states)),
        ("C", C, same, (batch, length, groups, states)),
        ("D", D, float32, (heads, dim)),
        ("z", z, same, x.shape),
        ("dt_bias", dt_bias, float32, (heads, dim)),
        ("initial_states", state, float32, (batch, heads, dim, states)),
        ("seq_idx", seq_idx, (torch.int32,), (batch, length)),
    ):
        if tensor is None or tensor.shape == shape and (any_size or tensor.dtype in dtypes):
            continue
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dict.fromkeys(dtypes))
        found = f"{str(tensor.dtype).removeprefix('torch.')} of {list(tensor.shape)}"
        require(False, f"{argument} must be {names} of the shape {list(shape)}, and is {found}")


def scan(x, dt, A, B, C, D, z, dt_bias, state, seq_idx, softplus, low, high):
    """Computes selective_scan: the results, and the states behind the last position."""
    inputs, steps = wide(x), wide(dt)
    steps = steps if dt_bias is None else steps + wide(dt_bias)
    steps = (F.softplus(steps) if softplus else steps).clamp(low, high)
    repeats = x.shape[2] // B.shape[2]
    B, C = (wide(t).repeat_interleave(repeats, 2)[..., None, :] for t in (B, C))
    h = inputs.new_zeros(x.shape[0], *A.shape) if state is None else state.to(inputs.dtype) * 1
    A = A.to(inputs.dtype)
    results = []
    for t in range(x.shape[1]):
        if seq_idx is not None and t:
            h = h.masked_fill((seq_idx[:, t] != seq_idx[:, t - 1])[:, None, None, None], 0.0)
        step = steps[:, t, ..., None]
        h = (step * A).exp() * h + step * inputs[:, t, ..., None] * B[:, t]
        results.append((h * C[:, t]).sum(-1))
    y = torch.stack(results, 1) if results else inputs * 1
    y = y if D is None else y + wide(D) * inputs
    y = y if z is None else y * F.silu(wide(z))
    return y.to(x.dtype), h.to(torch.float64 if x.dtype == torch.float64 else torch.float32)


def gradients(function, tensors, grads):
    """Computes the gradients of a function of tensors, of which some may be None. So may gradients of its results."""
    differentiable = torch.is_grad_enabled()
    with differentiating():
        inputs = [None if t is None else (t if differentiable and t.requires_grad else t.detach()) for t in tensors]
        inputs = [None if t is None else t.view_as(t) if t.requires_grad else t.requires_grad_() for t in inputs]
        pairs = [(y, grad.to(y.dtype)) for y, grad in zip(function(*inputs), grads) if grad is not None]
        found = iter(
            torch.autograd.grad(
                [y for y, _ in pairs],
                [t for t in inputs if t is not None],
                [grad for _, grad in pairs],
                create_graph=differentiable,
                allow_unused=True,
                materialize_grads=True,
            )
        )
        return [None if t is None else next(found) for t in inputs]
