"""transformers' attention "sdpa" on `mps`: with its mask function, it is metalcore's. Elsewhere it stays PyTorch's."""

from __future__ import annotations

import sys
from typing import Any

import torch

from .._core.routing import accelerated
from ..overrides import _report
from ._kinds import Kind
from ._patches import run_counted

__all__ = ["TransformersSdpa"]

_NAME = "scaled_dot_product_attention"


class TransformersSdpa(Kind):
    """The entries "sdpa" of transformers' attention and mask functions."""

    def __init__(self):
        super().__init__((_NAME,))

    def meet_class(self, cls):
        models: Any = sys.modules.get("transformers.modeling_utils")
        if self.patches or not hasattr(models, "AttentionInterface"):
            return
        from ._attention import attention_forward
        from ._masks import mask

        count = _report.count_of(_NAME, "transformers' sdpa on mps")

        def forward(module, query, key, value, *args, **kwargs):
            def taken():
                if query.is_mps and accelerated(query, key, value) and kwargs.get("cache") is None:
                    return attention_forward(module, query, key, value, *args, **kwargs)

            return run_counted(count, taken, lambda: entries[0].original(module, query, key, value, *args, **kwargs))

        def mask_of(*args, device="cpu", **kwargs):
            make = mask if torch.device(device).type == "mps" else entries[1].original
            return make(*args, device=device, **kwargs)

        masks: Any = sys.modules["transformers.masking_utils"]
        entries = (Entry(models.AttentionInterface, forward), Entry(masks.AttentionMaskInterface, mask_of))
        self.patches.update(enumerate(entries))


class Entry:
    """A function in place of the entry "sdpa" of an interface."""

    def __init__(self, interface, function):
        self.entries, self.function = interface._global_mapping, function
        self.original = self.entries["sdpa"]
        self.entries["sdpa"] = function

    def remove(self):
        if self.entries.get("sdpa") is self.function:
            self.entries["sdpa"] = self.original
