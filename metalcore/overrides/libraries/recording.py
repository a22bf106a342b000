"""transformers while metalcore records: its models take the branches that they have for captures of CUDA graphs.

Those read no values on the host. So masks of padding and of packed sequences are always written out on the device, from
what each replay is given, and never left out because one batch has no padding.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator

from .patches import Patch

__all__ = ["as_captured", "reads_nothing"]

_MODULE, _ASKED = "transformers.utils.import_utils", "is_cuda_stream_capturing"


def reads_nothing() -> bool:
    """Returns whether transformers takes the branches that read no values on the host: while it is traced or
    captured."""
    is_tracing = getattr(sys.modules.get(_MODULE), "is_tracing", None)
    return is_tracing is not None and is_tracing()


@contextlib.contextmanager
def as_captured() -> Iterator[None]:
    """Inside the block transformers takes this thread to capture a CUDA graph. It matters only if transformers has been
    imported."""
    module = sys.modules.get(_MODULE)
    if not hasattr(module, _ASKED):
        yield
        return
    patch, thread = Patch(module, _ASKED), threading.get_ident()
    patch.install(lambda: patch.on and threading.get_ident() == thread or patch.original())
    try:
        yield
    finally:
        patch.remove()
