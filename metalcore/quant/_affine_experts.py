"""Products in which each row has one of several matrices of 2 to 8 bits in groups."""

from __future__ import annotations

import torch
from torch import Tensor

from .._core.operators import autograd, cpu_kernel, fake_kernel, ops
from .._core.registry import Op, Sample, register
from .._core.routing import accelerated, autocast_operands, require_tensors
from .._core.tensors import in_int32
from ._affine import affine_matmul, affine_sample, require_affine, unpack_affine
from ._by_expert import multiply_by_expert
from ._rows import require_integers

__all__ = ["affine_linear_experts"]


def affine_linear_experts(
    x: Tensor, packed: Tensor, scales: Tensor, offsets: Tensor, bits: int, experts: Tensor
) -> Tensor:
    """Computes x Wᵀ where each row of the result has a matrix W of its own, as experts of a mixture do, of 2 to 8 bits
    in groups.

    Few rows are multiplied with the weights as they are read. Where experts have more than 8 rows on average, and for
    the gradient by x, each expert's rows are put together, and the host waits for their numbers.

    Args:
        x: (tokens, weights of a row), or (tokens, experts of a token, weights of a row). float32, float16 or bfloat16.
        packed, scales, offsets: as `metalcore.dequantize_affine` has them, with the expert as a dimension before.
        bits: 2, 3, 4, 5, 6 or 8.
        experts: integers, (tokens, experts of a token). One that does not exist makes NaN.

    Returns:
        (tokens, experts of a token, rows of W), of x's dtype. It has a derivative with respect to x.

    Raises:
        TypeError: x, packed, scales, offsets or experts is no tensor.
        RuntimeError: shapes or dtypes do not go together, or there are no such bits.

    Example:
        >>> packed = torch.full((3, 4, 16), 0x11, dtype=torch.uint8, device="mps")  # 3 experts, 4 rows of 32 ones
        >>> scales = torch.tensor([1.0, 2.0, 3.0], device="mps").view(3, 1, 1).expand(3, 4, 1)
        >>> chosen = torch.tensor([[2, 0]], device="mps")
        >>> x = torch.ones(1, 32, device="mps")
        >>> metalcore.affine_linear_experts(x, packed, scales, torch.zeros_like(scales), 4, chosen)[0, :, 0].tolist()
        [96.0, 32.0]
    """
    op = "affine_linear_experts"
    require_tensors(op, x=x, packed=packed, scales=scales, offsets=offsets, experts=experts)
    require_integers(op, experts=experts)
    x, experts = autocast_operands(x)[0], in_int32(experts)
    inputs = x, packed, scales, offsets, experts, bits
    if experts.numel() > 8 * len(packed) and not x.is_meta:
        return _grouped(*inputs)
    return _matmul_experts(*inputs) if accelerated(x) else ops.affine_matmul_experts(*inputs)


def _grouped(x, packed, scales, offsets, experts, bits):
    """Multiplies each expert's rows at once."""
    length = require_affine(packed, scales, offsets, bits, 3)
    leading = x.shape[:-1] in (experts.shape, experts.shape[:1])
    if experts.dim() != 2 or not leading or x.shape[-1] != length:
        raise RuntimeError(
            f"affine_linear_experts: x of shape {list(x.shape)} does not go with experts of shape "
            f"{list(experts.shape)} and weights of {length}"
        )
    return _multiply(x, packed, scales, offsets, experts, bits, packed.shape[1], False)


def _multiply(x, packed, scales, offsets, experts, bits, rows, transposed, missing=float("nan")):
    def multiply(part, expert):
        return affine_matmul(part, packed[expert], scales[expert], offsets[expert], bits, transposed)

    return multiply_by_expert(x, experts, len(packed), rows, multiply, missing)


@cpu_kernel("affine_matmul_experts")
def _(x, packed, scales, offsets, experts, bits):
    return _grouped(x, packed, scales, offsets, experts, bits)


@fake_kernel("affine_matmul_experts")
def _(x, packed, scales, offsets, experts, bits):
    return x.new_empty([*experts.shape, packed.shape[1]])


def _save_experts(ctx, inputs, output):
    x, *tensors, ctx.bits = inputs
    ctx.save_for_backward(*tensors)
    ctx.own, ctx.length = x.dim() == 3, x.shape[-1]


# An operator of its own, since which experts are chosen decides what it computes.
_library = torch.library.Library("metalcore", "FRAGMENT")
_library.define(
    "_affine_matmul_experts_backward(Tensor grad, Tensor packed, Tensor scales, Tensor offsets, Tensor experts, "
    "int bits, int length) -> Tensor"
)


@torch.library.impl(_library, "_affine_matmul_experts_backward", "CompositeExplicitAutograd")
def _(grad, packed, scales, offsets, experts, bits, length):
    return _multiply(grad, packed, scales, offsets, experts, bits, length, True, 0.0)


@torch.library.impl(_library, "_affine_matmul_experts_backward", "Meta")
def _(grad, packed, scales, offsets, experts, bits, length):
    return grad.new_empty(*experts.shape, length)


def _save_backward(ctx, inputs, output):
    _, *tensors, ctx.bits, _ = inputs
    ctx.save_for_backward(*tensors)


def _backward_backward(ctx, grad):
    return _matmul_experts(grad, *ctx.saved_tensors, ctx.bits), *[None] * 6


torch.library.register_autograd(
    "metalcore::_affine_matmul_experts_backward", _backward_backward, setup_context=_save_backward, lib=_library
)


def _backward_experts(ctx, grad):
    result = torch.ops.metalcore._affine_matmul_experts_backward(grad, *ctx.saved_tensors, ctx.bits, ctx.length)
    return result if ctx.own else result.sum(1), *[None] * 5


_matmul_experts = autograd("affine_matmul_experts", _backward_experts, _save_experts)


def _sample(bits, tokens, own, zeros):
    def arguments(x):
        packed, scales, offsets = (each.view(3, 21, -1) for each in affine_sample(bits, 63, 96, x.device, 32, zeros))
        return x, packed, scales, offsets, bits, (torch.arange(2 * len(x), device=x.device) * 5 % 3).view(-1, 2)

    return Sample(
        f"{bits} bits, {tokens} tokens",
        ((tokens, *own, 96),),
        arguments=arguments,
        terms=96,
        roundings=2,
        backward=False,  # which experts are chosen decides what it runs, so that no plan says it before
    )


def _reference(x, packed, scales, offsets, bits, experts):
    numbers = torch.stack([unpack_affine(*each, bits) for each in zip(packed, scales, offsets)])
    return torch.einsum("tk,tenk->ten" if x.dim() == 2 else "tek,tenk->ten", x, numbers.to(x.dtype)[experts.long()])


register(
    Op(
        "affine_linear_experts",
        affine_linear_experts,
        reference=_reference,
        operators=("affine_matmul_experts", "affine_matmul"),
        samples=lambda: tuple(_sample(*of) for of in ((4, 2, (), False), (3, 3, (2,), False), (8, 2, (), True))),
        waits=True,
    )
)
