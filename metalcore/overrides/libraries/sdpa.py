"""transformers' attention "sdpa" on `mps`: with its mask function, it is metalcore's. Elsewhere it stays PyTorch's."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch

from ..._core.environment import after_import, require_transformers
from ..._core.routing import accelerated
from .. import _report, _switches
from .kinds import Kind
from .patches import run_counted

__all__ = ["TransformersSdpa"]

_NAME = "scaled_dot_product_attention"
_ONLY_OURS = {"softcap", "s_aux", "sinks", "cache"}


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
        from .masks import mask

        count = _report.count_of(_NAME, "transformers' sdpa on mps")

        def forward(module, query, key, value, *args, **kwargs):
            def by_metalcore():
                if accelerated(query, key, value) and kwargs.get("cache") is None:
                    return attention_forward(module, query, key, value, *args, **kwargs)

            original = functools.partial(entries[0].original, module, query, key, value, *args, **kwargs)
            mask_of_call = args[0] if args else kwargs.get("attention_mask")
            if _NAME in _switches.UNASKED and mask_of_call is None and not (kwargs.keys() & _ONLY_OURS):
                return original()  # PyTorch's function, whose override leaves the calls that PyTorch has a kernel for
            return run_counted(count, by_metalcore, original) if query.is_mps else original()

        def mask_of(*args, device="cpu", **kwargs):
            make = mask if torch.device(device).type == "mps" else entries[1].original
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
