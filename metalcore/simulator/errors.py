"""What kernels that go wrong raise."""

from typing import NamedTuple


class Thread(NamedTuple):
    """Where a thread of a dispatch is; each member is (x, y, z)."""

    position_in_grid: tuple
    position_in_threadgroup: tuple
    threadgroup: tuple


class KernelError(RuntimeError):
    """A kernel did what Metal leaves undefined, or did not end. The dispatch was given up; the process goes on.

    Attributes:
        kind: "out-of-bounds read", "out-of-bounds write", "out-of-bounds index", "misaligned access", "write to
            read-only memory", "race", "uninitialized read", "inactive lane read", "divergent barrier" or
            "threadgroup memory"; in any mode, where the CPU stops the kernel, "integer division by zero", "memory
            access fault", "stack overflow" or "trap"; and "timeout" (METALCORE_TIMEOUT), or "interrupted" (by Ctrl-C,
            where another thread than Python's main one runs it).
        kernel: the kernel's name.
        file: the source file as the kernel's source names itself; "program_source" for compile_shader, "" if unknown.
        line: the line in that file, or None where it could not be found (finding it needs checking mode, and addr2line
            of binutils or llvm-symbolizer).
        thread: the Thread that did it; outside of checking mode, in a kernel without barriers, the first of the row
            that it is in.
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
    """The KernelError of a fault as the executor reports it (line 0: unknown)."""
    thread = Thread(position_in_grid, position_in_threadgroup, threadgroup)
    return KernelError(message, kind=kind, kernel=kernel, file=file, line=line or None, thread=thread)


def _rebuild(message, attributes):
    return KernelError(message, **attributes)
