"""The errors of kernels that go wrong."""

from typing import NamedTuple


class Thread(NamedTuple):
    """The position of a thread in a dispatch; each member is (x, y, z)."""

    position_in_grid: tuple
    position_in_threadgroup: tuple
    threadgroup: tuple


class KernelError(RuntimeError):
    """The error of a kernel that did something which Metal leaves undefined, or did not end. The dispatch ended; the
    process goes on.

    Attributes:
        kind: in checking mode "out-of-bounds read", "out-of-bounds write", "out-of-bounds index", "misaligned access",
            "write to read-only memory", "race", "uninitialized read", "inactive lane read", "divergent barrier" or
            "threadgroup memory"; in any mode, where the CPU stops the kernel, "integer division by zero", "memory
            access fault", "stack overflow" or "trap", and where it does not end, "timeout" (METALCORE_TIMEOUT) or
            "interrupted" (by Ctrl-C, where Python's main thread does not run the kernel).
        kernel: the kernel's name.
        file: the source file as the kernel's source names itself; "program_source" for compile_shader, "" if unknown.
        line: the line in that file, or None where it is not known: this needs checking mode, and addr2line (of
            binutils) or llvm-symbolizer.
        thread: the Thread that went wrong. In a kernel without barriers, outside of checking mode, it is the first
            thread of that thread's row.

    Example:
        >>> source = "kernel void shift(device float* x, uint i [[thread_position_in_grid]]) { x[i] = x[i + 1]; }"
        >>> try:
        ...     with metalcore.simulator.checking():
        ...         metalcore.compile_shader(source).shift(torch.ones(4, device="mps"))
        ... except metalcore.simulator.KernelError as error:
        ...     print(error.kind, error.kernel, error.line)
        out-of-bounds read shift 1
    """

    def __init__(self, message, *, kind=None, kernel=None, file="", line=None, thread=None):
        super().__init__(message)
        self.kind = kind
        self.kernel = kernel
        self.file = file
        self.line = line
        self.thread = thread

    def __reduce__(self):
        return _rebuild, (self.args[0], self.__dict__)


def from_fault(message, kind, kernel, file, line, position_in_grid, position_in_threadgroup, threadgroup):
    """Returns the KernelError for a fault as the executor reports it (line 0 means unknown)."""
    thread = Thread(position_in_grid, position_in_threadgroup, threadgroup)
    return KernelError(message, kind=kind, kernel=kernel, file=file, line=line or None, thread=thread)


def _rebuild(message, attributes):
    return KernelError(message, **attributes)
