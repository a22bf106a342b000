"""The errors of kernels that go wrong, and checking mode, in which more faults raise them."""

import threading
from typing import NamedTuple

from .. import _C


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


_lock = threading.Lock()
_active = []  # the checking() blocks that are open, in the order they were entered
_outside = False, 0, False  # the mode to return to when the last of them closes


def enabled():
    """Returns whether kernels run in checking mode: inside `checking()`, or with METALCORE_CHECK=1."""
    return _C.simulator_checking()[0]


class checking:
    """`with metalcore.simulator.checking():` runs kernels in checking mode, on one thread and much slower.

    Out-of-bounds reads, writes and indices, misaligned accesses, races (a missing barrier), divergent barriers, and
    threadgroup memory that is read before it is written or exceeds 32 KiB raise KernelError. It names the kernel, the
    line and the thread.

    `seed` chooses the order in which the threads of a threadgroup run. `misaligned=True` lets kernels read and write at
    addresses that are no multiples of the type's alignment: Apple's GPUs allow it, and some kernels in use need it.

    The mode is the process's, not the thread's. Blocks may be nested, and blocks of several threads may overlap:
    checking ends with the last block.

    Example:
        >>> with metalcore.simulator.checking(seed=1):
        ...     metalcore.relu(torch.ones(4, device="mps")).tolist()
        [1.0, 1.0, 1.0, 1.0]
    """

    def __init__(self, seed=0, *, misaligned=False):
        if not 0 <= seed < 2**32:
            raise ValueError(f"seed must have 32 bits, got {seed}")
        self.options = seed, bool(misaligned)

    def __enter__(self):
        global _outside
        with _lock:
            if not _active:
                _outside = _C.simulator_checking()
            _active.append(self.options)
            _C.simulator_set_checking(True, *self.options)
        return self

    def __exit__(self, *exception):
        with _lock:
            # Removes the last block with these options: blocks of several threads need not close in order.
            del _active[len(_active) - 1 - _active[::-1].index(self.options)]
            if _active:
                _C.simulator_set_checking(True, *_active[-1])
            else:
                _C.simulator_set_checking(*_outside)
