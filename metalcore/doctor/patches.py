"""What "safe" changes in PyTorch apart from operators."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, cast

import torch

__all__ = ["checkpoints_keep_random_state"]


def checkpoints_keep_random_state(count: Any) -> Callable[[], None]:
    """Gives torch.mps what torch.utils.checkpoint asks a device's module for before it keeps the state of its random
    numbers: `_initialized`, and a context manager `device` that makes a device the current one."""
    module, added = cast(Any, torch.mps), []

    @contextlib.contextmanager
    def device(index):
        count.ran += 1
        yield  # there is one device

    for name, value in (("_initialized", True), ("device", device)):
        if not hasattr(module, name):
            setattr(module, name, value)
            added.append(name)

    def undo():
        for name in added:
            delattr(module, name)

    return undo
