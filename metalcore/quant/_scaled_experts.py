"""Products in which each row has one of several matrices of 8 or 4 bits with scales."""

from __future__ import annotations

import torch
from torch import Tensor

from .._core.operators import autograd, cpu_kernel, fake_kernel, ops
from .._core.registry import Op, Sample, register
from .._core.routing import accelerated, autocast_operands, require_tensors
from .._core.tensors import in_int32
from ._by_expert import multiply_by_expert
from ._rows import require_integers
from ._scaled import multiply_scaled, scaled_product
from ._scaled_weight import ScaledWeight, require_scaled, require_scaled_weight, scaled_sample, unpack_scaled

__all__ = [
    "scaled_linear_experts",
]


def scaled_linear_experts(x: Tensor, weight: ScaledWeight, experts: Tensor) -> Tensor:
    """Computes x Wᵀ where each row of the result has a matrix W of its own, as experts of a mixture do.

    Few rows are multiplied with the weights as they are read. Where experts have more than 8 rows on average, and for
    the gradient by x, each expert's rows are put together, and the host waits for their numbers.

    Args:
        x: (tokens, numbers of a row), or (tokens, experts of a token, numbers of a row). float32, float16 or bfloat16.
        weight: a ScaledWeight whose tensors have 3 dimensions, of which the first is the expert. A factor has one
            number for each of them.
        experts: integers, (tokens, experts of a token). One that does not exist makes NaN.

    Returns:
        (tokens, experts of a token, rows of W), of x's dtype. It has a derivative with respect to x.

    Raises:
        TypeError: x or experts is no tensor, or weight no ScaledWeight.
        RuntimeError: shapes or dtypes do not go together, or there is no such format.

    Example:
        >>> two = [metalcore.quantize_scaled(torch.full((4, 32), n, device="mps"), "mxfp4") for n in (1.0, 2.0)]
        >>> packed, scales = (torch.stack([getattr(one, name) for one in two]) for name in ("packed", "scales"))
        >>> weight = metalcore.quant.ScaledWeight(packed, scales, "mxfp4")
        >>> chosen = torch.tensor([[1, 0]], device="mps")
        >>> metalcore.scaled_linear_experts(torch.ones(1, 32, device="mps"), weight, chosen)[0, :, 0].tolist()
        [64.0, 32.0]
    """
    require_tensors("scaled_linear_experts", x=x, experts=experts)
    require_integers("scaled_linear_experts", experts=experts)
    require_scaled_weight("scaled_linear_experts", weight)
    x, experts = autocast_operands(x)[0], in_int32(experts)
    packed, scales, format, block, factor = weight
    inputs = x, packed, scales, factor, experts, format, block
    if experts.numel() > 8 * packed.shape[0] and not x.is_meta:
        return _grouped(*inputs)
    return _matmul_experts(*inputs) if accelerated(x) else ops.scaled_matmul_experts(*inputs)


def _grouped(x, packed, scales, factor, experts, format, block):
    """Multiplies each expert's rows at once."""
    _require_experts(x, packed, scales, factor, experts, format, block)

    def multiply(rows, expert):
        weight, whole = _of_expert(packed, scales, factor, expert)
        return scaled_product(rows, ScaledWeight(*weight, format, tuple(block), whole))

    return multiply_by_expert(x, experts, len(packed), packed.shape[1], multiply)


def _of_expert(packed, scales, factor, expert):
    """Returns an expert's packed numbers with their scales, and its factor."""
    own = None if factor is None else factor.view(-1)[expert : expert + 1]
    return (packed[expert], scales[expert]), own


def _require_experts(x, packed, scales, factor, experts, format, block):
    length = require_scaled(packed, scales, factor, format, block, 3)
    leading = x.shape[:-1] in (experts.shape, experts.shape[:1])
    if experts.dim() != 2 or not leading or x.shape[-1] != length:
        raise RuntimeError(
            f"scaled_linear_experts: x of shape {list(x.shape)} does not go with experts of shape "
            f"{list(experts.shape)} and weights of {length}"
        )


