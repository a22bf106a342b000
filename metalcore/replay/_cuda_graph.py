"""Captures of CUDA graphs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

__all__ = ["captured"]


@contextlib.contextmanager
def captured(*generators: torch.Generator) -> Iterator[torch.cuda.CUDAGraph]:
    """A graph of the work of the block, which does not happen. The generators' numbers, and those of the default one,
    are new at each replay.

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
