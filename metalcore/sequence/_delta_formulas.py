"""The gated delta rule and its derivative in PyTorch's ops, in float32 or float64. Both have gradients of any order.

A gate has a number for each head, or one for each key of a head. Without beta it is gated linear attention. Chunks of
positions are products of matrices. Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks", 2024.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from ._scan_formulas import gradients as gradients_of
from ._taps import wide

__all__ = ["SIZES", "check", "gradients", "rule"]

SIZES = range(257)  # of heads that the kernels take
_CHUNK = 64
_SHORT_CHUNK = 16  # where keys have gates, so that the decays between two positions have a number for each key


def check(op, q, k, v, g, beta, state, ends, skip=None, corrects=True, *, any_size=False):
    """Checks what the host side checks, with its messages; PyTorch's ops take heads of any size."""

    def require(holds, message):
        if not holds:
            raise RuntimeError(f"metalcore::{op}: {message}")

    def name(tensor):
        return f"{str(tensor.dtype).removeprefix('torch.')} of {list(tensor.shape)}"

    largest = SIZES[-1]
    require(
        q.dim() == 4 and (any_size or q.shape[3] in SIZES),
        f"q must be [batch, length, heads, up to {largest}], not {list(q.shape)}",
    )
    batch, length, heads, keys = q.shape
    require(k.shape == q.shape, f"k must have q's shape {list(q.shape)}, not {list(k.shape)}")
    require(
        v.dim() == 4
        and v.shape[:2] == q.shape[:2]
        and (v.shape[2] % heads == 0 if heads else v.shape[2] == 0)
        and (any_size or v.shape[3] in SIZES),
        f"v must be [{batch}, {length}, a multiple of {heads}, up to {largest}], not {list(v.shape)}",
    )
    sequences = batch
    if ends is not None:
        require(
            ends.dim() == 1 and ends.shape[0] >= 1 and batch == 1 and ends.dtype == torch.int32,
            "cu_seqlens must be an int32 vector of sequences' ends after 0, and q have one batch entry; they are "
            f"{name(ends)} and {list(q.shape)}",
        )
        sequences = ends.shape[0] - 1
    require(skip is None or ends is None and keys > 0, "skip needs keys, and no cu_seqlens")
    require(not corrects or beta is not None, "corrections need beta")
    dtypes = (torch.float32, torch.float64) if any_size else (torch.float32,)
    for argument, tensor, shape in (
        ("g", g, (*v.shape[:3], keys) if g is not None and g.dim() == 4 else v.shape[:3]),
        ("beta", beta, v.shape[:3]),
        ("initial_state", state, (sequences, v.shape[2], keys, v.shape[3])),
        ("skip", skip, v.shape[2:]),
    ):
        require(
            tensor is None or tensor.dtype in dtypes and tensor.shape == shape,
            f"{argument} must be float32 of the shape {list(shape)}, and is {'' if tensor is None else name(tensor)}",
        )


