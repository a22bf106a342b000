"""The attention of a model that generates: attn_implementation="metalcore_generation".

While a prompt is read it is that of "metalcore". Then there is one query for each row, and what it sees is kept on the
device from step to step, so that no mask is written and the host waits for none.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .._core.libraries import require_transformers

if TYPE_CHECKING:
    from ._caches import KeysAndValues

__all__ = ["NAME", "attending"]

NAME = "metalcore_generation"


class _Active(threading.local):
    cache: KeysAndValues | None = None


_active = _Active()
_lock = threading.Lock()
_users: dict[int, tuple[Any, int]] = {}  # of a configuration: its implementation before, and the contexts that last


@contextlib.contextmanager
def attending(model: Any, cache: KeysAndValues):
    """The model's attention is this while the context lasts, and reads this cache.

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
    from ..overrides.libraries.attention import attention_forward

    cache = _active.cache
    if cache is not None and not cache.reading:
        return cache.attend(module, query, key, value, attention_mask, **options)
    return attention_forward(module, query, key, value, attention_mask, **options)


def _mask(batch_size, q_length, kv_length, q_offset=0, kv_offset=0, mask_function: Any = None, **options):
    from ..overrides.libraries import masks

    cache = _active.cache
    if cache is None or cache.reading:
        return masks.mask(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, **options)
    return cache.mask(masks.read(mask_function), mask_function, **options)
