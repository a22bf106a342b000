"""Prompts as tensors of tokens, when a row of generated tokens is complete, and tokens as text."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Sequence
from operator import index
from typing import Any

import torch
from torch import Tensor

from .._core.routing import require_tensors

__all__ = ["Stops", "Text", "end_tokens", "padded_left"]


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


_MARGIN = 8  # tokens of a text's end besides those of its last bytes: a token may have none


def end_tokens(model: Any, tokens: int | Iterable[int] | None) -> frozenset[int]:
    """Returns the tokens that end a text: those given, or else the model's."""
    if not hasattr(model, "config"):
        raise TypeError(f"generate: model must be a model of transformers, not {type(model).__name__}")
    if tokens is None:
        for config in (getattr(model, "generation_config", None), model.config):
            tokens = getattr(config, "eos_token_id", None)
            if tokens is not None:
                break
    if tokens is None:
        return frozenset()
    try:
        return frozenset(map(index, tokens))  # pyright: ignore[reportArgumentType]
    except TypeError:
        pass
    try:
        return frozenset([index(tokens)])  # pyright: ignore[reportArgumentType]
    except TypeError:
        raise ValueError(f"generate: eos_token_id must be an integer or several, not {tokens!r}") from None


class Stops:
    """What ends a row: a token of `ends`, or one of `stop`, which are sequences of tokens, or strings.

    Raises:
        ValueError: a string without a tokenizer, a stop without elements, or one of another type.
    """

    def __init__(self, ends: frozenset[int], stop: Iterable[Any], tokenizer: Any):
        try:
            stop = [stop] if isinstance(stop, str) else list(stop)
            self.sequences = [[index(token) for token in one] for one in stop if not isinstance(one, str)]
        except TypeError:
            raise ValueError(f"generate: stop must be strings or sequences of tokens, not {stop!r}") from None
        if any(len(one) == 0 for one in stop):
            raise ValueError("generate: a stop must not be empty")
        self.ends = ends
        self.strings = [one for one in stop if isinstance(one, str)]
        if self.strings and tokenizer is None:
            raise ValueError("generate: stop strings need a tokenizer")
        self.tokenizer = tokenizer
        self.tail = max((len(string.encode()) for string in self.strings), default=0) + _MARGIN

    def __bool__(self) -> bool:
        return bool(self.ends or self.strings or self.sequences)

    def complete(self, tokens: list[int]) -> bool:
        """Returns whether the last of a row's new tokens ends it."""
        if tokens[-1] in self.ends or any(tokens[-len(one) :] == one for one in self.sequences):
            return True
        if not self.strings:
            return False
        text = self.tokenizer.decode(tokens[-self.tail :])
        if any(string in text for string in self.strings):
            return True
        spaced = [string for string in self.strings if string[0].isspace()]
        if not spaced or len(tokens) > self.tail:
            return False
        # SentencePiece's decoders leave out the space before a text's first word: here another word comes first.
        before = self.tokenizer.decode(tokens[:1])
        text = self.tokenizer.decode(tokens[:1] + tokens).removeprefix(before)
        return any(string in text for string in spaced)


class Text:
    """The text of tokens that come one by one. A token may be part of a character, and a space before a word may
    depend on the token before it: tokens are decoded with those of the last word.

    Args:
        tokenizer: of transformers.
    """

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.tokens: list[int] = []
        self.begin = 0  # of the tokens that are decoded together
        self.done = 0  # how many of the tokens are in the text that was returned

    def push(self, token: int) -> str:
        """Returns what a token adds to the text: nothing, while a character is incomplete."""
        self.tokens.append(token)
        return self._new(self._decoded(len(self.tokens)))

    def rest(self) -> str:
        """Returns what is left when no token follows."""
        return self._new(self._decoded(len(self.tokens)), complete=True)

    def _decoded(self, end):
        return self.tokenizer.decode(self.tokens[self.begin : end], skip_special_tokens=True)

    def _new(self, text, complete=False):
        before = self._decoded(self.done)
        if len(text) <= len(before) or text.endswith("\N{REPLACEMENT CHARACTER}") and not complete:
            return ""
        self.begin, self.done = self.done, len(self.tokens)
        return text[len(before) :]
