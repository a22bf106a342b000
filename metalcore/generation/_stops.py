"""When a row of generated tokens is complete."""

from __future__ import annotations

from collections.abc import Iterable
from operator import index
from typing import Any

__all__ = ["Stops", "end_tokens"]

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