@cpu_kernel("scaled_matmul_experts")
def _(x, packed, scales, factor, experts, format, block):
    return _grouped(x, packed, scales, factor, experts, format, block)


@fake_kernel("scaled_matmul_experts")
def _(x, packed, scales, factor, experts, format, block):
    return x.new_empty([*experts.shape, packed.shape[1]])


def _save_experts(ctx, inputs, output):
    x, *tensors, ctx.format, ctx.block = inputs
    ctx.save_for_backward(*tensors)
    ctx.own, ctx.shape = x.dim() == 3, x.shape


# An operator of its own, since which experts are chosen decides what it computes.
_library = torch.library.Library("metalcore", "FRAGMENT")
_library.define(
    "_scaled_matmul_experts_backward(Tensor grad, Tensor packed, Tensor scales, Tensor? factor, Tensor experts, "
    "str format, int[] block, int length) -> Tensor"
)


@torch.library.impl(_library, "_scaled_matmul_experts_backward", "CompositeExplicitAutograd")
def _(grad, packed, scales, factor, experts, format, block, length):
    def multiply(rows, expert):
        weight, whole = _of_expert(packed, scales, factor, expert)
        return multiply_scaled(rows.contiguous(), *weight, whole, format, block, True)

    return multiply_by_expert(grad, experts, len(packed), length, multiply, 0.0)


@torch.library.impl(_library, "_scaled_matmul_experts_backward", "Meta")
def _(grad, packed, scales, factor, experts, format, block, length):
    return grad.new_empty(*experts.shape, length)


def _save_backward(ctx, inputs, output):
    _, *tensors, ctx.format, ctx.block, _ = inputs
    ctx.save_for_backward(*tensors)


def _backward_backward(ctx, grad):
    return _matmul_experts(grad, *ctx.saved_tensors, ctx.format, ctx.block), *[None] * 7


torch.library.register_autograd(
    "metalcore::_scaled_matmul_experts_backward", _backward_backward, setup_context=_save_backward, lib=_library
)


def _backward_experts(ctx, grad):
    result = torch.ops.metalcore._scaled_matmul_experts_backward(
        grad, *ctx.saved_tensors, ctx.format, ctx.block, ctx.shape[-1]
    )
    return result if ctx.own else result.sum(1), *[None] * 6


_matmul_experts = autograd("scaled_matmul_experts", _backward_experts, _save_experts)


def _experts_reference(x, weight, experts):
    of = [ScaledWeight(*of_each, weight.format, weight.block) for of_each in zip(weight.packed, weight.scales)]
    factors = [None] * len(of) if weight.factor is None else list(weight.factor)
    numbers = torch.stack([unpack_scaled(w.packed, w.scales, f, w.format, w.block) for w, f in zip(of, factors)])
    return torch.einsum("tk,tenk->ten" if x.dim() == 2 else "tek,tenk->ten", x, numbers.to(x.dtype)[experts.long()])


register(
    Op(
        "scaled_linear_experts",
        scaled_linear_experts,
        reference=_experts_reference,
        operators=("scaled_matmul_experts", "scaled_matmul"),
        samples=lambda: tuple(
            Sample(
                f"{format}, {tokens} tokens",
                ((tokens, *own, 96),),
                arguments=lambda x, format=format: (
                    x,
                    scaled_sample(format, 21, 96, x.device, (32, 32), 3),
                    (torch.arange(2 * len(x), device=x.device) * 5 % 3).view(-1, 2),
                ),
                terms=96,
                roundings=2,
                backward=False,  # which experts are chosen decides what it runs, so that no plan says it before
            )
            for format, tokens, own in (("e4m3", 2, ()), ("nvfp4", 3, (2,)))
        ),
        waits=True,
    )
)
