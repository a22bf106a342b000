"""A kernel of a compiled program, called with tensors and scalars as kernels of torch.mps.compile_shader are."""

import math
import struct
import sys

import torch

from .. import _C

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

    Positional arguments are bound to buffers 0, 1, 2 …: `mps` tensors (at their first element), zero-dimensional CPU
    tensors, int (8 bytes), float (4 bytes), lists or tuples of ints, of floats, or of `mps` tensors (their addresses).

    Args:
        threads: the grid, an int or up to three; by default the number of elements of the first tensor.
        group_size: threads per threadgroup, as many numbers as `threads` has; by default the most the kernel allows.
        arg_casts: what scalars are converted to before they are bound: one of fp16, bf16, int32, int16, int8, uint8,
            or a dict of such by argument.
        error_buf_idx: buffer index at which PyTorch's `device ErrorMessages*` is bound; what the kernel reports there is
            raised as a RuntimeError.
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
        self._info = None

    def __repr__(self):
        return f"<metalcore kernel {self._name}>"

    @property
    def max_threads_per_threadgroup(self):
        return self._information()["max_total_threads_per_threadgroup"]

    @property
    def thread_execution_width(self):
        return 32

    @property
    def static_thread_group_memory_length(self):
        if self._name in self._library._with_threadgroup_memory:
            raise RuntimeError("the simulator learns how much threadgroup memory a kernel takes only as it runs")
        return 0

    def __call__(self, *args, threads=None, group_size=None, arg_casts=None, error_buf_idx=None, threadgroup_memory=()):
        threads, group_size = _sizes("threads", threads), _sizes("group_size", group_size)
        if arg_casts is not None and not isinstance(arg_casts, (str, dict)):
            raise RuntimeError(f"Unexpected caster arg type {type(arg_casts).__name__}")
        buffers, errors = [], None
        for i, arg in enumerate(args):
            if isinstance(arg, torch.Tensor):
                buffers.append(_bind_tensor(arg))
                if threads is None:
                    threads = (arg.numel(),)
            else:
                cast = arg_casts.get(i) if isinstance(arg_casts, dict) else arg_casts
                buffers.append(_bind_value(arg, cast))
        if error_buf_idx is not None:
            errors = _bind_errors(buffers, error_buf_idx)
        if threads is None:
            raise RuntimeError("Number of threads is undefined or has wrong dimension")
        if group_size is not None and len(group_size) != len(threads):
            raise RuntimeError("threads and group_size must have the same number of dimensions")
        limit = self.max_threads_per_threadgroup
        group_size = group_size or (limit,)
        if math.prod(group_size) > limit:
            raise ValueError(f"Threadgroup size exceeds {limit} limit")
        if 0 in group_size:
            raise ValueError(f"group_size must be positive, got {group_size}")
        if 0 in threads:
            return
        lengths = (threadgroup_memory,) if isinstance(threadgroup_memory, int) else tuple(threadgroup_memory)
        lengths = [length or 16 for length in lengths]  # Metal's smallest; 0 means to the executor that none was given
        checking = _C.simulator_checking()[0]
        library = self._library._load(self._name, checking=checking)
        if checking:
            buffers = [_with_memory(buffer) if isinstance(buffer, bytes) else buffer for buffer in buffers]
        _C.simulator_dispatch(library, self._name, buffers, lengths, _three(threads), _three(group_size))
        if errors is not None:
            _raise_reported(errors)

    def _information(self):
        if self._info is None:
            library = self._library._load(self._name, checking=False)
            self._info = next(k for k in _C.simulator_kernels(library) if k["name"] == self._name)
        return self._info


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


def _bind_tensor(tensor):
    if tensor.device.type == "mps":
        return tensor.data_ptr(), _span(tensor)
    if tensor.device.type != "cpu" or tensor.dim() != 0:
        raise RuntimeError(f"Passed {tensor.device.type.upper()} tensor to MPS op")
    narrower = {torch.float64: torch.float32, torch.complex128: torch.complex64}  # Metal has no double
    return _bytes(tensor.detach().to(narrower.get(tensor.dtype, tensor.dtype)))


def _span(tensor):
    """Bytes from the tensor's first element to the end of its last."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return (last + 1) * tensor.element_size()


def _bytes(tensor):
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


def _with_memory(content):
    """Bytes, and the device's memory behind each address in them: an argument buffer, packed by the caller."""
    device = sys.modules.get("metalcore.simulator.device")
    if device is None:  # kernels without the simulated device have no such memory
        return content
    words = struct.unpack_from(f"<{len(content) // 8}Q", content)
    return content, [(8 * i, memory) for i, word in enumerate(words) if (memory := device.allocation(word))]


def _bind_value(value, cast):
    if isinstance(value, (tuple, list)):
        if not value:
            raise RuntimeError("Empty list/tuple can not be an argument to metal kernel")
        if isinstance(value[0], torch.Tensor):
            if not all(isinstance(tensor, torch.Tensor) and tensor.device.type == "mps" for tensor in value):
                raise RuntimeError("a list of tensors for a kernel must hold MPS tensors only")
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

# struct ErrorMessages { uint count; struct { char file[128]; char func[128]; char message[250]; unsigned line; } msg[…]; }
_ERROR_RECORD = struct.Struct("<128s128s250s2xI")
_ERROR_RECORDS = 64  # at least as many as any PyTorch's ErrorMessages has


def _bind_errors(buffers, index):
    """Binds an empty ErrorMessages buffer at `index`; returns the tensor that holds it."""
    errors = torch.zeros(4 + _ERROR_RECORDS * _ERROR_RECORD.size, dtype=torch.uint8)
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
