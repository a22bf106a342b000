"""joined_linear: linear layers of one input, as one product."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .._core.operators import autograd, cpu_kernel, derive, fake_kernel
from .._core.registry import Op, Sample, register
from .._core.routing import INT32_MAX, alike, autocast_dtype, require_tensors
from ._matmul import reference_activation

__all__ = ["joined_linear"]

_MATRICES = 3  # that the kernel takes
_GATES = {None: "none", "silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_tanh"}


def joined_linear(
    x: Tensor,
    first: Tensor,
    second: Tensor | None = None,
    third: Tensor | None = None,
    norm: Tensor | None = None,
    *,
    biases: Sequence[Tensor | None] = (),
    eps: float = 1e-6,
    offset: float = 0.0,
    gate: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Computes linear layers of one input and joins their results, as torch.cat of torch.nn.functional.linear.

    One row of x is one kernel, which reads each weight where it is: those of the queries, keys and values of a token,
    for example, or of its gate and of what goes through it. It sums in float32, in an order that does not change from
    run to run, and rounds the result alone. PyTorch's ops do all else, and gradients.

    Args:
        x: (…, K): float32, float16 or bfloat16.
        first, second, third: weights (N, K), each with its own N, of x's dtype.
        norm: the weight (K,) of an RMSNorm of x before the products, or None.
        biases: (N,) or None for each weight, of which the last may be left out.
        eps: what is added to the mean of squares under the norm's root.
        offset: what is added to the norm's weight: 1 for Gemma's.
        gate: "silu", "gelu", "gelu_tanh" or None. The result of the first of two weights, through this activation, is
            then multiplied with that of the second one.
        residual: a tensor of the result's shape that is added to it, or None.

    Returns:
        (…, the sum of all N), or (…, N) with a gate, contiguous. It has gradients of any order.

    Raises:
        ValueError: there are more biases than weights, a third weight without a second one, an unknown gate, or a gate
            without two weights.
        TypeError: x or a weight is no tensor.
        RuntimeError: shapes do not match.

    Example:
        >>> x = torch.ones(1, 4, device="mps")
        >>> metalcore.joined_linear(x, torch.ones(2, 4, device="mps"), torch.zeros(1, 4, device="mps")).tolist()
        [[4.0, 4.0, 0.0]]
    """
    require_tensors("joined_linear", x=x, first=first)
    require_tensors("joined_linear", optional=True, second=second, third=third)
    weights, biases = _present(first, second, third), list(biases)
    if third is not None and second is None:
        raise ValueError("joined_linear: a third weight goes with a second one")
    if len(biases) > len(weights):
        raise ValueError(f"joined_linear: {len(biases)} biases do not go with {len(weights)} weights")
    if gate not in _GATES:
        raise ValueError(f"joined_linear: gate must be {', '.join(map(repr, _GATES))}, not {gate!r}")
    if gate is not None and len(weights) != 2:
        raise ValueError(f"joined_linear: a gate goes with two weights, not {len(weights)}")
    biases += [None] * (_MATRICES - len(biases))
    options = norm, float(eps), float(offset), residual, _GATES[gate]
    tensors = [t for t in (x, *weights, *biases, norm, residual) if t is not None]
    if not _takes(x, weights) or not alike(*tensors) or autocast_dtype(x) not in (None, x.dtype):
        return _by_torch(x, weights, biases, *options)
    return _joined_linear(x, first, second, third, *biases, *options)


def _takes(x, weights):
    return (
        x.dim() > 0
        and 0 < x.numel() == x.shape[-1] <= INT32_MAX
        and all(w.dim() == 2 and w.numel() > 0 and len(w) <= INT32_MAX for w in weights)
    )


def _present(*weights):
    return [weight for weight in weights if weight is not None]


def _by_torch(x, weights, biases, norm, eps, offset, residual, gate):
    if norm is not None:
        x = F.rms_norm(x, x.shape[-1:], norm if offset == 0 else norm + offset, eps)
    results = [F.linear(x, weight, bias) for weight, bias in zip(weights, biases)]
    result = torch.cat(results, -1) if gate == "none" else reference_activation(gate, results[0]) * results[1]
    return result if residual is None else result + residual


def _shape(x, a, b, c, gate):
    weights = _present(a, b, c)
    if x.numel() != x.shape[-1] or any(w.dim() != 2 or w.shape[1] != x.shape[-1] for w in weights):
        shapes = ", ".join(str(list(w.shape)) for w in weights)
        raise RuntimeError(f"metalcore::joined_linear: x of shape {list(x.shape)} does not go with {shapes}")
    return (*x.shape[:-1], sum(map(len, weights)) if gate == "none" else len(a))


@cpu_kernel("joined_linear")
def _(x, a, b, c, bias_a, bias_b, bias_c, norm, eps, offset, residual, gate):
    _shape(x, a, b, c, gate)

    def wide(tensor):
        return None if tensor is None else tensor.to(torch.promote_types(x.dtype, torch.float32))

    weights, biases = map(wide, _present(a, b, c)), map(wide, (bias_a, bias_b, bias_c))
    return _by_torch(wide(x), weights, biases, wide(norm), eps, offset, wide(residual), gate).to(x.dtype).contiguous()


@fake_kernel("joined_linear")
def _(x, a, b, c, bias_a, bias_b, bias_c, norm, eps, offset, residual, gate):
    return x.new_empty(_shape(x, a, b, c, gate))


# The derivative computes the layers again, by PyTorch's ops.

_TENSORS: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7, 10)  # among the operator's arguments


def _save(ctx, inputs, output):
    ctx.save_for_backward(*(inputs[i] for i in _TENSORS))
    ctx.eps, ctx.offset, ctx.gate = inputs[8], inputs[9], inputs[11]


def _backward(ctx, grad):
    def layers(x, a, b, c, *others):
        *biases, norm, residual = others
        return [_by_torch(x, _present(a, b, c), biases, norm, ctx.eps, ctx.offset, residual, ctx.gate)]

    gradients = dict(zip(_TENSORS, derive(layers, ctx.saved_tensors, [grad])))
    return tuple(gradients.get(i) for i in range(12))


_joined_linear = autograd("joined_linear", _backward, _save)


def _reference(
    x, first, second=None, third=None, norm=None, *, biases=(), eps=1e-6, offset=0.0, gate=None, residual=None
):
    weights = _present(first, second, third)
    biases = [*biases, *[None] * (_MATRICES - len(biases))]
    return _by_torch(x, weights, biases, norm, eps, offset, residual, _GATES[gate])


def _samples():
    return (
        Sample("three", ((1, 1, 264), (40, 264), (9, 264), (24, 264)), terms=264),
        Sample("gate", ((1, 264), (33, 264), (33, 264)), {"gate": "silu"}, terms=264, roundings=2),
        Sample("one, ragged", ((37,), (5, 37)), terms=37),
        Sample("shared terms", ((1, 800), (6, 800), (3, 800)), terms=800),
        Sample("norm", ((1, 264), (33, 264), (264,)), arguments=lambda x, a, n: (x, a, None, None, n), terms=264),
        Sample("rows", ((3, 40), (9, 40), (8, 40)), terms=40),
    )


register(
    Op(
        "joined_linear",
        joined_linear,
        reference=_reference,
        operators=("joined_linear",),
        samples=_samples,
        production=lambda features=1024, outputs=1024: Sample(
            "", ((1, features), (outputs, features), (outputs, features)), terms=features
        ),
    )
)
