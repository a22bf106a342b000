"""Arguments from Python: the values of function constants, and the bytes that a call binds to each buffer."""

import operator
import struct

import torch

from ..language.numbers import MAX_GRID, MAX_INDEX, MAX_THREADGROUP_MEMORY, misfit, number_type
from .targets import default_device

_CASTS = {
    "fp16": (torch.float16, float),
    "bf16": (torch.bfloat16, float),
    "int32": (torch.int32, int),
    "int16": (torch.int16, int),
    "int8": (torch.int8, int),
    "uint8": (torch.uint8, int),
}


# The elements of tensors: MSL's name -> dtype.
_ELEMENTS = {
    "half": torch.float16,
    "bfloat": torch.bfloat16,
    "float": torch.float32,
    **dict.fromkeys(("char", "int8_t"), torch.int8),
    **dict.fromkeys(("uchar", "uint8_t"), torch.uint8),
    **dict.fromkeys(("short", "int16_t"), torch.int16),
    **dict.fromkeys(("int", "int32_t"), torch.int32),
    **dict.fromkeys(("long", "int64_t"), torch.int64),
    "metal_fp8_e4m3_format": torch.float8_e4m3fn,
    "metal_fp8_e5m2_format": torch.float8_e5m2,
}
# Formats of which a byte of a uint8 tensor holds so many numbers.
_IN_BYTE = {"int2b_format": 4, "uint2b_format": 4, "int4b_format": 2, "uint4b_format": 2, "metal_fp4_e2m1_format": 2}


def checked_constants(constants):
    """Returns the dict of function constants' values that compile_shader was given, checked.

    Raises:
        TypeError: it is no dict, a key is neither an index nor a name, or a value is no number or sequence of numbers.
    """
    if not isinstance(constants, dict):
        raise TypeError(f"compile_shader(): constants must be a dict, not {type(constants).__name__}")
    for key, value in constants.items():
        if not isinstance(key, (int, str)) or isinstance(key, bool):
            raise TypeError(f"compile_shader(): constants are named by an index or a name, not by {key!r}")
        numbers = value if isinstance(value, (tuple, list)) else [value]
        if not numbers or not all(isinstance(number, (bool, int, float)) for number in numbers):
            raise TypeError(
                f"compile_shader(): constant {key!r} must be a bool, int, float or a tuple of them, not {value!r}"
            )
    return dict(constants)


def common_device(args):
    """Returns the device that all tensors of a call are on; None for a call without tensors."""
    device = None
    for arg in args:
        for tensor in arg if isinstance(arg, (tuple, list)) else (arg,):
            if isinstance(tensor, torch.Tensor) and not tensor.is_cpu:
                if device is None:
                    device = tensor.device
                elif tensor.device != device:
                    raise RuntimeError(f"a kernel's tensors must be on one device, not on {device} and {tensor.device}")
    return device


def grid(what, value):
    """Returns `threads` or `group_size` as a tuple of one to three numbers; None for None."""
    if value is None:
        return None
    numbers = value if isinstance(value, (tuple, list, torch.Size)) else (value,)
    if not 0 < len(numbers) < 4:
        raise RuntimeError(f"{what} must have one, two or three numbers, got {len(numbers)}")
    return tuple(_count(what, number, value) for number in numbers)


def threadgroup_lengths(value, kernel, declared):
    """Returns the bytes behind each [[threadgroup(i)]] argument.

    Args:
        declared: dicts of the kernel's kernels.Argument.
    """
    what = "threadgroup_memory"
    lengths = [_count(what, n, value) for n in (value if isinstance(value, (tuple, list)) else (value,))]
    if sum(lengths) > MAX_THREADGROUP_MEMORY:
        raise ValueError(f"{what} asks for {sum(lengths)} bytes; {MAX_THREADGROUP_MEMORY} is the limit")
    indices = {argument["index"] for argument in declared if argument["kind"] == "threadgroup"}
    for index, length in enumerate(lengths):
        if length and index not in indices:
            raise ValueError(f"{what} has {length} bytes for index {index}, of which kernel '{kernel}' has no argument")
    return [length or 16 for length in lengths]  # Metal's least; for the executor 0 means that no length is set


def _count(what, number, value):
    """Returns a count, which is 0 or more."""
    try:
        count = -1 if isinstance(number, bool) else operator.index(number)
    except TypeError:
        count = -1
    if count < 0:
        raise TypeError(f"{what} must be non-negative integers, got {value!r}")
    if count > MAX_GRID:
        raise ValueError(f"{what} must be less than 2**32, got {value!r}")
    return count


