"""matmul and linear: products of matrices, with what mostly follows them in the same kernel."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .._core.operators import autograd, cpu_kernel, fake_kernel, needs_gradient
from .._core.registry import Op, Sample, register
from .._core.routing import INT32_MAX, alike, autocast_operands, require_tensors
from .._core.tensors import broadcast_shapes
from ..activation import gelu, relu, silu

__all__ = ["ACTIVATIONS", "linear", "matmul", "reference_activation"]

# By the argument that names one: its name in operators, and the function.
ACTIVATIONS = {
    None: ("none", lambda x: x),
    "relu": ("relu", relu),
    "gelu": ("gelu", gelu),
    "gelu_tanh": ("gelu_tanh", lambda x: gelu(x, approximate="tanh")),
    "silu": ("silu", silu),
}


def reference_activation(name: str, x: Tensor) -> Tensor:
    """Returns the same of PyTorch's functions, by the name in operators."""
    functional = torch.nn.functional
    return {
        "none": lambda: x,
        "relu": lambda: functional.relu(x),
        "gelu": lambda: functional.gelu(x),
        "gelu_tanh": lambda: functional.gelu(x, approximate="tanh"),
        "silu": lambda: functional.silu(x),
    }[name]()


_BATCH_DIMS = 4  # that kernels take


def matmul(
    a: Tensor,
    b: Tensor,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
) -> Tensor:
    """Computes activation(alpha * (a @ b) + bias + beta * residual), in one kernel.

    The arguments a and b are those of torch.matmul; with a residual it is torch.addmm or torch.baddbmm. Operands are
    read with the strides that they have, so that a.mT costs no copy. Sums are float32, in an order that does not
    change from run to run. PyTorch's ops take input that kernels do not: other dtypes, two different ones, and
    torch.func transforms. Apple's and NVIDIA's own libraries may be faster for large products; that is not measured.

    Args:
        a: (…, M, K) or (K,): float32, float16 or bfloat16, any strides.
        b: (…, K, N) or (K,), of a's dtype. The dimensions before the last two broadcast.
        bias: (N,), or None. b has at least 2 dimensions then.
        activation: "relu", "gelu", "gelu_tanh", "silu" or None. Where autograd needs a derivative, it is an op of its
            own, whose input was rounded to a's dtype.
        residual: a tensor that broadcasts to the result's shape, or None.
        alpha, beta: numbers. With a beta of 0 the residual is not read, as in torch.addmm.

    Returns:
        A contiguous tensor, (…, M, N), without the dimensions that a vector lacks. It has gradients of any order.

    Raises:
        ValueError: the activation is unknown.
        TypeError: a or b is no tensor.
        RuntimeError: shapes do not match.

    Example:
        >>> a, b = torch.ones(2, 4, device="mps"), torch.ones(4, 3, device="mps")
        >>> metalcore.matmul(a, b, alpha=0.5).tolist()
        [[2.0, 2.0, 2.0], [2.0, 2.0, 2.0]]
    """
    if activation not in ACTIVATIONS:
        names = ", ".join(repr(name) for name in ACTIVATIONS)
        raise ValueError(f"matmul: activation must be one of {names}, not {activation!r}")
    name, apply = ACTIVATIONS[activation]
    a, b, bias, residual = autocast_operands(a, b, bias, residual)
    if not _takes(a, b, bias, residual):
        require_tensors("matmul", a=a, b=b)
        require_tensors("matmul", optional=True, bias=bias, residual=residual)
        return apply(_by_torch(a, b, bias, residual, alpha, beta))
    apart = name != "none" and any(map(_needs, (a, b, bias, residual)))
    fused = "none" if apart else name
    if residual is None and _are_one_product(a, b, bias):
        product = _matmul(a, b, bias, None, fused, float(alpha), float(beta))
        return apply(product) if apart else product
    rows, columns, batch = _dimensions(a.shape, b.shape, bias)
    shape = (*batch, *rows, *columns)
    left, right = a if rows else a[None], b if columns else b[:, None]
    if residual is not None:
        residual = residual.expand(shape)
        residual = residual.view_as(residual) if rows and columns else _with_vectors(residual, a, b)
    if len(batch) > _BATCH_DIMS:
        left, right = (x.expand(*batch, *x.shape[-2:]).reshape(-1, *x.shape[-2:]) for x in (left, right))
        residual = None if residual is None else residual.reshape(-1, *residual.shape[-2:])
    product = _matmul(left, right, bias, residual, fused, float(alpha), float(beta))
    product = product if product.shape == shape else product.view(shape)
    return apply(product) if apart else product


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str | None = None) -> Tensor:
    """Computes activation(x @ weight.T + bias), as torch.nn.functional.linear does without an activation.

    Args:
        x: (…, K) of float32, float16 or bfloat16, any strides.
        weight: (N, K), or (K,), of x's dtype.
        bias: (N,), or None.
        activation: as for `matmul`.

    Returns:
        A contiguous tensor, (…, N), or (…) for a weight (K,). It has gradients of any order.

    Raises:
        ValueError: the activation is unknown.
        TypeError: x or weight is no tensor.
        RuntimeError: shapes do not match.

    Example:
        >>> x, weight = torch.ones(2, 4, device="mps"), torch.ones(3, 4, device="mps")
        >>> metalcore.linear(x, weight, activation="relu").tolist()
        [[4.0, 4.0, 4.0], [4.0, 4.0, 4.0]]
    """
    require_tensors("linear", x=x, weight=weight)
    dims = weight.dim()
    if dims > 2:
        raise RuntimeError(f"linear: weight must have 1 or 2 dimensions, not the shape {list(weight.shape)}")
    return matmul(x, weight.T if dims == 2 else weight, bias=bias, activation=activation)


