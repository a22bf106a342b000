"""Which calls of PyTorch's operators a fault touches, and what computes them instead; and what else "safe" changes in
PyTorch.

`applies` has an operator's arguments and says whether a fault touches the call. `instead` has the operator and its
arguments, and returns metalcore's result, or NotImplemented for what metalcore does not take. Such a call, and one of a
route without `instead`, is computed on the CPU (`on_cpu`): by PyTorch's kernel there, from copies, differentiably where
autograd watches.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from .. import conv, gemm, linalg
from .._core.routing import alike
from .._core.torch_operators import overload

__all__ = [
    "Route",
    "checkpoints_keep_random_state",
    "forms",
    "on_cpu",
]

_LONG_SUM, _ROWS = 32_767, 16  # Apple7's and Apple8's kernels for at least so many rows and columns read past K
_BIG_INDEX, _BIGGEST_INDEX = 2**31, 2**32


class Route(NamedTuple):
    """A way around a fault.

    Attributes:
        operators: the operators of aten, with their overloads, that have it.
        applies: says whether it touches a call, by the operator's arguments.
        instead: what computes such a call.
    """

    operators: tuple[str, ...]
    applies: Callable[..., bool]
    instead: Callable[[Any, tuple, dict], Any] | None = None


def on_cpu(operator: Any, args: tuple, kwargs: dict) -> Any:
    """Returns operator(*args, **kwargs), computed from copies on the CPU. What it writes to is written to."""
    copies: dict[int, tuple[Tensor, Tensor]] = {}

    def copied(tensor):
        if id(tensor) not in copies:
            copies[id(tensor)] = tensor, tensor.cpu()
        return copies[id(tensor)][1]

    device = _device((args, kwargs))
    written = _written(operator, args, kwargs)
    result = operator(*tree_map_only(Tensor, copied, args), **tree_map_only(Tensor, copied, kwargs))
    originals = {}
    for tensor in written:
        copy = copied(tensor)
        if tensor.shape != copy.shape:
            tensor.resize_(copy.shape)
        originals[id(copy)] = tensor.copy_(copy)
    return tree_map_only(Tensor, lambda one: originals[id(one)] if id(one) in originals else one.to(device), result)


def _device(values):
    devices = []
    tree_map_only(Tensor, lambda tensor: devices.append(tensor.device), values)
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def _written(operator, args, kwargs):
    arguments = [argument for argument in operator._schema.arguments if not argument.kwarg_only]
    named = {argument.name: value for argument, value in zip(arguments, args)} | kwargs
    return [
        named[argument.name]
        for argument in operator._schema.arguments
        if argument.alias_info and argument.alias_info.is_write and argument.name in named
    ]


def forms(*names: str) -> tuple[str, ...]:
    """Returns the functional, in-place and out= forms of operators such as "add.Tensor" and "mm", as far as they
    exist."""
    existing = []
    for name in names:
        packet, _, which = name.partition(".")
        out = "out" if which in ("", "Tensor") else f"{which}_out"
        in_place = f"{packet}_.{which}" if which else f"{packet}_"
        existing += [one for one in (name, in_place, f"{packet}.{out}") if overload(one)]
    return tuple(existing)


def always(*args, **kwargs) -> bool:
    return True


# Linear algebra


def in_batches(A, *args, **kwargs) -> bool:
    """Returns whether there are several matrices: a single one never reaches the kernel that fails."""
    return A.dim() > 2 and A.numel() >= 8192


def least_squares(operator, args, kwargs):
    return linalg.lstsq(*args, **kwargs) if alike(*args[:2]) else NotImplemented


# Products


def long_sum(a, b, *args, **kwargs) -> bool:
    return a.shape[-1] >= _LONG_SUM and a.shape[-2] >= _ROWS and b.shape[-1] >= _ROWS


def long_sum_and_more(self, a, b, *args, **kwargs) -> bool:
    return long_sum(a, b)


def long_linear(input, weight, *args, **kwargs) -> bool:
    rows = math.prod(input.shape[:-1])
    return weight.dim() == 2 and input.shape[-1] >= _LONG_SUM and rows >= _ROWS and weight.shape[0] >= _ROWS


def long_gradients(input, grad_output, weight, *args, **kwargs) -> bool:
    """Returns whether a gradient of linear is a long sum: the weight's is over the rows, and the input's over the
    outputs."""
    return max(math.prod(input.shape[:-1]), weight.shape[0]) >= _LONG_SUM


def product(operator, args, kwargs):
    a, b = args[:2]
    return gemm.matmul(a, b) if not kwargs and alike(a, b) else NotImplemented


def product_and_more(operator, args, kwargs):
    if not set(kwargs) <= {"alpha", "beta"} or operator._schema.name[-1] == "_" or not alike(*args[:3]):
        return NotImplemented
    residual, a, b = args[:3]
    # PyTorch does not read what beta = 0 multiplies.
    return gemm.matmul(a, b, residual=None if kwargs.get("beta", 1) == 0 else residual, **kwargs)


def linear(operator, args, kwargs):
    return gemm.linear(*args, **kwargs) if alike(*args) else NotImplemented


def linear_gradients(operator, args, kwargs):
    """Returns those of input, weight and bias, of which `wanted` tells which are asked for."""
    input, grad_output, weight, wanted = args
    if not alike(input, grad_output, weight) or weight.dim() != 2:
        return NotImplemented
    rows, directions = input.reshape(-1, input.shape[-1]), grad_output.reshape(-1, grad_output.shape[-1])
    return (
        gemm.matmul(grad_output, weight) if wanted[0] else None,
        gemm.matmul(directions.T, rows) if wanted[1] else None,
        directions.sum(0) if wanted[2] else None,
    )


def with_batches(input, *args, **kwargs) -> bool:
    return input.dim() > 2


def with_batches_and_bias(input, weight, bias=None, **kwargs) -> bool:
    return input.dim() > 2 and bias is not None


def to_one_output(input, grad_output, weight, *args, **kwargs) -> bool:
    return weight.dim() == 2 and weight.shape[0] == 1


# Attention


def _attends(condition):
    """Makes `applies` of a condition on queries, keys, values, mask and whether it is causal."""

    def applies(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **options):
        return condition(query, key, value, attn_mask, is_causal)

    return applies


causal_in_16_bits = _attends(lambda q, k, v, mask, causal: causal and q.dtype != torch.float32)
few_queries = _attends(lambda q, k, v, mask, causal: q.shape[-2] <= 8 and k.shape[-2] >= 1024)
not_contiguous = _attends(lambda q, k, v, mask, causal: not (q.is_contiguous() and k.is_contiguous()))
masks_of_batches = _attends(
    lambda q, k, v, mask, causal: mask is not None and mask.dim() == 4 and mask.shape[0] > 1 == mask.shape[1]
)
values_of_another_size = _attends(lambda q, k, v, mask, causal: v.shape[-1] != q.shape[-1])
many_scores = _attends(lambda q, k, v, mask, causal: math.prod(q.shape[:-1]) * k.shape[-2] > _BIGGEST_INDEX)


# Layers


def frozen_input(grad_out, input, normalized_shape, mean, rstd, weight, bias, output_mask) -> bool:
    return not output_mask[0]


def rearranged(grad_out, input, *args, **kwargs) -> bool:
    return not (grad_out.is_contiguous() and input.is_contiguous())


def by_a_slice(input, weight, *args, **kwargs) -> bool:
    dense = torch.channels_last if weight.dim() == 4 else torch.contiguous_format
    return not weight.is_contiguous() and not weight.is_contiguous(memory_format=dense)


def convolution(operator, args, kwargs):
    input, weight, bias, stride, padding, dilation, transposed, _, groups = args
    if kwargs or transposed or input.dim() != 4 or not alike(input, weight, bias):
        return NotImplemented
    return conv.conv2d(input, weight, bias, tuple(stride), tuple(padding), tuple(dilation), groups)


def with_dropout(input, hx, params, has_biases, num_layers, dropout, train, *args, **kwargs) -> bool:
    return num_layers > 1 and dropout > 0 and train


# Elementwise operators and indices


def scalar_view(self, other, *args, **kwargs) -> bool:
    return any(isinstance(x, Tensor) and x.is_cpu and x.dim() == 0 and x.storage_offset() for x in (self, other))


def copied_scalar(operator, args, kwargs):
    """Returns the operator itself, with scalars that lie at the begin of their memory."""
    return operator(*(x.clone() if isinstance(x, Tensor) and x.is_cpu else x for x in args), **kwargs)


def bool_view(self, *args, **kwargs) -> bool:
    return self.dtype == torch.bool and self.storage_offset() % 4 != 0


def many_columns(self, *args, dim=-1, **kwargs) -> bool:
    return self.dim() > 1 and self.numel() > 2**22 * max(1, self.shape[dim])


def big_operand(a, b, *args, **kwargs) -> bool:
    output = a.shape[0] * a.shape[-2] * b.shape[-1]
    return max(a.numel(), b.numel(), output) > _BIGGEST_INDEX


def big_source(self, *args, **kwargs) -> bool:
    return self.numel() > _BIG_INDEX


def biggest_source(self, *args, **kwargs) -> bool:
    return self.numel() > _BIGGEST_INDEX


def big_sum(tensors, *args, **kwargs) -> bool:
    return sum(tensor.numel() for tensor in tensors) > _BIG_INDEX


def of_int64(self, *args, **kwargs) -> bool:
    return self.dtype == torch.int64


def checkpoints_keep_random_state(count: Any) -> Callable[[], None]:
    """Gives torch.mps what torch.utils.checkpoint asks a device's module for before it keeps the state of its random
    numbers: `_initialized`, and a context manager `device` that makes a device the current one."""
    module, added = cast(Any, torch.mps), []

    @contextlib.contextmanager
    def device(index):
        count.ran += 1
        yield  # there is one device

    for name, value in (("_initialized", True), ("device", device)):
        if not hasattr(module, name):
            setattr(module, name, value)
            added.append(name)

    def undo():
        for name in added:
            delattr(module, name)

    return undo
