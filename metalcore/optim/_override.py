"""The class that replaces torch.optim.AdamW under enable_pytorch_overrides("adamw")."""

from __future__ import annotations

from ..overrides._report import count_of
from .adamw import AdamW

__all__ = ["OverrideAdamW"]


class OverrideAdamW(AdamW):
    """metalcore.optim.AdamW in the place of torch.optim.AdamW. Its state has torch's dtypes, so that it needs no more
    memory, and torch can load its checkpoints."""

    moments_dtype = None  # the parameter's dtype

    def _step_by_kernel(self, group, params, grads):
        _count().run(super()._step_by_kernel, group, params, grads)

    def _step_by_torch(self, group):
        _count().left["parameters on a device, or of a dtype or kind, that its kernel does not take"] += 1
        super()._step_by_torch(group)


def _count():
    return count_of("adamw", "torch.optim.AdamW")
