"""A kernel of a compiled program, called with tensors and scalars as kernels of torch.mps.compile_shader are."""

import math
import struct

import torch

from .targets import default_device

_CASTS = {
    "fp16": (torch.float16, float),
    "bf16": (torch.bfloat16, float),
    "int32": (torch.int32, int),
    "int16": (torch.int16, int),
    "int8": (torch.int8, int),
    "uint8": (torch.uint8, int),
}


class Kernel:
    """A kernel; calling it runs it.

    Positional arguments are bound to buffers 0, 1, 2 …: tensors of the device (at their first element),
    zero-dimensional CPU tensors, int (8 bytes), float (4 bytes), lists or tuples of ints, of floats, or of the device's
    tensors (their addresses). The device is the tensors' own, `mps` or `cuda`, where the kernel runs on PyTorch's
    current stream.

    Args:
        threads: the grid, an int or up to three; by default the number of elements of the first tensor.
        group_size: threads per threadgroup, as many numbers as `threads` has; by default the most the kernel allows.
        arg_casts: what scalars are converted to before they are bound: one of fp16, bf16, int32, int16, int8, uint8,
            or a dict of such by argument.
        error_buf_idx: buffer index at which PyTorch's `device ErrorMessages*` is bound; what the kernel reports there
            is raised as a RuntimeError. The call then waits for the kernel.
        threadgroup_memory: bytes behind the kernel's `[[threadgroup(i)]]` arguments: those of index 0, or a list by
            index; 0 for one that it does not use. PyTorch's compile_shader cannot run such kernels.

    Raises:
        RuntimeError: an argument cannot be bound, or the grid is not known.
        ValueError: threadgroups of more threads than the kernel allows.
        metalcore.simulator.KernelError: the kernel is at fault (in checking mode).
    """

    def __init__(self, library, name):
        self._library = library
        self._name = name

    def __repr__(self):
        return f"<metalcore kernel {self._name}>"

    @property
    def max_threads_per_threadgroup(self):
        return self._library._target().thread_limit(self._name)

    @property
    def thread_execution_width(self):
        return 32

    @property
    def static_thread_group_memory_length(self):
        return self._library._target().static_memory(self._name)

    def __call__(self, *args, threads=None, group_size=None, arg_casts=None, error_buf_idx=None, threadgroup_memory=()):
        threads, group_size = _sizes("threads", threads), _sizes("group_size", group_size)
        if arg_casts is not None and not isinstance(arg_casts, (str, dict)):
            raise RuntimeError(f"Unexpected caster arg type {type(arg_casts).__name__}")
        device = _common_device(args)
        buffers, errors = [], None
        for i, arg in enumerate(args):
            if isinstance(arg, torch.Tensor):
                buffers.append(_bind_tensor(arg, device))
                if threads is None:
                    threads = (arg.numel(),)
            else:
                cast = arg_casts.get(i) if isinstance(arg_casts, dict) else arg_casts
                buffers.append(_bind_value(arg, cast, device))
        target = self._library._target(device)
        if error_buf_idx is not None:
            errors = _bind_errors(buffers, error_buf_idx, target.memory)
        if threads is None:
            raise RuntimeError("Number of threads is undefined or has wrong dimension")
        if group_size is not None and len(group_size) != len(threads):
            raise RuntimeError("threads and group_size must have the same number of dimensions")
        if group_size is not None and 0 in group_size:
            raise ValueError(f"group_size must be positive, got {group_size}")
        lengths = (threadgroup_memory,) if isinstance(threadgroup_memory, int) else tuple(threadgroup_memory)
        lengths = [length or 16 for length in lengths]  # Metal's smallest; 0 means to the executor that none was given
        held = target.place(self._name, buffers, lengths)
        limit = target.thread_limit(self._name, buffers, lengths)
        group_size = group_size or (limit,)
        if math.prod(group_size) > limit:
            raise ValueError(f"Threadgroup size exceeds {limit} limit")
        if 0 in threads:
            return
        target.run(self._name, buffers, lengths, _three(threads), _three(group_size))
        del held  # the allocator reuses it on this stream only
        if errors is not None:
            _raise_reported(errors)


def _common_device(args):
    """The one device that a call's tensors are on; None where only values are given."""
    device = None
    for arg in args:
        for tensor in arg if isinstance(arg, (tuple, list)) else (arg,):
            if isinstance(tensor, torch.Tensor) and not tensor.is_cpu:
                if device is None:
                    device = tensor.device
                elif tensor.device != device:
                    raise RuntimeError(f"a kernel's tensors must be on one device, not on {device} and {tensor.device}")
    return device


