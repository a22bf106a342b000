"""Keys and values of a model that generates, in tensors whose places do not change, and the attention that reads them.

A step's row numbers, lengths and masks are tensors on the device, which the step itself changes. So a step needs
nothing of the host, which may be a step ahead, and can replay one step's CUDA graph for all.

Layers that are not attention, such as gated delta rules, have states of one size. transformers' own layers keep them,
and write them in place.

The attention is attn_implementation="metalcore_generation". While a prompt is read it is that of "metalcore". Then
there is one query for each row, and what it sees is kept on the device from step to step, so that no mask is written
and the host waits for none.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, cache_utils, masking_utils
from transformers.cache_utils import Cache, CacheLayerMixin

from .._core.environment import require_transformers
from ..overrides.libraries import masks
from ..overrides.libraries.attention import attention_forward
from ..overrides.libraries.masks import Band, Mask
from ..paged import PagedKVCache, append_kv, batch_decode
from ._prefix import Prefix

__all__ = ["NAME", "KeysAndValues", "PagedKeysAndValues", "StaticKeysAndValues", "attending", "known_layers"]

_WITH_KEYS = "DynamicLayer", "DynamicSlidingWindowLayer"
_WITH_BOTH = "LinearAttentionAndFullAttentionLayer", "LinearAttentionAndSlidingWindowAttentionLayer"
_WITH_STATES = ("LinearAttentionLayer",)  # older versions of transformers have none of these


def known_layers(model: Any, accepted: Any) -> list[Any] | None:
    """Returns the layers of transformers' cache for a model whose forward has the arguments `accepted`, or None if ours
    cannot be in the place of some."""
    layers = DynamicCache(config=model.config).layers
    names = {*_WITH_KEYS, *_WITH_BOTH, *_WITH_STATES}
    if getattr(model.config.get_text_config(decoder=True), "kv_sharing_modes", None) is None:
        names.add("DummyLayer")  # of layers that keep nothing, and not of those that read another one's keys
    if not layers or any(type(layer).__name__ not in names for layer in layers):
        return None
    if not any(isinstance(layer, CacheLayerMixin) for layer in layers):
        return layers
    settable = getattr(type(model), "_can_set_attn_implementation", lambda: False)()
    return layers if settable and "position_ids" in accepted else None


class KeysAndValues(Cache):
    """transformers' Cache for rows of prompts padded on their left, and the tokens after them.

    Args:
        layers: the model's, as transformers' own cache has them.
        seen: bool (rows, tokens of the prompts), False for padding.
        length: the most tokens that a row of the cache has.

    Attributes:
        attention: the layers that have keys and values.
        reading: whether the prompts are being read, and not one token of each row.
        read_from: the column of the prompts where that begins: keys and values of those before it are there.
        place: int64 (1,): which column the next tokens are in.
        seen: bool (rows, length): which columns hold tokens that a query sees.
    """

    def __init__(self, layers: list[Any], seen: Tensor, length: int, layer: type[CacheLayerMixin]):
        self.attention: list[Any] = []
        own_layers: list[Any] = []
        for own in layers:
            if isinstance(own, CacheLayerMixin):
                cls: Any = _with_states(layer) if type(own).__name__ in _WITH_BOTH else layer
                own = cls(self, len(self.attention), getattr(own, "number_of_states", 0))
                self.attention.append(own)
            own_layers.append(own)
        super().__init__(layers=own_layers)
        self.reading, self.length = True, length
        self.read_from = 0
        rows, prompt = seen.shape
        self.place = torch.full((1,), prompt, device=seen.device)
        self.seen = seen.new_zeros(rows, length)
        self.seen[:, :prompt] = seen

    def advance(self) -> None:
        """Makes room for the next token of each row, at `place`."""
        self.seen.index_fill_(1, self.place, True)

    def mask(self, band: Band | None, function: Any, **options) -> Tensor:
        """Returns what the query at `place` sees, for attention that writes keys in the band."""
        raise NotImplementedError

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options) -> tuple:
        """Computes what an attention function of transformers does, for one query of each row."""
        raise NotImplementedError


class _Layer(CacheLayerMixin):
    is_sliding = False

    def __init__(self, cache: KeysAndValues, index: int, states: int):
        """index: of the layers that have keys and values."""
        super().__init__()
        self.cache, self.index = cache, index

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return (self.cache.read_from + query_length if self.cache.reading else self.cache.length), 0

    def get_seq_length(self) -> int:
        return self.cache.read_from if self.cache.reading else 0  # later steps ask `mask`

    def get_max_length(self) -> int:
        return self.cache.length


class _StaticLayer(_Layer):
    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = (
            x.new_zeros(*x.shape[:2], self.cache.length, x.shape[3]) for x in (key_states, value_states)
        )
        self.is_initialized = True
        if self.cache.prefix is not None:  # pyright: ignore[reportAttributeAccessIssue]
            self.cache.prefix.copy(self.index, self.keys, self.values)  # pyright: ignore[reportAttributeAccessIssue]

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys, values = self.keys, self.values
        assert keys is not None and values is not None
        if self.cache.reading:
            begin = self.cache.read_from
            end = begin + key_states.shape[2]
            keys[:, :, begin:end] = key_states
            values[:, :, begin:end] = value_states
            return (key_states, value_states) if begin == 0 else (keys[:, :, :end], values[:, :, :end])
        keys.index_copy_(2, self.cache.place, key_states)
        values.index_copy_(2, self.cache.place, value_states)
        return keys, values


@functools.cache
def _with_states(layer):
    """Returns a class of layers that have states of one size beside the keys and values of `layer`."""
    kept = cache_utils.LinearAttentionLayer

    class Both(layer, kept):
        def __init__(self, cache, index, states):
            layer.__init__(self, cache, index, 0)
            kept.__init__(self, states)

        def lazy_initialization(self, *args, **kwargs):  # states come as keyword arguments
            (layer if args else kept).lazy_initialization(self, *args, **kwargs)

    return Both


class StaticKeysAndValues(KeysAndValues):
    """One tensor (rows, heads, length, size) of each layer's keys, and one of its values.

    Args:
        prefix: the part of the prompts whose keys and values are known.
    """

    def __init__(self, layers: list[Any], seen: Tensor, length: int, prefix: Prefix | None = None):
        super().__init__(layers, seen, length, _StaticLayer)
        self.prefix, self.read_from = prefix, 0 if prefix is None else prefix.columns
        self.columns = torch.arange(length, device=seen.device)

    def mask(self, band: Band | None, function: Any, **options) -> Tensor:
        if band is None or band.sequences is not None:
            options |= {"attention_mask": self.seen, "allow_is_causal_skip": False, "device": self.seen.device}
            rows = self.seen.shape[0]
            return masking_utils.sdpa_mask(rows, 1, self.length, self.place, 0, function, **options)  # pyright: ignore
        seen = self.seen
        if 0 <= band.left < self.length - 1:
            seen = seen & (self.columns >= self.place - band.left)
        return seen[:, None, None, :]

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options) -> tuple:
        return attention_forward(module, query, key, value, mask, **options)


class _PagedLayer(_Layer):
    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        self.is_initialized = True
        self.cache.write(self.index, key_states, value_states)  # pyright: ignore[reportAttributeAccessIssue]
        return key_states, value_states


class PagedKeysAndValues(KeysAndValues):
    """Pages of a pool, which rows of different lengths share. Each row has its pages from the beginning.

    Args:
        lengths: the tokens of each row's prompt.
        new: how many tokens each row gets.
        pool: where the pages are, or None for a pool made for these rows.
    """

    def __init__(
        self,
        layers: list[Any],
        seen: Tensor,
        length: int,
        lengths: list[int],
        new: int,
        pool: PagedKVCache | None,
    ):
        super().__init__(layers, seen, length, _PagedLayer)
        self.prompts, self.new, self.pool = lengths, new, pool
        self.rows: list[int] = []
        self.layer = 0
        self.held = torch.tensor(lengths, dtype=torch.int32).to(seen.device)
        self.requests = torch.arange(len(lengths), dtype=torch.int32, device=seen.device)
        self.indptr = torch.zeros(len(lengths) + 1, dtype=torch.int32, device=seen.device)

    def _take_pages(self, key: Tensor) -> PagedKVCache:
        """Returns the pool, whose heads and sizes the first keys tell."""
        layers, (heads, size), ends = len(self.attention), key.shape[1::2], [n + self.new for n in self.prompts]
        if self.pool is None:
            pages = sum(-(-end // PAGE_SIZE) for end in ends)
            self.pool = PagedKVCache(
                pages, PAGE_SIZE, heads, size, layers=layers, dtype=key.dtype, device=key.device, kv_layout="NHD"
            )
        pool = self.pool
        if pool.data.shape[0] < layers:
            raise ValueError(f"generate: the cache has {pool.data.shape[0]} layers, and the model has {layers}")
        rows = [pool.allocate() for _ in ends]
        try:
            table = pool.reserve(rows, ends)
        except RuntimeError:
            for row in rows:
                pool.free(row)
            raise
        self.rows = rows
        counts = [-(-end // pool.page_size) for end in ends]
        self.most = max(counts)
        all_pages, at = torch.zeros(len(rows), self.most, dtype=torch.int32), 0
        indices = table.kv_indices.cpu()
        for row, count in enumerate(counts):
            all_pages[row, :count] = indices[at : at + count]
            at += count
        self.all_pages = all_pages.to(key.device)
        self.page_columns = torch.arange(self.most, dtype=torch.int32, device=key.device)
        self._count_pages()
        return pool

    def _count_pages(self):
        """Writes the table of the pages that hold the first `held` tokens of each row."""
        size = self.pool.page_size  # pyright: ignore[reportOptionalMemberAccess]
        counts = (self.held + (size - 1)) // size
        self.indptr[1:] = counts.cumsum(0)
        self.last = self.held - (counts - 1) * size
        if len(self.prompts) == 1:
            self.indices = self.all_pages[0]
        else:  # pages in use first, row by row
            unused = (self.page_columns >= counts[:, None]).flatten().to(torch.uint8)
            self.indices = self.all_pages.flatten()[unused.argsort(stable=True)]

    def release(self) -> None:
        """Gives the rows' pages back to the pool."""
        while self.rows:
            self.pool.free(self.rows.pop())  # pyright: ignore[reportOptionalMemberAccess]

    def advance(self) -> None:
        self.held.add_(1)
        self._count_pages()

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Writes keys and values (rows, heads, tokens, size): the prompts', or the next token's of each row."""
        if key.shape != value.shape:
            sizes = f"{key.shape[3]} and {value.shape[3]}"
            raise ValueError(f'generate: cache="paged" is for keys and values of one size, and the model has {sizes}')
        pool = self.pool if self.rows else self._take_pages(key)
        assert pool is not None
        heads = pool.data.shape[4 if pool.kv_layout == "NHD" else 3], pool.data.shape[5]
        if heads != key.shape[1::2]:
            has, of_model = (f"{count} heads of {size}" for count, size in (heads, key.shape[1::2]))
            raise ValueError(f"generate: the pages have {has}, and layer {layer} of the model has {of_model}")
        self.layer, tokens = layer, key.shape[2]
        requests, places = self.requests, self.held - 1
        if self.reading:
            places = self.seen[:, :tokens].cumsum(1, dtype=torch.int32) - 1
            requests = torch.where(places < 0, -1, self.requests[:, None]).flatten()
            places = places.clamp(min=0).flatten()
        key, value = (x.transpose(1, 2).flatten(0, 1) for x in (key, value))
        append_kv(
            key,
            value,
            pool.layer(layer),
            self.indptr,
            self.indices,
            self.last,
            batch_indices=requests,
            positions=places,
            kv_layout=pool.kv_layout,
        )

    def mask(self, band: Band | None, function: Any, **options) -> Tensor:
        if band is None or band.sequences is not None:
            raise ValueError('generate: cache="paged" is for causal attention, with windows at most')

        def write():
            raise ValueError('generate: cache="paged" is for models that leave their mask to the attention function')

        return Mask((self.seen.shape[0], 1, 1, self.length), self.seen.device, band, 0, None, write)

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options) -> tuple:
        if options.get("position_bias") is not None:
            raise ValueError('generate: cache="paged" has no position_bias')
        pool = self.pool
        assert pool is not None
        result: Any = batch_decode(
            query[:, :, 0],
            pool.layer(self.layer),
            self.indptr,
            self.indices,
            self.last,
            kv_layout=pool.kv_layout,
            window=(mask.band.left, -1),
            softcap=options.get("softcap") or 0.0,
            scale=options.get("scaling"),
            sinks=options.get("s_aux"),
        )
        return result[:, None], None


PAGE_SIZE = 16
NAME = "metalcore_generation"


class _Active(threading.local):
    cache: KeysAndValues | None = None


_active = _Active()
_lock = threading.Lock()
_users: dict[int, tuple[Any, int]] = {}  # of a configuration: its implementation before, and the contexts that last


@contextlib.contextmanager
def attending(model: Any, cache: KeysAndValues):
    """Makes this the model's attention, which reads this cache, while the context lasts.

    All threads share the model's configuration, so the last context that ends gives it back.
    """
    config, outer = model.config, _active.cache
    with _lock:
        before, count = _users.get(id(config), (config._attn_implementation, 0))
        _users[id(config)] = before, count + 1
        config._attn_implementation = NAME
    _active.cache = cache
    try:
        yield
    finally:
        _active.cache = outer
        with _lock:
            before, count = _users.pop(id(config))
            if count > 1:
                _users[id(config)] = before, count - 1
            else:
                config._attn_implementation = before


def register() -> None:
    """Makes transformers know the implementation."""
    library = require_transformers("metalcore.generation")
    library.AttentionInterface.register(NAME, _forward)
    library.AttentionMaskInterface.register(NAME, _mask)


def _forward(module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options):
    cache = _active.cache
    if cache is not None and not cache.reading:
        return cache.attend(module, query, key, value, attention_mask, **options)
    return attention_forward(module, query, key, value, attention_mask, **options)


def _mask(batch_size, q_length, kv_length, q_offset=0, kv_offset=0, mask_function: Any = None, **options):
    cache = _active.cache
    if cache is None or cache.reading:
        return masks.mask(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, **options)
    return cache.mask(masks.read(mask_function), mask_function, **options)
