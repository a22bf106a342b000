"""accelerate, and with it transformers' Trainer, on `mps` devices of several ranks."""

from __future__ import annotations

import functools
import os
import sys
import warnings

from .._core.environment import after_import

__all__ = ["register"]

_STATE = "accelerate.state"


def register() -> None:
    """Makes accelerate warn where it leaves each of several processes on `mps` to train a model of its own."""
    after_import(_STATE, _watch)


def _watch() -> None:
    state = sys.modules[_STATE].PartialState
    make = state.__init__

    @functools.wraps(make)
    def initialize(self, *arguments, **options):
        make(self, *arguments, **options)
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        if ranks > 1 and self.device.type == "mps" and self.distributed_type == "NO":
            warnings.warn(
                f"accelerate takes mps for a single device: each of the {ranks} ranks would train by itself. With the "
                "variable ACCELERATE_TORCH_DEVICE=mps and accelerate.PartialState(cpu=True), or "
                "TrainingArguments(use_cpu=True), ranks exchange by way of the CPU and compute on mps",
                stacklevel=2,
            )

    state.__init__ = initialize
