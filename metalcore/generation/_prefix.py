"""Keys and values that one call of generate leaves for the next."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

from torch import Tensor

__all__ = ["Prefix", "PrefixCache"]


class PrefixCache:
    """A cache of what a model has read and written: a later call of `generate` or `stream` with prompts that begin
    alike goes on from there, and reads the rest alone. It is given to each call as `cache`.

    It has the keys and values of the last call, of every row. A row of the next call takes them from the row whose
    tokens agree with its own for longest, so several rows can share one beginning that was read once, such as the
    instructions of an assistant. At least one token of a prompt is read. Logits are the same except for the order of
    float32's sums.

    It is of one model, whose weights and adapters must not change meanwhile; `clear` forgets what it has.

    Attributes:
        reused: how many tokens of the last call's prompts were not read, of each row.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(vocab_size=32, hidden_size=32, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
        >>> model, cache = LlamaForCausalLM(LlamaConfig(**sizes)).to("mps").eval(), metalcore.generation.PrefixCache()
        >>> for prompt in ([1, 5, 7], [1, 5, 9]):
        ...     tokens = metalcore.generate(model, [prompt], max_new_tokens=2, eos_token_id=(), cache=cache)
        >>> cache.reused
        [2]
    """

    reused: list[int]

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Gives the memory back."""
        self.reused = []
        self._model: Any = None
        self._layers: list[tuple[Tensor, Tensor]] = []
        self._columns: Tensor | None = None
        self._begins: list[int] = []

    def keep(self, model: Any, layers: list[tuple[Tensor, Tensor]], tokens: Tensor, lengths: list[int]) -> None:
        """Takes what a call leaves.

        Args:
            layers: keys and values (rows, heads, columns, size) of each layer.
            tokens: (rows, columns of which there are keys), padded on the left.
            lengths: the columns of each row that are no padding.
        """
        self._model, self._layers, self._columns = weakref.ref(model), layers, tokens
        self._begins = [tokens.shape[1] - length for length in lengths]

    def match(self, model: Any, tokens: Tensor, lengths: list[int]) -> Prefix | None:
        """Returns what the prompts (rows, length), padded on the left, have in common with what is here, or None.

        Raises:
            ValueError: it is of another model.
        """
        self.reused = [0] * len(lengths)
        if self._columns is None:
            return None
        if self._model() is not model:
            raise ValueError("generate: the PrefixCache holds keys and values of another model; clear() empties it")
        if self._columns.device != tokens.device:  # the model has moved
            return None
        prompt = tokens.shape[1]
        columns = [row[begin:] for row, begin in zip(self._columns.tolist(), self._begins)]
        rows = [row[prompt - length :] for row, length in zip(tokens.tolist(), lengths)]
        matches = [max((_common(row, one), at) for at, one in enumerate(columns)) for row in rows]
        # All rows read as many columns: those that the one with the least in common has to read.
        read = max(len(row) - min(common, len(row) - 1) for row, (common, _) in zip(rows, matches))
        self.reused = [max(0, length - read) for length in lengths]
        if not any(self.reused):
            return None
        parts = [
            _Part(row, self.reused[row], prompt - lengths[row], source, self._begins[source])
            for row, (_, source) in enumerate(matches)
        ]
        return Prefix(prompt - read, parts, self._layers)


class _Part(NamedTuple):
    """Columns of a row that are another one's."""

    row: int
    length: int
    begin: int
    source: int
    source_begin: int


class Prefix(NamedTuple):
    """The beginning of prompts that needs no reading.

    Attributes:
        columns: how many columns of the prompts are not read; those before a row's text are padding.
    """

    columns: int
    parts: list[_Part]
    layers: list[tuple[Tensor, Tensor]]

    def copy(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Writes a layer's keys and values where they are in this call."""
        for source_layer, target in zip(self.layers[layer], (keys, values)):
            for row, length, begin, source, at in self.parts:
                target[row, :, begin : begin + length] = source_layer[source, :, at : at + length]


def _common(one, other):
    """Returns how many elements two lists begin with alike."""
    length = min(len(one), len(other))
    return next((i for i in range(length) if one[i] != other[i]), length)