def rule(q, k, v, g, beta, state, ends, scale, normalized, skip=None, corrects=True):
    """Computes gated_delta_rule: the results, and the states behind the sequences. Without corrections, beta weighs the
    positions. skip times v is added to the results."""
    corrects = corrects and beta is not None
    heads, repeats = q.shape[2], v.shape[2] // q.shape[2] if q.shape[2] else 1
    of_float64 = any(x is not None and x.dtype == torch.float64 for x in (q, k, v, g, beta, state))
    dtype = torch.float64 if of_float64 else torch.float32
    of_keys, of_values = [q.to(dtype), k.to(dtype)], [None if x is None else x.to(dtype) for x in (v, beta, g)]
    if normalized:
        of_keys = [x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in of_keys]
    of_keys = [x.repeat_interleave(repeats, 2) if heads else x for x in of_keys]
    tensors: list[Any] = [None if x is None else x.transpose(1, 2) for x in (*of_keys, *of_values)]
    shape = v.shape[2], q.shape[3], v.shape[3]
    if ends is None:
        before = tensors[0].new_zeros(q.shape[0], *shape) if state is None else state.to(tensors[0].dtype)
        out, after = _sequence(*tensors, state=before, scale=scale, corrects=corrects)
        out = out.transpose(1, 2) if skip is None else out.transpose(1, 2) + wide(v) * skip
        return out.to(v.dtype), after.to(_state_dtype(v))
    # Numbers outside of the tensor, or that descend, count as the nearest place that is possible.
    places = ends.clamp(0, q.shape[1]).tolist()
    outs, states, covered = [], [], 0
    for n, (begin, end) in enumerate(pairwise(places)):
        begin = max(begin, covered)
        end = covered = max(begin, end)
        before = tensors[0].new_zeros(1, *shape) if state is None else state[n : n + 1].to(tensors[0].dtype)
        part, after = _sequence(
            *(None if x is None else x[:, :, begin:end] for x in tensors), state=before, scale=scale, corrects=corrects
        )
        outs += [part.new_zeros(*part.shape[:2], begin - sum(o.shape[2] for o in outs), part.shape[3]), part]
        states.append(after)
    rest = tensors[2][:, :, covered:]
    out = torch.cat([*outs, torch.zeros_like(rest)], 2)
    after = torch.cat(states) if states else tensors[0].new_zeros(0, *shape)
    return out.transpose(1, 2).to(v.dtype), after.to(_state_dtype(v))


def _state_dtype(v):
    return torch.float64 if v.dtype == torch.float64 else torch.float32


def _sequence(q, k, v, beta, g, state, scale, corrects):
    """Walks along chunks: tensors are (batch, head, position, …)."""
    outs = []
    size = _SHORT_CHUNK if g is not None and g.dim() == 4 else _CHUNK
    for begin in range(0, q.shape[2], size):
        chunk = slice(begin, min(begin + size, q.shape[2]))
        parts = (None if x is None else x[:, :, chunk] for x in (q, k, v, beta, g))
        out, state = _chunk(*parts, state=state, corrects=corrects)
        outs.append(out * scale)
    return (torch.cat(outs, 2) if outs else v * 1), state * 1


def _chunk(q, k, v, beta, g, state, corrects):
    count = q.shape[2]
    lower = torch.ones(count, count, dtype=torch.bool, device=q.device).tril()
    decays: Any = lower[..., None].to(q.dtype)
    since: Any = 1.0
    until: Any = 1.0
    if g is not None:
        gates = g if g.dim() == 4 else g[..., None]
        # Sums of the gates between two positions are no differences of larger sums, which would lose a weak gate behind
        # strong ones, and have none behind one of minus infinity.
        between = gates[..., None, :].masked_fill(~lower.tril(-1)[..., None], 0.0).cumsum(-3)
        decays = between.masked_fill(~lower[..., None], -torch.inf).exp()
        since, until = gates.cumsum(-2).exp(), decays[..., -1, :, :]

    def products(x):
        if decays.shape[-1] == 1:
            return (x @ k.mT) * decays[..., 0]
        return (x[..., :, None, :] * k[..., None, :, :] * decays).sum(-1)

    beta = 1.0 if beta is None else beta[..., None]
    updates = beta * v
    if corrects:
        wanted = updates - beta * ((since * k) @ state)
        system = (beta * products(k)).tril(-1)
        updates = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    out = (since * q) @ state + products(q) @ updates
    carried = state if g is None else state * since[..., -1, :, None]
    return out, carried + (until * k).mT @ updates


def gradients(grad, grad_state, q, k, v, g, beta, state, ends, skip, scale, normalized, corrects):
    """Computes the gradients of q, k, v, g, beta, state and skip. The final state's may be None, which is 0."""

    def results(q, k, v, g, beta, state, skip):
        return rule(q, k, v, g, beta, state, ends, scale, normalized, skip, corrects)

    return gradients_of(results, (q, k, v, g, beta, state, skip), (grad, grad_state))
