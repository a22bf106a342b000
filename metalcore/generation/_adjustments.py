"""What changes a model's logits before a token is drawn: a bias, penalties, and functions of the caller.

All but the caller's functions is kept and computed on the device, in places that do not change: the host sends nothing
and reads nothing for a token, and a captured step can be replayed.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["Adjustments"]


class Adjustments:
    """In this order, as in transformers and vLLM: the bias is added; the repetition penalty divides positive logits,
    and multiplies others, of tokens of the prompt and the text; the presence penalty, and the frequency penalty times
    how often a token is there, are subtracted for tokens of the text; then each processor is called.

    Raises:
        TypeError: a processor cannot be called, or the bias is neither a mapping nor a tensor.
        ValueError: a penalty is no finite number, or the repetition penalty is not positive.
    """

    def __init__(
        self,
        repetition: float,
        presence: float,
        frequency: float,
        bias: Mapping[int, float] | Tensor | None,
        processors: Callable[[Tensor, Tensor], Tensor] | Iterable[Callable[[Tensor, Tensor], Tensor]],
    ):
        self.repetition = _number("repetition_penalty", repetition)
        self.presence, self.frequency = _number("presence_penalty", presence), _number("frequency_penalty", frequency)
        if self.repetition <= 0:
            raise ValueError(f"generate: repetition_penalty must be more than 0, not {repetition!r}")
        if bias is not None and not isinstance(bias, Mapping | Tensor):
            raise TypeError(f"generate: logit_bias must be a mapping or a tensor, not {type(bias).__name__}")
        self.given_bias = None if isinstance(bias, Mapping) and not bias else bias
        # transformers' LogitsProcessorList can be called, and is a list of processors too
        listed = isinstance(processors, Iterable)
        self.processors: list[Any] = list(processors) if listed else [processors]  # pyright: ignore[reportArgumentType]
        for one in self.processors:
            if not callable(one):
                raise TypeError(f"generate: logits_processor must be functions, not {type(one).__name__}")
        self.penalizes = (self.repetition, self.presence, self.frequency) != (1.0, 0.0, 0.0)
        self.any = self.penalizes or self.given_bias is not None or bool(self.processors)

    def begin(self, tokens: Tensor, seen: Tensor, vocabulary: int) -> None:
        """Prepares for prompts (rows, length), and a mask of the tokens that are no padding.

        Raises:
            ValueError: the bias is for a token that the model does not know, is NaN, or has another shape.
        """
        rows, device = len(tokens), tokens.device
        self.bias = _bias(self.given_bias, rows, vocabulary, device)
        if not self.penalizes:
            return
        self.counts = torch.zeros(rows, vocabulary, device=device)
        self.one = torch.ones(rows, 1, device=device)
        self.prompted = None
        if self.repetition != 1:
            times = self.counts.scatter_add(1, tokens, seen.float())
            self.prompted = times > 0

    def count(self, drawn: Tensor) -> None:
        """Takes note of the tokens (rows, 1) that were drawn."""
        if self.penalizes:
            self.counts.scatter_add_(1, drawn, self.one)

    def __call__(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """Returns float32 logits (rows, vocabulary) after the tokens (rows, length), padded on their left."""
        scores = logits.float()
        if self.bias is not None:
            scores = scores + self.bias
        if self.penalizes:
            present = self.counts > 0
            if self.prompted is not None:
                penalized = torch.where(scores < 0, scores * self.repetition, scores / self.repetition)
                scores = torch.where(present | self.prompted, penalized, scores)
            if self.frequency:
                scores = scores - self.counts * self.frequency
            if self.presence:
                scores = scores - present * self.presence
        if self.processors and scores is logits:
            scores = scores.clone()  # a processor may write to what it is given, and the model's logits are read again
        for processor in self.processors:
            scores = _processed(processor, tokens, scores)
        return scores


def _processed(processor, tokens, scores):
    result = processor(tokens, scores)
    name = getattr(processor, "__name__", type(processor).__name__)
    if not isinstance(result, Tensor):
        raise TypeError(f"generate: logits_processor {name} returned no tensor: {type(result).__name__}")
    if result.shape != scores.shape:
        shapes = f"{tuple(result.shape)}, and the logits have {tuple(scores.shape)}"
        raise ValueError(f"generate: logits_processor {name} returned a tensor of shape {shapes}")
    return result


def _number(name, value):
    if not isinstance(value, numbers.Real) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"generate: {name} must be a finite number, not {value!r}")
    return float(value)


def _bias(logit_bias, rows, vocabulary, device):
    if logit_bias is None:
        return None
    if isinstance(logit_bias, Tensor):
        if logit_bias.shape not in ((vocabulary,), (rows, vocabulary)):
            shapes = f"({vocabulary},) or ({rows}, {vocabulary})"
            raise ValueError(f"generate: logit_bias must be of shape {shapes}, not {tuple(logit_bias.shape)}")
        return logit_bias.to(device, torch.float32)
    for token, value in logit_bias.items():
        if type(token) is not int or not 0 <= token < vocabulary:
            raise ValueError(
                f"generate: logit_bias: the model knows the tokens 0 to {vocabulary - 1}, and not {token!r}"
            )
        if not isinstance(value, numbers.Real) or math.isnan(value) or value == math.inf:
            raise ValueError(f"generate: logit_bias of token {token} must be a number or -inf, not {value!r}")
    bias = torch.zeros(vocabulary)
    bias[torch.tensor(list(logit_bias))] = torch.tensor([float(value) for value in logit_bias.values()])
    return bias.to(device)