def error_buffer_index(index, args):
    """Returns the index at which PyTorch's ErrorMessages are bound."""
    if isinstance(index, bool) or not isinstance(index, int):
        raise TypeError(f"error_buf_idx must be an int, got {index!r}")
    if not 0 <= index <= MAX_INDEX:
        raise ValueError(f"error_buf_idx must be 0 to {MAX_INDEX}, got {index}")
    if index < len(args) and args[index] is not None:
        raise ValueError(f"error_buf_idx is {index}, where an argument is bound")
    return index


class Arguments:
    """The arguments of one call, as what is bound to each buffer.

    Attributes:
        buffers: for each, None, (address, bytes), the bytes of a value, or a list of (address, bytes).
    """

    def __init__(self, kernel, args, casts, declared, device):
        """
        Args:
            declared: dicts of the kernel's kernels.Argument.
        """
        self.kernel, self.device = kernel, device
        self.declared = {}
        for argument in declared:
            if argument["kind"] == "buffer":
                self.declared.setdefault(argument["index"], []).append(argument)
        if len(args) > MAX_INDEX + 1:
            limit = f"{MAX_INDEX + 1} buffers is the limit"
            raise RuntimeError(f"kernel '{kernel}' is given {len(args)} arguments; {limit}")
        self.casts = self._casts(casts, args)
        self.buffers = [self._bind(i, arg) for i, arg in enumerate(args)]
        for argument in declared:
            if argument["tensor"]:
                self._bind_shape(args, argument)

    def _casts(self, casts, args):
        """Returns the casts by the arguments' indices."""
        if casts is not None and not isinstance(casts, (str, dict)):
            raise RuntimeError(f"Unexpected caster arg type {type(casts).__name__}")
        if not isinstance(casts, dict):
            return {} if casts is None else dict.fromkeys(range(len(args)), casts)
        for index in casts:
            if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < len(args):
                raise RuntimeError(f"arg_casts names argument {index!r}, and there are {len(args)}")
            if args[index] is None or isinstance(args[index], torch.Tensor):
                raise RuntimeError(f"arg_casts names argument {index}, which is no scalar")
        return casts

    def _bind(self, index, arg):
        if arg is None:
            declared = self.declared.get(index, [])
            if not all(argument["condition"] for argument in declared):
                raise RuntimeError(f"Unsupported argument type: {self._called(index)} is None")
            return None  # the executor reports it where a function constant turns the argument on
        if isinstance(arg, torch.Tensor):
            return self._tensor(index, arg)
        if isinstance(arg, (tuple, list)):
            if not arg:
                raise RuntimeError("Empty list/tuple can not be an argument to metal kernel")
            if isinstance(arg[0], torch.Tensor):
                return self._table(arg)
            return self._numbers(index, arg, "Unexpected argument types")
        return self._numbers(index, [arg], "Unsupported argument type")

    def _called(self, index):
        names = " or ".join(f"'{argument['name']}'" for argument in self.declared.get(index, ())) or index
        return f"argument {names} of kernel '{self.kernel}'"

    def _tensor(self, index, tensor):
        if tensor.device == self.device:
            return self._memory(tensor)
        if tensor.dim() != 0:
            raise RuntimeError(f"Passed CPU tensor to {_device_name(self.device)} op")
        narrower = {torch.float64: torch.float32, torch.complex128: torch.complex64}  # Metal has no double
        tensor = tensor.detach().to(narrower.get(tensor.dtype, tensor.dtype))
        if not tensor.dtype.is_complex:
            self._check(index, [tensor.item()], tensor.dtype)
        return _bytes(tensor)

    def _bind_shape(self, args, argument):
        """Binds the extents and strides of a tensor beside its memory (see metal/tensor_argument.h)."""
        index, (at, element, rank) = argument["index"], argument["tensor"]
        tensor, called = args[index] if index < len(args) else None, self._called(index)
        if not isinstance(tensor, torch.Tensor) or tensor.device != self.device:
            raise RuntimeError(f"{called} must be a tensor of the kernel's device, and it is {_described(tensor)}")
        if rank and tensor.dim() != rank:
            raise RuntimeError(f"{called} has {rank} dimensions, and the tensor has {tensor.dim()}")
        in_byte = _IN_BYTE.get(element, 1)
        wanted = torch.uint8 if in_byte > 1 else _ELEMENTS.get(element)
        if wanted is not None and tensor.dtype != wanted:
            raise RuntimeError(f"{called} has elements of type {element}, and the tensor has {tensor.dtype}")
        if tensor.dim() == 0 or tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise RuntimeError(
                f"{called} needs a tensor of at least one dimension whose last stride is 1, and it has the strides "
                f"{tensor.stride()}: call contiguous()"
            )
        if at < len(args) and args[at] is not None:
            raise RuntimeError(f"index {at} holds the shape of {called}, and an argument is bound there")
        extents = [in_byte * tensor.shape[-1], *reversed(tensor.shape[:-1])]
        strides = [1, *(in_byte * stride for stride in reversed(tensor.stride()[:-1]))]
        numbers = [n for dimension in zip(extents, strides) for n in dimension]
        self.buffers += [None] * (at + 1 - len(self.buffers))
        self.buffers[at] = struct.pack(f"<iiq{len(numbers)}q", tensor.dim(), tensor.element_size(), 0, *numbers)

    def _table(self, tensors):
        if not all(isinstance(tensor, torch.Tensor) and tensor.device == self.device for tensor in tensors):
            raise RuntimeError(f"a list of tensors for a kernel must hold {_device_name(self.device)} tensors only")
        return [self._memory(tensor) for tensor in tensors]

    def _memory(self, tensor):
        if tensor.is_conj() or tensor.is_neg():
            raise RuntimeError(
                f"kernel '{self.kernel}' would read a conjugated or negated view as what it is a view "
                "of: call resolve_conj() or resolve_neg()"
            )
        return tensor.data_ptr(), _span(tensor)

    def _numbers(self, index, values, refusal):
        first = values[0]
        if not isinstance(first, (int, float)):
            raise RuntimeError(refusal)
        if not all(isinstance(v, int) or (isinstance(v, float) and isinstance(first, float)) for v in values):
            raise RuntimeError("Unexpected argument types")
        if cast := self.casts.get(index):
            return self._cast(index, values, cast)
        is_float = isinstance(first, float)
        try:
            content = struct.pack(f"<{len(values)}{'f' if is_float else 'q'}", *values)
        except (struct.error, OverflowError):
            if not is_float:
                raise RuntimeError(f"{self._called(index)}: an int must fit in 64 bits, got {values}") from None
            # A number too large for float32 becomes infinite, as in C.
            content = _bytes(torch.tensor(values, dtype=torch.float64).to(torch.float32))
        self._check(index, values, torch.float32 if is_float else torch.int64)
        return content

    def _cast(self, index, values, cast):
        if cast not in _CASTS:
            raise RuntimeError(f"Unsupported cast instruction {cast}")
        dtype, kind = _CASTS[cast]
        try:
            exact = torch.tensor([kind(v) for v in values], dtype=torch.float32 if kind is float else torch.int64)
        except (ValueError, OverflowError, RuntimeError):
            raise RuntimeError(f"{self._called(index)}: {values} cannot be cast to {cast}") from None
        converted = exact.to(dtype)
        self._check(index, converted.tolist(), dtype)
        return _bytes(converted)

    def _check(self, index, values, dtype):
        """Refuses numbers whose bytes the kernel would read as other numbers.

        Args:
            dtype: of the bytes.
        """
        for argument in self.declared.get(index, ()):
            type_ = number_type(argument["type"])
            if type_ is not None and (problem := _mismatch(values, dtype, type_)):
                raise RuntimeError(f"{self._called(index)} is {argument['type']}: {problem}")


