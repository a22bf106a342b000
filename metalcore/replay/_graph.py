"""A replay on NVIDIA GPUs: a CUDA graph, which holds PyTorch's own kernels as well, and its capture."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from ..recording import Recording
from ._tape import Replay, Tape, key_of, refuse_host_work, tensors_in

__all__ = ["Graph", "captured"]


@contextlib.contextmanager
def captured(*generators: torch.Generator) -> Iterator[torch.cuda.CUDAGraph]:
    """Captures a graph of the work of the block, which does not happen. The generators' numbers, and those of the
    default one, are new at each replay.

    After a capture that fails, PyTorch's generators take it to go on, and refuse to draw numbers elsewhere. The end of
    another capture tells them: so an empty one follows.
    """
    try:
        with _capture(generators) as graph:
            yield graph
    except BaseException:
        with _capture(generators):
            pass
        raise


@contextlib.contextmanager
def _capture(generators):
    graph = torch.cuda.CUDAGraph()
    for generator in generators:
        graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        yield graph


class _Watch(Tape):
    """Notes what cannot be captured, and keeps no memory."""

    def by_torch(self, func, args, kwargs):
        self.note_host(func, args, kwargs)
        return func(*args, **kwargs)

    def _note(self, tensor, kind):
        pass


class _Reached(TorchDispatchMode):
    """Holds the memory that a function uses and that was there before. A graph knows addresses, and holds nothing.

    Attributes:
        held: the storages, or tensors of layouts that have several.
    """

    def __init__(self):
        super().__init__()
        self.held: dict[int, Any] = {}
        self._new: set[int] = set()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for tensor in tensors_in(args, kwargs):
            if tensor.layout is not torch.strided:
                self.held[id(tensor)] = tensor
            elif (key := key_of(tensor)) not in self._new:
                self.held.setdefault(key, tensor.untyped_storage())
        result = func(*args, **kwargs or {})
        strided = (tensor for tensor in tensors_in(result) if tensor.layout is torch.strided)
        self._new.update({key_of(tensor) for tensor in strided} - self.held.keys())
        return result


class Graph(Replay):
    """A torch.cuda.CUDAGraph of a function's run. PyTorch's own operators and random numbers are part of it, and its
    memory is a pool of the graph's own. What else it reads and writes lives as long as it does.
    """

    def __init__(self, graph: torch.cuda.CUDAGraph, recording: Recording, pool_bytes: int, kept: Any):
        self._graph, self.recording, self._kept = graph, recording, kept
        self.arena_bytes = self.peak_bytes = self.own_bytes = pool_bytes

    def run(self) -> None:
        self._graph.replay()

    @classmethod
    def record(cls, what: str, function: Callable[..., Any], inputs: Sequence[Tensor]) -> tuple[Any, Graph]:
        """Runs the function once, and captures a second run, which does not happen: the tensors that it leaves get the
        results of the first one."""
        watch = _Watch()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # PyTorch requires that what is captured has run on another stream before
            first_result = watch.record("cuda", lambda: function(*inputs))
        torch.cuda.current_stream().wait_stream(stream)
        recording = Recording(watch.number)
        watch.forget()
        refuse_host_work(what, watch)
        before = torch.cuda.memory_reserved()
        reached = _Reached()
        with captured() as graph, torch.autograd.set_multithreading_enabled(False), reached:
            result = function(*inputs)
        result = tree_map_only(Tensor, Tensor.detach, result)
        with torch.no_grad():
            for tensor, value in zip(tensors_in(result), tensors_in(first_result)):
                tensor.copy_(value)
        pool_bytes = max(0, torch.cuda.memory_reserved() - before)
        return result, cls(graph, recording, pool_bytes, (function, reached.held))  # the function has compiled code's