def _needs(x):
    return x is not None and needs_gradient(x)


def _takes(a, b, bias, residual):
    if b is None or not alike(a, b, bias, residual):
        return False
    if b.dim() == 2 and a.dim() > 0 and 0 < a.numel() <= INT32_MAX and 0 < b.numel() <= INT32_MAX:
        return True  # so the sizes are counted too
    left, right = a.shape, b.shape
    return (
        len(left) > 0
        and len(right) > 0
        and max(*left, *right) <= INT32_MAX
        and (len(left) <= 2 or math.prod(left[:-1]) <= INT32_MAX)
        and (len(right) <= 2 or math.prod(right[:-2]) * (left[-2] if len(left) > 1 else 1) <= INT32_MAX)
    )


def _are_one_product(a, b, bias):
    """Returns whether the operator takes these as they are, as in most calls: b is one matrix, and a has rows."""
    if b.dim() != 2 or not 2 <= a.dim() <= 2 + _BATCH_DIMS:
        return False
    terms, columns = b.shape
    return a.shape[-1] == terms and (bias is None or bias.shape == (columns,))


def _dimensions(a, b, bias):
    """Returns the result's rows, columns and batch for the shapes a and b, with torch.matmul's checks. A vector has no
    rows or columns."""
    columns = b[-1:] if len(b) > 1 else ()
    if a[-1] != b[-2 if columns else 0]:
        raise RuntimeError(f"matmul: a of shape {list(a)} does not go with b of shape {list(b)}")
    if bias is not None and (not columns or bias.shape != columns):
        raise RuntimeError(f"matmul: bias of shape {list(bias.shape)} does not go with b of shape {list(b)}")
    return a[-2:-1], columns, broadcast_shapes(a[:-2], b[:-2]) if len(a) > 2 or len(b) > 2 else ()


def _whole_shape(left, right):
    """Returns the result's shape with both dimensions of matrices."""
    return (*broadcast_shapes(left.shape[:-2], right.shape[:-2]), left.shape[-2], right.shape[-1])


def _with_vectors(x, a, b):
    """Returns x with the dimensions that a and b lack."""
    x = x.unsqueeze(-1) if b.dim() == 1 else x
    return x.unsqueeze(-2) if a.dim() == 1 else x


def _by_torch(a, b, bias, residual, alpha, beta):
    result = a @ b
    result = result if alpha == 1 else result * alpha
    result = result if bias is None else result + bias
    return result if residual is None or beta == 0 else result + (residual if beta == 1 else residual * beta)


def _check(a, b, bias, residual, activation):
    if a.dim() < 2 or b.dim() < 2 or a.shape[-1] != b.shape[-2]:
        raise RuntimeError(f"metalcore::matmul: a of shape {list(a.shape)} does not go with b of shape {list(b.shape)}")
    if activation not in {name for name, _ in ACTIVATIONS.values()}:
        raise RuntimeError(f"metalcore::matmul: activation must not be {activation!r}")


@cpu_kernel("matmul")
def _(a, b, bias, residual, activation, alpha, beta):
    _check(a, b, bias, residual, activation)
    dtype = torch.promote_types(a.dtype, torch.float32)
    added = [None if x is None else x.to(dtype) for x in (bias, residual)]
    product = _by_torch(a.to(dtype), b.to(dtype), added[0], added[1], alpha, beta)
    return reference_activation(activation, product).to(a.dtype).contiguous()