def _sizes(what, value):
    if value is None:
        return None
    sizes = (value,) if isinstance(value, int) else tuple(value)
    if not 0 < len(sizes) < 4:
        raise RuntimeError(f"{what} must have one, two or three numbers, got {len(sizes)}")
    if not all(isinstance(size, int) and size >= 0 for size in sizes):
        raise TypeError(f"{what} must be non-negative integers, got {value!r}")
    return sizes


def _three(sizes):
    return (*sizes, 1, 1)[:3]


def _bind_tensor(tensor, device):
    if tensor.device == device:
        return tensor.data_ptr(), _span(tensor)
    if tensor.dim() != 0:
        raise RuntimeError(f"Passed CPU tensor to {_called(device)} op")
    narrower = {torch.float64: torch.float32, torch.complex128: torch.complex64}  # Metal has no double
    return _bytes(tensor.detach().to(narrower.get(tensor.dtype, tensor.dtype)))


def _called(device):
    return (device or default_device()).type.upper()


def _span(tensor):
    """Bytes from the tensor's first element to the end of its last."""
    if tensor.numel() == 0 or tensor.is_contiguous():
        return tensor.nbytes
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return (last + 1) * tensor.element_size()


def _bytes(tensor):
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


def _bind_value(value, cast, device):
    if isinstance(value, (tuple, list)):
        if not value:
            raise RuntimeError("Empty list/tuple can not be an argument to metal kernel")
        if isinstance(value[0], torch.Tensor):
            if not all(isinstance(tensor, torch.Tensor) and tensor.device == device for tensor in value):
                raise RuntimeError(f"a list of tensors for a kernel must hold {_called(device)} tensors only")
            return [(tensor.data_ptr(), _span(tensor)) for tensor in value]
        values, first = value, value[0]
    else:
        values, first = [value], value
    if not isinstance(first, (int, float)):
        raise RuntimeError("Unexpected argument types" if values is value else "Unsupported argument type")
    if not all(isinstance(v, int) or (isinstance(v, float) and isinstance(first, float)) for v in values):
        raise RuntimeError("Unexpected argument types")
    if cast:
        if cast not in _CASTS:
            raise RuntimeError(f"Unsupported cast instruction {cast}")
        dtype, kind = _CASTS[cast]
        exact = torch.tensor([kind(v) for v in values], dtype=torch.float32 if kind is float else torch.int64)
        return _bytes(exact.to(dtype))
    try:
        return struct.pack(f"<{len(values)}{'f' if isinstance(first, float) else 'q'}", *values)
    except (struct.error, OverflowError):
        if isinstance(first, float):  # too large for float32: infinite, as in C
            return _bytes(torch.tensor(values, dtype=torch.float64).to(torch.float32))
        raise RuntimeError(f"an int argument must fit in 64 bits, got {value}") from None


# Errors that kernels report ---------------------------------------------------------------------------------------

# struct ErrorMessages {
#   uint count; struct { char file[128]; char func[128]; char message[250]; unsigned line; } msg[…];
# }
_ERROR_RECORD = struct.Struct("<128s128s250s2xI")
_BUFFERS = 31  # of a kernel
_ERROR_RECORDS = 64  # at least as many as any PyTorch's ErrorMessages has


def _bind_errors(buffers, index, device):
    """Binds an empty ErrorMessages buffer at `index`; returns the tensor that holds it."""
    if type(index) is not int or not 0 <= index < _BUFFERS:
        raise RuntimeError(f"error_buf_idx must be the index of a buffer, from 0 to {_BUFFERS - 1}, got {index!r}")
    errors = torch.zeros(4 + _ERROR_RECORDS * _ERROR_RECORD.size, dtype=torch.uint8, device=device)
    buffers.extend([None] * (index + 1 - len(buffers)))
    buffers[index] = (errors.data_ptr(), errors.numel())
    return errors


def _raise_reported(errors):
    content = bytes(errors.tolist())
    if int.from_bytes(content[:4], "little"):
        file, function, message, line = (
            part if isinstance(part, int) else part.split(b"\0")[0].decode(errors="replace")
            for part in _ERROR_RECORD.unpack_from(content, 4)
        )
        raise getattr(torch, "AcceleratorError", RuntimeError)(f"{message} (reported by {function} at {file}:{line})")
