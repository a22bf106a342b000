"""What steps the optimizers of torch.optim under enable_pytorch_overrides()."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._multi_tensor import MultiTensor
from .adamw import AdamW
from .muon import Muon
from .sgd import SGD

__all__ = ["OverrideAdamW", "OverrideMuon", "OverrideSGD"]

LEFT = "parameters on a device, or of a dtype or kind, that its kernel does not take"


_Base = MultiTensor if TYPE_CHECKING else object


class Override(_Base):
    """Steps an optimizer of torch.optim, whose class, attributes and checkpoints stay as they are. Its state has
    torch's dtypes. Counts which steps the kernel took."""

    __slots__ = ("_count",)

    @classmethod
    def step_of(cls, optimizer, count, closure=None):
        """Runs MultiTensor.step() for an optimizer of PyTorch's class, counted by an override's `count`."""
        stepper = object.__new__(cls)
        stepper.__dict__ = optimizer.__dict__  # the same state, groups and hooks, for as long as the step takes
        stepper._count = count  # a slot, beside that dictionary
        return MultiTensor.step(stepper, closure)

    def _step_by_kernel(self, group, params, grads):
        self._count.run(super()._step_by_kernel, group, params, grads)

    def _step_by_torch(self, group):
        self._count.left[LEFT] += 1
        super()._step_by_torch(group)


class OverrideAdamW(Override, AdamW):
    """metalcore.optim.AdamW in the place of torch.optim.AdamW."""


class OverrideSGD(Override, SGD):
    """metalcore.optim.SGD in the place of torch.optim.SGD."""


class OverrideMuon(Override, Muon):
    """metalcore.optim.Muon in the place of torch.optim.Muon."""
