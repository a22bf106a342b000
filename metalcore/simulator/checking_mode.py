"""Switches checking mode, in which a kernel's faults raise KernelError."""

import threading

from .. import _C

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
