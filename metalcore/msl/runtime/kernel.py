"""A kernel of a compiled program, called with tensors and scalars as kernels of torch.mps.compile_shader are."""

import math
import struct

import torch

from .arguments import Arguments, common_device, error_buffer_index, grid, threadgroup_lengths


class Kernel:
    """A kernel; calling it runs it.

    Positional arguments are bound to buffers 0, 1, 2 …: tensors of the device (at their first element),
    zero-dimensional CPU tensors, int (8 bytes), float (4 bytes), lists or tuples of ints, of floats, or of the device's
    tensors (their addresses), or None for one that a function constant turns off. A number whose bytes the kernel would
    read as another number (a float for `constant int&`, or an int for `constant float&`) is refused. The device is the
    tensors' own, `mps` or `cuda`, where the kernel runs on PyTorch's current stream.

    Args:
        threads: the grid, an int or up to three; by default the number of elements of the first tensor.
        group_size: threads per threadgroup, as many numbers as `threads` has; by default the most that the kernel
            allows.
        arg_casts: the type that scalars are converted to before they are bound: fp16, bf16, int32, int16, int8 or
            uint8, or a dict from an argument's index to one of these.
        error_buf_idx: buffer index at which PyTorch's `device ErrorMessages*` is bound; what the kernel reports there
            is raised as a RuntimeError. The call then waits for the kernel.
        threadgroup_memory: bytes behind the kernel's `[[threadgroup(i)]]` arguments: a number for index 0, or a list by
            index; 0 for an argument that the kernel does not use. PyTorch's compile_shader cannot run such kernels.

    Raises:
        RuntimeError: an argument cannot be bound or does not fit the kernel's type, or the grid is not known.
        TypeError: a size or an index is no integer.
        ValueError: a size or an index is out of range, or a threadgroup has more threads than the kernel allows.
        metalcore.simulator.KernelError: checking mode finds a fault in the kernel.
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
        threads, group_size = grid("threads", threads), grid("group_size", group_size)
        device, declared = common_device(args), self._library._program.arguments(self._name)
        lengths = threadgroup_lengths(threadgroup_memory, self._name, declared)
        buffers, errors = Arguments(self._name, args, arg_casts, declared, device).buffers, None
        if threads is None:
            threads = next(((arg.numel(),) for arg in args if isinstance(arg, torch.Tensor)), None)
        target = self._library._target(device)
        if error_buf_idx is not None:
            errors = _bind_errors(buffers, error_buffer_index(error_buf_idx, args), target.memory)
        if threads is None:
            raise RuntimeError("Number of threads is undefined or has wrong dimension")
        if group_size is not None and len(group_size) != len(threads):
            raise RuntimeError("threads and group_size must have the same number of dimensions")
        if group_size is not None and 0 in group_size:
            raise ValueError(f"group_size must be positive, got {group_size}")
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


def _three(sizes):
    return (*sizes, 1, 1)[:3]


# Errors that kernels report ---------------------------------------------------------------------------------------

# struct ErrorMessages {
#   uint count; struct { char file[128]; char func[128]; char message[250]; unsigned line; } msg[…];
# }
_ERROR_RECORD = struct.Struct("<128s128s250s2xI")
_ERROR_RECORDS = 64  # at least as many as any PyTorch's ErrorMessages has


def _bind_errors(buffers, index, device):
    """Binds an empty ErrorMessages buffer at `index`; returns the tensor that holds it."""
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