def _mismatch(values, dtype, type_):
    """Returns why a kernel that reads a NumberType would read other values from these bytes of a dtype; None where it
    reads these."""
    if not any(values) and len(values) * dtype.itemsize * 8 >= type_.bits * type_.components:
        return None  # zeros are zeros of any type
    bits, is_float = dtype.itemsize * 8, dtype.is_floating_point
    if is_float != (type_.kind is float):
        wanted = "a float" if type_.kind is float else "an int"
        return f"{values[0]} is {'a float' if is_float else 'an int'}, whose bits are read as those of {wanted}"
    name = str(dtype).removeprefix("torch.")
    if is_float:
        other = {"half": torch.float16, "bfloat": torch.bfloat16}.get(type_.name, torch.float32)
        if dtype != other:
            return f"{values[0]} is bound as a {name} (see arg_casts)"
    elif bits < type_.bits or bits > type_.bits and type_.components > 1:
        return f"{values[0]} is bound as an {name} (see arg_casts)"
    if len(values) < type_.components:
        return f"{len(values)} number{'s' if len(values) > 1 else ''} for {type_.components}"
    problems = (misfit(value, type_, either_sign=True) for value in values[: type_.components] if not is_float)
    return next(filter(None, problems), None)


def _described(value):
    return f"a tensor on {value.device}" if isinstance(value, torch.Tensor) else repr(value)


def _device_name(device):
    return (device or default_device()).type.upper()


def _span(tensor):
    """Returns the number of bytes from the tensor's first element to the end of its last."""
    if tensor.numel() == 0 or tensor.is_contiguous():
        return tensor.nbytes
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return (last + 1) * tensor.element_size()


def _bytes(tensor):
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())
