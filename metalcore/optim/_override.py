"""The classes that replace those of torch.optim under enable_pytorch_overrides()."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..overrides._report import count_of
from ._multi_tensor import MultiTensor
from .adamw import AdamW
from .muon import Muon
from .sgd import SGD

__all__ = ["OverrideAdamW", "OverrideMuon", "OverrideSGD"]

LEFT = "parameters on a device, or of a dtype or kind, that its kernel does not take"


_Base = MultiTensor if TYPE_CHECKING else object


class Counted(_Base):
    """Counts, of an optimizer in the place of one of torch.optim, which steps its kernel took."""

    OVERRIDE = ""

    def _step_by_kernel(self, group, params, grads):
        self._count().run(super()._step_by_kernel, group, params, grads)

    def _step_by_torch(self, group):
        self._count().left[LEFT] += 1
        super()._step_by_torch(group)

    def _count(self):
        return count_of(self.OVERRIDE.lower(), f"torch.optim.{self.OVERRIDE}")


class OverrideAdamW(Counted, AdamW):
    """metalcore.optim.AdamW in the place of torch.optim.AdamW. Its state has torch's dtypes, so that it needs no more
    memory, and torch can load its checkpoints."""

    OVERRIDE = "AdamW"

    def __init__(self, *args, **options):
        super().__init__(*args, state_dtype=None, **options)  # pyright: ignore[reportArgumentType]


class OverrideSGD(Counted, SGD):
    """metalcore.optim.SGD in the place of torch.optim.SGD."""

    OVERRIDE = "SGD"


class OverrideMuon(Counted, Muon):
    """metalcore.optim.Muon in the place of torch.optim.Muon."""

    OVERRIDE = "Muon"