@fake_kernel("matmul")
def _(a, b, bias, residual, activation, alpha, beta):
    _check(a, b, bias, residual, activation)
    return a.new_empty(_whole_shape(a, b))


def _save(ctx, inputs, output):
    a, b, bias, residual, ctx.activation, ctx.alpha, ctx.beta = inputs
    ctx.presence = bias is not None, residual is not None
    ctx.save_for_backward(a, b)


def _backward(ctx, grad):
    if ctx.activation != "none":
        raise RuntimeError("metalcore::matmul has a derivative only without an activation")
    a, b = ctx.saved_tensors
    wanted = ctx.needs_input_grad
    by_a = _product_for(a, grad, b.mT, ctx.alpha) if wanted[0] else None
    by_b = _product_for(b, a.mT, grad, ctx.alpha) if wanted[1] else None
    by_bias = grad.sum(tuple(range(grad.dim() - 1))) if wanted[2] and ctx.presence[0] else None
    by_residual = None
    if wanted[3] and ctx.presence[1]:
        by_residual = grad if ctx.beta == 1 else grad * ctx.beta if ctx.beta else torch.zeros_like(grad)
    return by_a, by_b, by_bias, by_residual, None, None, None


def _product_for(x, left, right, alpha):
    """Computes alpha * (left @ right), summed to x's shape. The batch dimensions that x lacks are terms where that is a
    view."""
    if x.dim() == 2 and left.dim() > 2 and right.dim() > 2:
        # aᵀ grad: the rows of all of the batch's members are the terms of one product.
        left, batch = left.mT, left.shape[:-2]
        if right.shape[:-2] != batch:
            batch = broadcast_shapes(batch, right.shape[:-2])
            left, right = (tensor.expand(*batch, *tensor.shape[-2:]) for tensor in (left, right))
        terms = math.prod(batch) * left.shape[-2]  # autograd's is_grads_batched knows reshape, and not flatten
        left, right = left.reshape(terms, left.shape[-1]).mT, right.reshape(terms, right.shape[-1])
    product = matmul(left, right, alpha=alpha)
    return product if product.shape == x.shape else product.sum_to_size(x.shape)


_matmul = autograd("matmul", _backward, _save)


def _reference(a, b, *, bias=None, activation=None, residual=None, alpha=1.0, beta=1.0):
    return reference_activation(ACTIVATIONS[activation][0], _by_torch(a, b, bias, residual, alpha, beta))


def _samples():
    return (
        Sample("tiles", ((70, 48), (48, 72)), terms=72),
        Sample("ragged tiles", ((67, 37), (37, 65)), terms=67),
        Sample("transposed", ((48, 72), (80, 48)), arguments=lambda a, b: (a.mT, b.mT), terms=80),
        Sample("a vector", ((64,), (3, 64, 40)), terms=64),
        Sample("few rows", ((5, 100), (100, 30)), terms=100),
        Sample("few columns", ((70, 100), (100, 3)), terms=100),
        Sample("few rows, transposed", ((3, 264), (33, 264)), arguments=lambda a, b: (a, b.mT), terms=264),
        Sample("one row, transposed", ((1, 264), (33, 264)), arguments=lambda a, b: (a, b.mT), terms=264),
        Sample("batch", ((2, 1, 20, 24), (3, 24, 16)), {"alpha": 0.5}, terms=60),
        Sample("gelu", ((20, 24), (24, 16)), {"activation": "gelu"}, terms=24, roundings=2),
        Sample("no terms", ((3, 0), (0, 4))),
    )


register(
    Op(
        "matmul",
        matmul,
        reference=_reference,
        operators=("matmul",),
        samples=_samples,
        production=lambda rows=128, columns=256, terms=256: Sample("", ((rows, terms), (terms, columns)), terms=terms),
    )
)
register(
    Op(
        "linear",
        linear,
        namesake="torch.nn.functional.linear",
        operators=("matmul",),
        samples=lambda: (
            Sample("rows", ((70, 96), (72, 96), (72,)), terms=96),
            Sample("few rows", ((2, 96), (72, 96), (72,)), terms=96),
            Sample("batch", ((2, 3, 40), (24, 40)), terms=40),
        ),
        production=lambda rows=16, features=1024, outputs=1024: Sample(
            "", ((rows, features), (outputs, features), (outputs,)), terms=max(features, outputs)
        ),
    )
)
