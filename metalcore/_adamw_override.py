"""The override of torch.optim.AdamW's constructor: what metalcore.overrides says under `adamw`."""

from __future__ import annotations

import functools

import torch

from ._core.routing import accelerated
from ._report import count_of
from .optim import AdamW

__all__ = ["OverrideAdamW", "switch"]

WHAT = "torch.optim.AdamW"


class OverrideAdamW(AdamW):
    """metalcore.optim.AdamW in torch.optim.AdamW's place: its state has torch's dtypes, so that it takes no more memory
    and its checkpoints are torch's."""

    moments_dtype = None  # the parameter's

    def _step_by_kernel(self, *args):
        super()._step_by_kernel(*args)
        count_of("adamw", WHAT).ran += 1

    def _step_by_torch(self, *args):
        count_of("adamw", WHAT).left[
            "parameters on a device, or of a dtype or kind, that its kernel does not take"
        ] += 1
        super()._step_by_torch(*args)


def switch(on: bool) -> None:
    """Makes torch.optim.AdamW(...) choose, or gives its constructor back."""
    adamw = torch.optim.AdamW
    if on and not hasattr(adamw.__init__, "metalcore_original"):
        original = adamw.__init__
        count_of("adamw", WHAT)

        @functools.wraps(original)
        def construct(self, params, *args, **kwargs):
            if type(self) is adamw:
                params = list(params)  # it may be a generator, and is looked at twice
                if _takes_parameters(params):
                    self.__class__ = OverrideAdamW
                    return self.__init__(params, *args, **kwargs)
                count_of("adamw", WHAT).left["made without a parameter that its kernel takes"] += 1
            elif not isinstance(self, AdamW):
                count_of("adamw", WHAT).left[f"{type(self).__qualname__}, a subclass, which may do something else"] += 1
            return original(self, params, *args, **kwargs)

        construct.metalcore_original = original
        adamw.__init__ = construct
    elif not on and hasattr(adamw.__init__, "metalcore_original"):
        adamw.__init__ = adamw.__init__.metalcore_original


def _takes_parameters(params):
    """Whether an optimizer's parameters (tensors, pairs with names, or groups) hold one for metalcore.optim.AdamW,
    which leaves the others to PyTorch."""
    tensors = []
    for entry in params:
        entries = [entry]
        if isinstance(entry, dict) and "params" in entry:
            group = entry["params"]
            entries = entry["params"] = [group] if isinstance(group, torch.Tensor) else list(group)  # or a generator
        tensors += [item[1] if isinstance(item, tuple) else item for item in entries]
    return any(accelerated(tensor) for tensor in tensors)
