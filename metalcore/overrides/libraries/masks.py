"""The masks of transformers' models as what attention kernels take: bands, padded keys and packed sequences.

transformers builds a mask from functions of indices (transformers.masking_utils). `mask` reads them, and returns a
`Mask`, a tensor that is written out only if something other than metalcore's attention looks into it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from transformers import masking_utils

from .patches import reads_nothing, subclasses

__all__ = ["Band", "Mask", "mask"]


class Band(NamedTuple):
    """Which keys a query sees: those from `left` keys before its own position to `right` keys behind it. -1 stands for
    no limit.

    Attributes:
        sequences: the number of the sequence that each token belongs to, (batch, length), or None. A query sees keys
            of its own sequence only.
    """

    left: int = -1
    right: int = -1
    sequences: Tensor | None = None

    def both(self, other: Band) -> Band | None:
        """Returns what two bands have in common."""
        if self.sequences is not None and other.sequences is not None:
            return None
        sequences = self.sequences if other.sequences is None else other.sequences
        return Band(_narrower(self.left, other.left), _narrower(self.right, other.right), sequences)


def _narrower(a, b):
    return max(a, b) if min(a, b) < 0 else min(a, b)


def read(function) -> Band | None:
    """Returns the band that one of transformers' mask functions draws, or None for another shape."""
    if function is masking_utils.causal_mask_function:
        return Band(right=0)
    if function is masking_utils.bidirectional_mask_function:
        return Band()
    if getattr(function, "__module__", None) != masking_utils.__name__:
        return None
    maker, inner = function.__qualname__.partition(".")[0], inspect.getclosurevars(function).nonlocals
    if maker == "sliding_window_overlay":
        return Band(left=inner["sliding_window"] - 1)
    if maker == "sliding_window_bidirectional_overlay":
        return Band(inner["sliding_window"], inner["sliding_window"])
    if maker == "packed_sequence_mask_function":
        return Band(sequences=inner["packed_sequence_mask"])
    if maker == "remap_positions_for_packed_sequence":  # positions in a sequence differ as places in the row do
        return read(inner["mask_function"])
    if maker == "and_masks":
        bands = [read(part) for part in inner["mask_functions"]]
        return functools.reduce(lambda a, b: a and b and a.both(b), bands)
    return None


class Mask(Tensor):
    """A bool mask (batch, 1, queries, keys) that stands for a band.

    Attributes:
        band: a Band.
        shift: query i is at the position of key i + shift.
        padding: bool (batch, keys), False where no query sees a key, or None.
    """

    band: Band
    shift: int
    padding: Tensor | None
    _write: Callable[[], Tensor]
    _written: Tensor | None

    @staticmethod
    def __new__(cls, shape, device, band, shift, padding, write):
        mask: Any = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        mask.band, mask.shift, mask.padding, mask._write, mask._written = band, shift, padding, write, None
        return mask

    def written(self) -> Tensor:
        """Returns the mask as an ordinary tensor."""
        tensor = self._written
        if tensor is None:
            tensor = self._written = self._write()
        return tensor

    @functools.cached_property
    def packed(self) -> tuple[Tensor, int]:
        """Where sequences begin if all rows of the batch follow each other, with the end (int32), and the length of
        the longest one."""
        ids: Any = self.band.sequences
        ids = ids.expand(self.shape[0], -1)
        first = torch.ones_like(ids[:, :1], dtype=torch.bool)
        starts = torch.cat([first, ids.diff(dim=-1) != 0], -1).flatten().nonzero().flatten()
        bounds = torch.cat([starts, starts.new_tensor([ids.numel()])]).to(torch.int32)
        return bounds, int(bounds.diff().max())

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # pyright: ignore[reportIncompatibleMethodOverride]
        args, kwargs = tree_map_only(cls, Mask.written, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self, **options):
        return f"Mask({tuple(self.shape)}, {self.band}, shift={self.shift})"


def mask(
    batch_size,
    q_length,
    kv_length,
    q_offset=0,
    kv_offset=0,
    mask_function=masking_utils.causal_mask_function,
    attention_mask=None,
    allow_is_causal_skip=True,
    allow_is_bidirectional_skip=False,
    device="cpu",
    **options,
) -> Tensor | None:
    """Returns the mask for `attn_implementation="metalcore"`, with the arguments of
    transformers.masking_utils.sdpa_mask, whose result it stands for. It is None where causal attention, or none of the
    queries' keys, needs no mask."""
    writer = masking_utils.eager_mask if _adds_masks(type(options.get("config"))) else masking_utils.sdpa_mask
    write = functools.partial(
        writer,
        batch_size,
        q_length,
        kv_length,
        q_offset,
        kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        device=device,
        **options,
    )
    # One query's mask is small, and a compiled decoding step takes no Mask.
    skipped = q_length == 1 or _traced(attention_mask) or writer is masking_utils.eager_mask
    band = None if skipped else read(mask_function)
    shift = 0 if band is None else int(q_offset) - kv_offset
    if band is None or not _placed(band, shift, q_length, kv_length):
        return write(allow_is_causal_skip=allow_is_causal_skip, allow_is_bidirectional_skip=allow_is_bidirectional_skip)
    if band.left >= max(shift + q_length, kv_length) - 1:  # no key is so far away
        band = band._replace(left=-1, right=-1 if band.right == band.left else band.right)
    padding = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is not None:
        padding = padding[:, kv_offset : kv_offset + kv_length]
        seen = min(kv_length, shift + q_length) if band.right == 0 else kv_length
        if not reads_nothing() and padding[:, :seen].all():
            padding = None
    if padding is None and band.left < 0 and band.sequences is None:
        causal = band.right == 0 and allow_is_causal_skip and shift == 0
        if causal and _knows_sdpa(type(options.get("config"))) or band.right < 0 and allow_is_bidirectional_skip:
            return None
    write = functools.partial(write, allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    return Mask((batch_size, 1, q_length, kv_length), device, band, shift, padding, write)


def _placed(band, shift, q_length, kv_length):
    """Returns whether a kernel's band, which begins at the first key or ends at the last one, can be put at this shift.
    After the band of causal attention, keys can be left out."""
    if shift == 0 or band.left < 0 and band.right < 0:
        return True
    return shift == kv_length - q_length or band.right == 0 and 0 < shift < kv_length - q_length


def _models_of(config_class):
    base = import_module("transformers.modeling_utils").PreTrainedModel  # whose import may wait for this module's
    return [cls for cls in subclasses(base) if cls.config_class is config_class]


@functools.cache
def _adds_masks(config_class) -> bool:
    """Returns whether the models of a configuration have no attention except eager. Their own code may then expect a
    mask of numbers, also where one is not needed."""
    models = _models_of(config_class)
    return bool(models) and not any(
        cls._supports_sdpa or cls._supports_flash_attn or cls._supports_flex_attn for cls in models
    )


@functools.cache
def _knows_sdpa(config_class) -> bool:
    """Returns whether the layers of a configuration's models say by `is_causal` that they are causal, as sdpa needs it.
    A decoder without sdpa may not (PEGASUS-X), and its mask alone tells."""
    models = _models_of(config_class)
    return not models or any(cls._supports_sdpa for cls in models)


def _traced(attention_mask):
    return (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or torch._C._are_functorch_transforms_active()
        or attention_mask is not None
        and type(attention_mask) is not Tensor
    )
