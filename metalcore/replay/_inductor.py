"""Code of Inductor, torch.compile's default backend. It launches kernels without PyTorch's dispatcher, where no tape
sees them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from ._tape import CaptureError

__all__ = ["refused"]

_MODULE = "torch._inductor.output_code"


@contextlib.contextmanager
def refused(what: str) -> Iterator[None]:
    """Inside the block a graph that Inductor compiled raises CaptureError instead of running."""
    before = sys.modules.get(_MODULE)
    if before is None:  # nothing has been compiled by it
        yield
        return

    def refuse(*_):
        raise CaptureError(
            f"{what}: what Inductor compiled (torch.compile without backend=) cannot be recorded, since it launches "
            'its kernels by itself. torch.compile(f, backend="metalcore") can, and so can a program: '
            "metalcore.compile() and program.capture()"
        )

    graph = before.CompiledFxGraph
    call, graph.__call__ = graph.__call__, refuse
    try:
        yield
    finally:
        graph.__call__ = call
