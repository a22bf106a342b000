"""The devices that a benchmark runs on, and their clocks.

A GPU is timed by events on its own clock. The simulated device is timed by the CPU time of the process (with one
thread), so that another process on a busy machine counts against neither side.
"""

from __future__ import annotations

import contextlib
import sys
import time

import torch


def open_device(name, threads):
    """The device that --device names; None is the best that is there.

    Raises:
        ValueError: it is not there, or metalcore has no kernels for it.
    """
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "mps" if has_apple_gpu() else "cpu"
    device = {"cuda": Cuda, "mps": Mps, "cpu": Simulated}[name](threads)
    from metalcore._routing import accelerated

    if not accelerated(torch.empty(1, device=device.ours)):
        raise ValueError(f"metalcore has no kernels for {name} here, so there is nothing to compare; "
                         "`python -m metalcore info` says what it has")
    return device


def has_apple_gpu():
    """A real one: the simulator answers for PyTorch's own functions."""
    return "metalcore.simulator" not in sys.modules and torch.backends.mps.is_available()


class Simulated:
    """metalcore on the simulated mps device, PyTorch on the CPU."""

    name, scale, graphs = "cpu", "cpu", False
    cache_bytes = 0
    lead_in = False

    def __init__(self, threads):
        import metalcore.simulator

        torch.set_num_threads(threads)
        metalcore._C.simulator_set_num_threads(threads)
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
        if not has_apple_gpu():
            raise ValueError("there is no Apple GPU here; --device cpu runs on the simulated device")
        super().__init__("mps", torch.mps)


class Cuda(Gpu):
    graphs = True

    def __init__(self, threads):
        if not torch.cuda.is_available():
            raise ValueError("this PyTorch finds no NVIDIA GPU here; --device cpu runs on the simulated device")
        super().__init__("cuda", torch.cuda)
        self.cache_bytes = torch.cuda.get_device_properties().L2_cache_size
        self.stream = torch.cuda.Stream()  # the default stream cannot be captured

    def session(self):
        return torch.cuda.stream(self.stream)

    def capture(self, batch):
        """The replay of what `batch` launches: a CUDA graph, which costs the host nothing per call."""
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
