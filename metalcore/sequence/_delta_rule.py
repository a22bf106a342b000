"""The gated delta rule: a state along time that is a matrix, as Gated DeltaNet has it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._core.operators import autograd, cpu_kernel, derive, fake_kernel
from .._core.registry import Op, Sample, register
from .._core.routing import INT32_MAX, accelerated, alike, require_floats, require_integers, require_tensors
from .._core.samples import integers
from .._core.tensors import in_int32
from ._delta_formulas import SIZES, check, gradients, rule
from ._selective_scan import in_float32

__all__ = ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"]


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Computes the gated delta rule over sequences, as the function of this name of flash-linear-attention. For each
    position, exp(g) decays the state S of a head, which then learns v for k and is read by q:

        S = exp(g) S
        S = S + beta k (v - Sᵀ k)ᵀ
        o = scale Sᵀ q

    Args:
        q, k: (batch, length, heads, keys): float32, float16 or bfloat16, any strides. It is computed in float32. The
            kernels take heads of up to 256; PyTorch's ops take others.
        v: (batch, length, value heads, values) of the same dtype. The value heads are a multiple of the heads: each
            head of q and k is for as many neighbouring ones of v.
        g: (batch, length, value heads), the logarithm of the decay, at most 0; or None, which is the delta rule
            without a gate.
        beta: (batch, length, value heads), how much of the difference the state learns; or None for 1.
        scale: keys ** -0.5 by default.
        initial_state: the states before the sequences, (sequences, value heads, keys, values). By default they are 0.
        output_final_state: whether the states behind the sequences are returned.
        use_qk_l2norm_in_kernel: whether q and k are divided by their lengths, sqrt(sum of squares + 1e-6).
        cu_seqlens: (sequences + 1,), integers, or None: the tensors have one batch entry, in which sequence i begins at
            position cu_seqlens[i] and ends before cu_seqlens[i + 1]. The results of positions in no sequence are 0.

    Returns:
        (o, final state). o has v's shape and dtype. The final state, float32 and of the shape of the initial one, is
        None unless it is wanted. Both have gradients of any order. The same inputs give the same bits. From 64
        positions on, chunks of 64 are products of matrices.

    Raises:
        TypeError: an argument is no tensor, or has numbers of another kind.
        RuntimeError: shapes do not go together.

    Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule", 2024.

    Example:
        >>> q, k, v = torch.randn(3, 1, 100, 2, 32, device="mps").unbind()
        >>> g, beta = -torch.rand(1, 100, 2, device="mps"), torch.rand(1, 100, 2, device="mps")
        >>> o, state = metalcore.chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=True)
        >>> o.shape, state.shape
        (torch.Size([1, 100, 2, 32]), torch.Size([1, 2, 32, 32]))
    """
    op = "chunk_gated_delta_rule"
    options = output_final_state, use_qk_l2norm_in_kernel, cu_seqlens
    return call(op, q, k, v, g, _strengths(v, beta), scale, initial_state, *options, chunked=True)


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Computes what `chunk_gated_delta_rule` does, position by position, as the function of this name of
    flash-linear-attention: for the few positions of a step that generates.

    Args:
        q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens: as
            `chunk_gated_delta_rule` has them.

    Returns:
        (o, final state), with gradients, as `chunk_gated_delta_rule`.

    Raises:
        TypeError: an argument is no tensor, or has numbers of another kind.
        RuntimeError: shapes do not go together.

    Example:
        >>> k, v = torch.eye(4, device="mps")[:1].view(1, 1, 1, 4), torch.full((1, 1, 1, 2), 3.0, device="mps")
        >>> o, _ = metalcore.fused_recurrent_gated_delta_rule(k, k, v, scale=1.0)
        >>> o.tolist()
        [[[[3.0, 3.0]]]]
    """
    op = "fused_recurrent_gated_delta_rule"
    options = output_final_state, use_qk_l2norm_in_kernel, cu_seqlens
    return call(op, q, k, v, g, _strengths(v, beta), scale, initial_state, *options, chunked=False)


_INT32 = frozenset({torch.int32})


def _strengths(v, beta):
    if beta is not None or not isinstance(v, Tensor):
        return beta
    return v.new_ones(v.shape[:3], dtype=torch.promote_types(v.dtype, torch.float32))


def call(op, q, k, v, g, beta, scale, state, final_state_wanted, normalized, cu_seqlens, *, chunked, by_key=False):
    """Computes the rule of a function of the name `op`, whose gates have a number for each head or `by_key`. Without
    beta it is gated linear attention."""
    require_tensors(op, q=q, k=k, v=v)
    require_tensors(op, optional=True, g=g, beta=beta, initial_state=state, cu_seqlens=cu_seqlens)
    require_integers(op, cu_seqlens=cu_seqlens)
    if g is not None and g.dim() != (4 if by_key else 3):
        sizes = "batch, length, value heads" + ", keys" * by_key
        raise RuntimeError(f"metalcore.{op}: g must be [{sizes}], not {list(g.shape)}")
    ends = None if cu_seqlens is None else in_int32(cu_seqlens, q.device)
    g, beta, state = (in_float32(t) for t in (g, beta, state))
    inputs = q, k, v, g, beta, state, ends
    if scale is None:
        scale = max(q.shape[-1] if q.dim() else 1, 1) ** -0.5
    if _takes(*inputs):
        out, final_state = _rule(*inputs, None, float(scale), normalized, chunked, beta is not None)
    else:
        require_floats(op, q=q, k=k, v=v, g=g, beta=beta, initial_state=state)
        check(op, *inputs, corrects=beta is not None, any_size=True)
        out, final_state = rule(*inputs, scale, normalized)
    return out, final_state if final_state_wanted else None


def linear_attention(q: Any, k: Any, v: Any, g, weights, state, skip):
    """Computes gated linear attention by chunks, whose positions have weights, and adds `skip` times v; and the states
    behind the sequences. It returns None where the kernels do not take the tensors."""
    if skip is not None and not accelerated(skip) or not _takes(q, k, v, g, weights, state, None):
        return None
    return _rule(q, k, v, g, weights, state, None, skip, 1.0, False, True, False)


def _takes(q, k, v, g, beta, state, ends):
    """Returns whether the kernels take tensors of these dtypes and sizes."""
    return (
        alike(q, k, v)
        and accelerated(q, g, beta, state)
        and (ends is None or accelerated(ends, dtypes=_INT32) and ends.device == q.device)
        and q.shape[-1:].numel() in SIZES
        and v.shape[-1:].numel() in SIZES
        and max(q.numel(), v.numel()) <= INT32_MAX
    )


# CPU and fake kernels


def _state_of(q, v, ends):
    sequences = q.shape[0] if ends is None else ends.shape[0] - 1
    return q.new_empty((sequences, v.shape[2], q.shape[3], v.shape[3]), dtype=torch.float32)


@cpu_kernel("gated_delta_rule")
def _(q, k, v, g, beta, initial_state, cu_seqlens, skip, scale, normalized, chunked, corrects):
    check("gated_delta_rule", q, k, v, g, beta, initial_state, cu_seqlens, skip, corrects)
    out, state = rule(q, k, v, g, beta, initial_state, cu_seqlens, scale, normalized, skip, corrects)
    return out.contiguous(), state.contiguous()


@fake_kernel("gated_delta_rule")
def _(q, k, v, g, beta, initial_state, cu_seqlens, skip, scale, normalized, chunked, corrects):
    check("gated_delta_rule", q, k, v, g, beta, initial_state, cu_seqlens, skip, corrects)
    return torch.empty_like(v, memory_format=torch.contiguous_format), _state_of(q, v, cu_seqlens)


def _places(q, k, v, g, beta, state, skip):
    """Returns tensors for the gradients; those of what is not given are empty."""
    return tuple(
        q.new_empty(0, dtype=torch.float32) if t is None else torch.empty_like(t, memory_format=torch.contiguous_format)
        for t in (q, k, v, g, beta, state, skip)
    )


@cpu_kernel("gated_delta_rule_backward")
def _(grad, grad_state, q, k, v, g, beta, initial_state, cu_seqlens, skip, scale, normalized, chunked, corrects):
    check("gated_delta_rule_backward", q, k, v, g, beta, initial_state, cu_seqlens, skip, corrects)
    with torch.no_grad():
        tensors = q, k, v, g, beta, initial_state, cu_seqlens, skip
        found = gradients(grad, grad_state, *tensors, scale, normalized, corrects)
    places = _places(q, k, v, g, beta, initial_state, skip)
    return tuple(p if value is None else p.copy_(value) for p, value in zip(places, found))


@fake_kernel("gated_delta_rule_backward")
def _(grad, grad_state, q, k, v, g, beta, initial_state, cu_seqlens, skip, scale, normalized, chunked, corrects):
    check("gated_delta_rule_backward", q, k, v, g, beta, initial_state, cu_seqlens, skip, corrects)
    return _places(q, k, v, g, beta, initial_state, skip)


# Derivatives


def _save(ctx, inputs, output):
    *tensors, ctx.scale, ctx.normalized, ctx.chunked, ctx.corrects = inputs
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)  # most final states have no gradient, and zeros beside DTensors would be none


def _backward(ctx, grad, grad_state):
    q, k, v, g, beta, state, ends, skip = ctx.saved_tensors
    grad = torch.zeros_like(v) if grad is None else grad
    options = ctx.scale, ctx.normalized, ctx.chunked, ctx.corrects
    found = _gradients(grad, grad_state, q, k, v, g, beta, state, ends, skip, *options)
    of_g, of_beta, of_state, of_skip = (
        None if t is None else value for t, value in zip((g, beta, state, skip), found[3:])
    )
    return *found[:3], of_g, of_beta, of_state, None, of_skip, None, None, None, None


def _double_backward(ctx, *cotangents):
    """Differentiates gradients()."""

    def found(*tensors: Any):
        options = {"scale": ctx.scale, "normalized": ctx.normalized, "corrects": ctx.corrects}
        values = gradients(*tensors, **options)
        return [tensors[0].new_empty(0) if value is None else value for value in values]

    return *derive(found, ctx.saved_tensors, cotangents), None, None, None, None


_rule = autograd("gated_delta_rule", _backward, _save)
_gradients = autograd("gated_delta_rule_backward", _double_backward, _save)


def _reference(
    q,
    k,
    v,
    g=None,
    beta=None,
    scale=None,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    cu_seqlens=None,
):
    beta = torch.ones_like(v[..., 0]) if beta is None else beta
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out, state = rule(q, k, v, g, beta, initial_state, cu_seqlens, scale, use_qk_l2norm_in_kernel)
    return out, state if output_final_state else None


def opened(numbers):
    """Returns numbers between 0 and 1, not rounded to 16 bits."""
    return numbers.to(torch.promote_types(numbers.dtype, torch.float32)).sigmoid()


def _sample(name, length, heads, keys, values, *, batch=1, repeats=1, gated=True, ends=None, states=0):
    of_keys, of_values = (batch, length, heads, keys), (batch, length, heads * repeats, values)
    shapes = [of_keys, of_keys, of_values, of_values[:3]]
    shapes += [of_values[:3]] * gated + [(states, heads * repeats, keys, values)] * (states > 0)

    def arguments(q, k, v, beta, *rest):
        g = -rest[0].abs() if gated else None
        state = rest[-1] if states else None
        cu_seqlens = None if ends is None else integers(ends, q, torch.int32)
        return q, k, v, g, opened(beta), None, state, states > 0, True, cu_seqlens

    terms = length + keys + values
    return Sample(name, tuple(shapes), arguments=arguments, terms=terms, backward=length > 0)


def _samples():
    return (
        _sample("heads of 64", 70, 1, 40, 64, batch=2, states=2),
        _sample("heads of 128", 9, 1, 72, 100, repeats=2),
        _sample("heads of 256", 65, 1, 136, 130, gated=False),
        _sample("one position", 1, 1, 72, 100, batch=2, repeats=2, states=2),
        _sample("packed", 12, 2, 8, 6, ends=(0, 5, 5, 6, 12), states=4),
        _sample("empty", 0, 2, 8, 6, states=1),
    )


def _production(batch_size=1, length=128, heads=2, value_heads=4, size=64):
    return _sample("", length, heads, size, size, batch=batch_size, repeats=value_heads // heads)


for _function in (chunk_gated_delta_rule, fused_recurrent_gated_delta_rule):
    register(
        Op(
            _function.__name__,
            _function,
            reference=_reference,
            operators=("gated_delta_rule", "gated_delta_rule_backward"),
            integers={"cu_seqlens": torch.int32},
            production=_production,
            samples=_samples,
        )
    )
