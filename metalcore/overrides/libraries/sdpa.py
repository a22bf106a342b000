"""transformers' attention "sdpa", with its mask function: on `mps` it is metalcore's. On `cuda` metalcore takes the
calls that PyTorch has no fast kernel for: those with windows, packed sequences, padding, soft caps and sinks. All
others stay PyTorch's."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch

from ... import _C
from ..._core.environment import after_import, require_transformers
from ..._core.operators import needs_gradient
from ..._core.routing import accelerated
from .. import _report, _switches
from .kinds import Kind
from .patches import run_counted

__all__ = ["TransformersSdpa"]

_NAME = "scaled_dot_product_attention"
_ONLY_OURS = {"softcap", "s_aux", "sinks", "cache"}


def _takes_on_mps(tensors, mask, is_band, options):
    # PyTorch's function has an override, which leaves the calls that PyTorch has a kernel for.
    return _NAME not in _switches.UNASKED or mask is not None or bool(options.keys() & _ONLY_OURS)


def _takes_on_cuda(tensors, mask, is_band, options):
    """Returns whether metalcore is faster: PyTorch's kernels read masks that are written out, and compute all of their
    scores. Gradients of padded tokens are slower here."""
    if tensors[0].dtype not in _IN_16_BITS or _C.gpu_family("cuda") != "hopper":
        return False
    if any(options.get(name) is not None for name in ("softcap", "s_aux", "sinks")):
        return True
    return is_band and (mask.padding is None or not any(map(needs_gradient, tensors)))


# By the type of device, whether metalcore takes a call with this query, key and value. The mask may be one of
# masks.Mask, a band.
_TAKES = {"mps": _takes_on_mps, "cuda": _takes_on_cuda}
_IN_16_BITS = (torch.float16, torch.bfloat16)


class TransformersSdpa(Kind):
    """The entries "sdpa" of transformers' attention and mask functions."""

    def __init__(self):
        super().__init__((_NAME,))

    def begin(self):
        _register_name()

    def meet_class(self, cls):
        models: Any = sys.modules.get("transformers.modeling_utils")
        if self.patches or not hasattr(models, "AttentionInterface"):
            return
        from .attention import attention_forward
        from .masks import Mask, mask

        counts = {device: _report.count_of(_NAME, f"transformers' sdpa on {device}") for device in _TAKES}

        def forward(module, query, key, value, *args, **kwargs):
            def by_metalcore():
                if accelerated(query, key, value) and kwargs.get("cache") is None:
                    return attention_forward(module, query, key, value, *args, **kwargs)

            original = functools.partial(entries[0].original, module, query, key, value, *args, **kwargs)
            mask = args[0] if args else kwargs.get("attention_mask")
            device = query.device.type
            if device in _TAKES and _TAKES[device]((query, key, value), mask, isinstance(mask, Mask), kwargs):
                return run_counted(counts[device], by_metalcore, original)
            return original()

        def mask_of(*args, device="cpu", **kwargs):
            make = mask if torch.device(device).type in _TAKES else entries[1].original
            return make(*args, device=device, **kwargs)

        masks: Any = sys.modules["transformers.masking_utils"]
        entries = (Entry(models.AttentionInterface, forward), Entry(masks.AttentionMaskInterface, mask_of))
        self.patches.update(enumerate(entries))


@functools.cache
def _register_name():
    """Makes attn_implementation="metalcore" known, as patch() does, before a model is made that has it."""

    def register():
        try:
            require_transformers("metalcore's attention")
        except ImportError:  # an older one, whose masks have other arguments
            return
        from .attention import register

        register()

    after_import("transformers.modeling_utils", register)


class Entry:
    """A function in place of the entry "sdpa" of an interface."""

    def __init__(self, interface, function):
        self.entries, self.function = interface._global_mapping, function
        self.original = self.entries["sdpa"]
        self.entries["sdpa"] = function

    def remove(self):
        if self.entries.get("sdpa") is self.function:
            self.entries["sdpa"] = self.original
