"""`layer.weight` of a layer whose weights are packed: a tensor that is unpacked where an operator reads its numbers."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ._linear import quantized_linear
from ._pack import quantize
from ._rows import dequantize, quantized_embedding

if TYPE_CHECKING:
    from ._layers import PackedModule

__all__ = ["PackedWeight", "PackingError", "error_of", "write"]


class PackingError(NamedTuple):
    """How far packed weights are from the numbers that were written to them, in Frobenius norms.

    Attributes:
        of_weight: the error, divided by the norm of the numbers.
        of_change: the error, divided by the norm of what the write changed. From 1 on rounding changed the weights as
            much as the write did.
    """

    of_weight: float
    of_change: float


class PackedWeight(torch.Tensor):
    """The numbers of a layer's packed weight. It has their shape and dtype, and no memory of its own.

    Products and look-ups of rows read the packed weight as it is, and an index unpacks only its rows. Any other
    operator gets all numbers, as a new tensor. What is written to it (`weight.data = numbers`, `weight.data += change`)
    is packed in the layer's type; what is written to parts or views of it is not. It is not trained.
    """

    layer: PackedModule
    _is_hf_initialized = True  # transformers draws no random numbers for it

    @staticmethod
    def __new__(cls, layer: PackedModule) -> PackedWeight:
        rows, nbytes = layer.packed.shape
        shape = (rows, nbytes // layer.type.nbytes * layer.type.block)
        weight = torch.Tensor._make_subclass(cls, _memory(layer).expand(shape))
        weight.layer = layer
        return weight

    def numbers(self, index: Any = ...) -> Tensor:
        """Returns the numbers, or those of some rows."""
        return dequantize(self.layer.packed[index], self.layer.type, dtype=self.dtype)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        special = _FUNCTIONS.get(func)
        if special is not None:
            result = special(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return torch._C._disabled_torch_function_impl(func, types, args, kwargs)  # its results are plain tensors

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ALIASES:
            return cls(args[0].layer)
        written = _written(func, args, kwargs) if func._schema.is_mutable else []
        numbers = {id(weight): weight.numbers() for weight in written}

        def plain(value):
            return numbers[id(value)] if id(value) in numbers else _numbers(value)

        result = func(*tree_map(plain, args), **tree_map(plain, kwargs))
        for weight in written:
            write(weight.layer, numbers[id(weight)])
            if result is numbers[id(weight)]:
                result = weight
        return result

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"PackedWeight(shape={tuple(self.shape)}, type={self.layer.type.name}, dtype={self.dtype})"

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.numbers()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.numbers().__reduce_ex__(protocol)


def _memory(layer):
    """Returns one NaN for each weight. Code that reads its memory finds it: kernels of Triton, or a tensor to whose
    data it is assigned. Its address says which weights are one."""
    holder, packed = layer.holder, layer.packed
    memory = vars(holder).get("_memory")
    if memory is None or type(packed) is not Tensor or (memory.dtype, memory.device) != (layer.dtype, packed.device):
        with torch.inference_mode(False):
            holder._memory = memory = torch.full((), math.nan, dtype=layer.dtype, device=packed.device)
    return memory


def write(layer: PackedModule, numbers: Tensor) -> None:
    """Packs numbers in the place of a layer's weights. Rows that do not change keep their bytes.

    Raises:
        ValueError: the numbers are no rows of the layer's length, or its type cannot hold them.
    """
    before = PackedWeight(layer).numbers().float()
    if numbers.dim() != 2 or numbers.shape[1] != before.shape[1]:
        raise ValueError(
            f"a packed weight of {layer.type.name} has shape {list(before.shape)}, and cannot hold numbers of shape "
            f"{list(numbers.shape)}"
        )
    numbers = numbers.detach().to(before.device, torch.float32)
    packed = quantize(numbers, layer.type)
    rows = min(len(before), len(numbers))
    kept = (numbers[:rows].to(layer.dtype) == before[:rows].to(layer.dtype)).all(1, keepdim=True)
    packed[:rows] = torch.where(kept, layer.packed[:rows], packed[:rows])
    layer.packed = packed  # and not in its memory, which a file may be mapped to
    layer.packing_error = error_of(layer, numbers, before)


def error_of(layer: PackedModule, numbers: Tensor, before: Tensor) -> PackingError:
    """Returns how far a layer is from the numbers that it has packed. They were others before. The user is told of
    it."""
    norm, numbers = torch.linalg.vector_norm, numbers.detach().float()
    error = norm(PackedWeight(layer).numbers().float() - numbers)
    rows = min(len(before), len(numbers))
    packing_error = PackingError(*(_ratio(error, norm(part)) for part in (numbers, numbers[:rows] - before[:rows])))
    lost = " at least half as much as what was written did" if packing_error.of_change >= 0.5 else ""
    warnings.warn(
        f"Numbers were packed again, and rounding to {layer.type.name} changed them{lost}. packing_error of the layer, "
        "and metalcore.integrations.peft.packing_errors(model), say how much"
        + (": merge adapters into numbers or another type, by packed_layers(config, merged=…)" if lost else ""),
        stacklevel=1,  # one place, and so one warning of each kind
    )
    return packing_error


def _ratio(error, size):
    return (error / size).item() if size else float(error > 0)


def _numbers(value):
    return value.numbers() if isinstance(value, PackedWeight) else value


def _written(func, args, kwargs):
    """Returns the packed weights that an operator writes to."""
    holders = []
    for at, argument in enumerate(func._schema.arguments):
        value = args[at] if at < len(args) else kwargs.get(argument.name)
        if argument.is_write and isinstance(value, PackedWeight):
            holders.append(value)
    return holders


def _linear(input, weight, bias=None):
    if isinstance(input, PackedWeight) or not isinstance(weight, PackedWeight):
        return NotImplemented
    return quantized_linear(input, weight.layer.packed, weight.layer.type, bias)


def _embedding(input, weight, padding_idx=None, max_norm=None, *options, **more):
    if max_norm is not None or not isinstance(weight, PackedWeight):
        return NotImplemented
    return quantized_embedding(input, weight.layer.packed, weight.layer.type, weight.dtype)


def _rows(weight, index):
    """Returns weight[index], of which rows come first."""
    first, others = (index[0], index[1:]) if isinstance(index, tuple) and index else (index, ())
    if isinstance(first, bool) or not isinstance(weight, PackedWeight):
        return NotImplemented
    if isinstance(first, int):
        return weight.numbers(first)[others]
    if isinstance(first, slice):
        return weight.numbers(first)[(slice(None), *others)]
    listed = isinstance(first, list) and all(isinstance(row, int) for row in first)
    if others or not (listed or isinstance(first, Tensor)):
        return NotImplemented
    rows = torch.as_tensor(first)
    return NotImplemented if rows.dtype == torch.bool and rows.dim() > 1 else weight.numbers(rows)


def _set_rows(weight, index, value):
    if not isinstance(weight, PackedWeight):
        return NotImplemented
    numbers = weight.numbers()
    numbers[index] = _numbers(value)
    write(weight.layer, numbers)
    return None


def _set_data(weight, numbers):
    if not isinstance(weight, PackedWeight):
        raise TypeError("a packed weight is no memory of another tensor: take its numbers, as by clone()")
    if not (isinstance(numbers, PackedWeight) and numbers.layer is weight.layer):
        write(weight.layer, _numbers(numbers))


def _require_grad(weight, value=True):
    if value:
        raise RuntimeError(
            "a packed weight is not trained: train adapters on it, or put the layer's to_linear() or to_embedding() in "
            "its place"
        )
    return weight


def _as_numbers(function):
    return lambda weight, *args, **kwargs: function(_numbers(weight), *args, **kwargs)


_ALIASES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
_FUNCTIONS = {
    torch.nn.functional.linear: _linear,
    torch.nn.functional.embedding: _embedding,
    torch.Tensor.__getitem__: _rows,
    torch.Tensor.__setitem__: _set_rows,
    torch.Tensor.data.__set__: _set_data,  # pyright: ignore[reportAttributeAccessIssue]
    torch.Tensor.requires_grad.__set__: _require_grad,  # pyright: ignore[reportAttributeAccessIssue]
    torch.Tensor.requires_grad_: _require_grad,
    **{
        function: _as_numbers(function)
        for function in (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__)
    },
}
