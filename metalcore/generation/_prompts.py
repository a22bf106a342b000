"""Prompts as a tensor of tokens, each row padded on its left."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from operator import index
from typing import Any

import torch
from torch import Tensor

from .._core.routing import require_tensors

__all__ = ["padded_left"]


def padded_left(
    tokens: Any, attention_mask: Tensor | None, device: torch.device, vocabulary: int
) -> tuple[Tensor, Tensor, list[int]]:
    """Returns (tokens (rows, length), which of them are no padding, how many of each row are none), on the device.

    Args:
        vocabulary: how many tokens the model knows.

    Raises:
        TypeError: the mask is no tensor.
        ValueError: there is no token in a row, the mask has another shape, the tokens are no integers, or on the CPU
            some are unknown. The host does not wait for tokens on a device.
    """
    if not isinstance(tokens, Tensor):
        tokens, attention_mask = _from_lists(tokens, attention_mask, vocabulary)
    require_tensors("generate", optional=True, attention_mask=attention_mask)
    if tokens.dim() == 1:
        tokens = tokens[None]
        attention_mask = None if attention_mask is None else attention_mask.reshape(1, -1)
    if 0 in tokens.shape:
        raise ValueError("generate: the prompt is empty; it needs a token at least, such as the model's bos_token_id")
    if tokens.dim() != 2 or tokens.is_floating_point() or tokens.dtype == torch.bool:
        raise ValueError(f"generate: tokens must be integers (rows, length), not {tokens.dtype} {tuple(tokens.shape)}")
    if tokens.device.type == "cpu":
        _require_known(tokens[(tokens < 0) | (tokens >= vocabulary)].tolist(), vocabulary)
    seen = torch.ones_like(tokens, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
    if seen.shape != tokens.shape:
        raise ValueError(f"generate: attention_mask is {tuple(seen.shape)}, and tokens are {tuple(tokens.shape)}")
    seen = seen.cpu()
    lengths = seen.sum(1).tolist()
    if min(lengths) == 0:
        raise ValueError("generate: the prompt of a row is empty: it has no token that is not padding")
    tokens = tokens.to(device, torch.int64)
    length = max(lengths)
    order = seen.to(torch.uint8).argsort(dim=1, stable=True)[:, -length:]  # padding first, and the rest in its order
    if length < seen.shape[1] or not seen.all():
        tokens = tokens.gather(1, order.to(device))
    return tokens, seen.gather(1, order).to(device), lengths


def _require_known(unknown, vocabulary):
    if unknown:
        raise ValueError(f"generate: the model knows the tokens 0 to {vocabulary - 1}, and not {unknown[0]}")


def _from_lists(tokens, attention_mask, vocabulary):
    try:
        rows = list(tokens)
        if rows and not isinstance(rows[0], (Sequence, Tensor)):
            rows = [rows]
        rows = [[index(token) for token in row] for row in rows]
    except TypeError:
        raise ValueError(f"generate: tokens must be integers or rows of them, not {reprlib.repr(tokens)}") from None
    if attention_mask is not None:
        raise ValueError("generate: attention_mask goes with a tensor of tokens; lists need no padding")
    _require_known([token for row in rows for token in row if not 0 <= token < vocabulary], vocabulary)
    length = max((len(row) for row in rows), default=0)
    numbers = [[0] * (length - len(row)) + row for row in rows]
    seen = [[False] * (length - len(row)) + [True] * len(row) for row in rows]
    shape = (len(rows), length)
    return torch.tensor(numbers).view(shape).long(), torch.tensor(seen, dtype=torch.bool).view(shape)
