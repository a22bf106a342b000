"""The devices that a benchmark runs on, and their clocks.

A GPU is timed by events on its own clock. The simulated device is timed by the CPU time of the process (with one
thread), so that another process on a busy machine counts against neither side.
"""

from __future__ import annotations

import contextlib
import time

import torch

from metalcore import _C
from metalcore.cli import devices


def open_device(name, threads):
    """Returns the device that --device names; None means the best one that is there.

    Raises:
        RuntimeError: it is not there.
        ValueError: metalcore has no kernels for it.
    """
    name = name or devices.default()
    devices.use(name)
    device = {"cuda": Cuda, "mps": Mps, "simulator": Simulated}[name](threads)
    from metalcore._core.routing import accelerated

    if not accelerated(torch.empty(1, device=device.ours)):
        raise ValueError(
            f"metalcore has no kernels for {name} here, so there is nothing to compare; "
            "`python -m metalcore info` says what it has"
        )
    return device


class Simulated:
    """metalcore on the simulated mps device, PyTorch on the CPU."""

    name, scale, graphs = "simulator", "simulator", False
    cache_bytes = 0
    lead_in = False

    def __init__(self, threads):
        torch.set_num_threads(threads)
        _C.simulator_set_num_threads(threads)
        self.clock = time.process_time if threads == 1 else time.perf_counter
        self.method = "CPU time" if threads == 1 else "wall-clock time"
        self.ours, self.theirs = torch.device("mps"), torch.device("cpu")

    session = staticmethod(contextlib.nullcontext)

    def synchronize(self):
        torch.mps.synchronize()

    def seconds(self, batch):
        begin = self.clock()
        batch()
        return self.clock() - begin

    def release(self):
        pass


class Gpu:
    """What CUDA and Metal have in common."""

    scale, graphs = "gpu", False
    # A batch goes ahead of the measured one, so that the GPU is busy while the host prepares it.
    lead_in = True
    method = "events"
    clock = staticmethod(time.perf_counter)  # of what the host does

    def __init__(self, name, module):
        self.name, self.module = name, module
        self.ours = self.theirs = torch.device(name)

    session = staticmethod(contextlib.nullcontext)

    def synchronize(self):
        self.module.synchronize()

    def seconds(self, batch):
        start, end = (self.module.Event(enable_timing=True) for _ in range(2))
        start.record()
        batch()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e-3

    def release(self):
        self.module.empty_cache()


class Mps(Gpu):
    cache_bytes = 96 << 20  # the system-level cache of an M Ultra, the largest; Metal does not tell it

    def __init__(self, threads):
        super().__init__("mps", torch.mps)


class Cuda(Gpu):
    graphs = True

    def __init__(self, threads):
        super().__init__("cuda", torch.cuda)
        self.cache_bytes = torch.cuda.get_device_properties().L2_cache_size
        self.stream = torch.cuda.Stream()  # the default stream cannot be captured

    def session(self):
        return torch.cuda.stream(self.stream)

    def capture(self, batch):
        """Returns the replay of what `batch` launches: a CUDA graph, which costs the host nothing per call."""
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            batch()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the error at hand is the one to report
                graph.capture_end()
            raise
        graph.capture_end()
        return graph.replay
