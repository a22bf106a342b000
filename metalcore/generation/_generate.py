"""generate and stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..paged import PagedKVCache
from ._adjustments import Adjustments
from ._prefix import PrefixCache
from ._run import Run, Sampling
from ._text import Stops, end_tokens, padded_left

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["generate", "stream"]

Processor = Callable[[Tensor, Tensor], Tensor]


def generate(
    model: PreTrainedModel,
    tokens: Tensor | Iterable[Any],
    attention_mask: Tensor | None = None,
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    generator: torch.Generator | None = None,
    eos_token_id: int | Iterable[int] | None = None,
    stop: str | Iterable[Any] = (),
    tokenizer: PreTrainedTokenizerBase | None = None,
    pad_token_id: int | None = None,
    cache: str | PagedKVCache | PrefixCache = "static",
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    logit_bias: Mapping[int, float] | Tensor | None = None,
    logits_processor: Processor | Iterable[Processor] = (),
    callback: Callable[[list[int | None]], object] | None = None,
    return_logprobs: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Generates new tokens of a causal language model after prompts.

    Tokens are drawn on the device (`metalcore.sample`) and go into the next step there. The host reads them once a step
    where somebody wants to know them: `callback`, or what ends a row. On NVIDIA GPUs the next step is under way then,
    and steps are replayed as one CUDA graph.

    The first call moves packed weights of the model that are multiplied with the same tensor (of queries, keys and
    values, and of gate and up) into one tensor for each layer. The layers' `packed` are parts of it from then on, with
    the same bytes, in the state_dict and in saved files too. Tensors that the caller took from the model before do not
    follow what is later written to it.

    Args:
        model: of transformers, in eval mode: one that takes `past_key_values`, with weights of any kind.
        tokens: integers (rows, length) or (length,), or lists of tokens, of one length or several.
        attention_mask: (rows, length), 0 for padding, on either side or both.
        max_new_tokens: the most tokens of a row.
        temperature, top_k, top_p, min_p, generator: as in `metalcore.sample`. The default, 0, is the most probable
            token.
        eos_token_id: what ends a row: one token or several, by default the model's, and none if it is empty.
        stop: what else ends a row: sequences of tokens, or strings, which need the tokenizer.
        pad_token_id: for rows that ended, by default the model's, or else the first that ends a row, or 0.
        cache: "static": tensors for the longest row. "paged": pages, of a pool made for this call, or a PagedKVCache.
            "dynamic": transformers' own, which models take in any case that share keys among layers. A PrefixCache:
            tensors that the next call with the same beginning goes on from. States of layers that are not attention
            have one size, beside tensors or pages; a PrefixCache has none.
        repetition_penalty: divides positive logits of tokens of the prompt and the text, and multiplies negative ones;
            1 is none. Padding has none.
        presence_penalty, frequency_penalty: subtracted from logits of new tokens that are there, and for each time that
            they are; 0 is none.
        logit_bias: what is added to the logits: numbers by token, of which -inf forbids one, or a tensor (vocabulary,)
            or (rows, vocabulary).
        logits_processor: functions of tokens so far (rows, length), padded on the left, and float32 logits (rows,
            vocabulary), that return logits; transformers' LogitsProcessors are some. They follow bias and penalties,
            and precede temperature. With them, steps are not replayed as a CUDA graph.
        callback: called with each step's tokens, one of each row, and None for rows that ended.
        return_logprobs: return the logarithms of the probabilities that the model gave the tokens.

    Returns:
        int64 (rows, new tokens), with what ended a row, and with return_logprobs also float32 of that shape: before
        temperature and the other options, and 0 for padding.

    Raises:
        TypeError: an option is of a wrong type.
        ValueError: an option is out of its range, or does not go with the model.
        RuntimeError: a pool has too few free pages.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(vocab_size=32, hidden_size=32, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
        >>> model = LlamaForCausalLM(LlamaConfig(**sizes)).to("mps").eval()
        >>> metalcore.generate(model, [[1, 5, 7]], max_new_tokens=4, eos_token_id=()).shape
        torch.Size([1, 4])
    """
    texts = _Texts(
        model,
        tokens,
        attention_mask,
        max_new_tokens,
        Sampling(temperature, top_k, top_p, min_p, generator),
        Adjustments(repetition_penalty, presence_penalty, frequency_penalty, logit_bias, logits_processor),
        Stops(end_tokens(model, eos_token_id), stop, tokenizer),
        cache,
        return_logprobs,
        watched=callback is not None,
    )
    for drawn in texts.steps():
        if callback is not None and drawn is not None:
            callback(drawn)
    return texts.results(_padding(model, pad_token_id, texts.stops))


def stream(
    model: PreTrainedModel, tokens: Tensor | Iterable[Any], attention_mask: Tensor | None = None, **options: Any
) -> Iterator[list[int | None]]:
    """Yields the tokens of `generate` as they come: one of each row, and None for rows that ended.

    Args:
        model, tokens, attention_mask: as for `generate`.
        options: `generate`'s, except for callback, pad_token_id and return_logprobs.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(vocab_size=32, hidden_size=32, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
        >>> model = LlamaForCausalLM(LlamaConfig(**sizes)).to("mps").eval()
        >>> len(list(metalcore.generation.stream(model, [[1, 5, 7]], max_new_tokens=4, eos_token_id=())))
        4
    """
    sampling, adjustments = (
        [options.pop(name, default) for name, default in names.items()] for names in (_SAMPLING, _ADJUSTMENTS)
    )
    stops = Stops(
        end_tokens(model, options.pop("eos_token_id", None)), options.pop("stop", ()), options.pop("tokenizer", None)
    )
    new, cache = options.pop("max_new_tokens", 128), options.pop("cache", "static")
    if options:
        raise TypeError(f"stream: unknown options {', '.join(options)}")
    texts = _Texts(
        model,
        tokens,
        attention_mask,
        new,
        Sampling(*sampling),
        Adjustments(*adjustments),
        stops,
        cache,
        False,
        watched=True,
    )
    return texts.steps()  # pyright: ignore[reportReturnType]  (they are watched)


_SAMPLING = {"temperature": 0.0, "top_k": None, "top_p": None, "min_p": None, "generator": None}
_ADJUSTMENTS = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": None,
    "logits_processor": (),
}


def _padding(model, token, stops):
    for config in (getattr(model, "generation_config", None), model.config):
        token = getattr(config, "pad_token_id", None) if token is None else token
    return min(stops.ends, default=0) if token is None else token


def _without_wrapper(model):
    """Returns the model in which peft has put adapters."""
    config = getattr(model, "active_peft_config", None)
    if config is None:
        return model
    if getattr(config, "is_prompt_learning", False):
        raise ValueError("generate: peft's prompts, which are learned, are not taken; adapters are")
    return model.get_base_model()


def _vocabulary(model):
    embedding = model.get_input_embeddings()
    return getattr(embedding, "num_embeddings", None) or embedding.weight.shape[0]


class _Texts:
    """Some rows of text that grow."""

    def __init__(
        self,
        model,
        tokens,
        attention_mask,
        new,
        sampling,
        adjustments,
        stops,
        cache,
        logprobs,
        watched,
    ):
        if type(new) is not int or new < 1:
            raise ValueError(f"generate: max_new_tokens must be a positive int, not {new!r}")
        if getattr(model.config, "is_encoder_decoder", False):
            raise ValueError("generate: the model has an encoder; it is for causal language models")
        sampling = sampling._replace(top_k=sampling.top_k or None)
        tokens, seen, lengths = padded_left(tokens, attention_mask, model.device, _vocabulary(model))
        self.run = Run(_without_wrapper(model), tokens, seen, lengths, new, cache, sampling, adjustments, logprobs)
        self.new, self.stops = new, stops
        self.watched = watched or bool(stops)
        self.rows: list[list[int]] = [[] for _ in lengths]  # what the host has read
        self.ended = [False] * len(lengths)
        self.count = 0

    def steps(self) -> Iterator[list[int | None] | None]:
        """Yields each step's tokens, or None where nobody wants them."""
        run = self.run
        try:
            run.read()
            for index in range(self.new):
                more = index + 1 < self.new
                sent = _Sent(run.token) if self.watched else None
                ahead = more and (sent is None or sent.waits_for_itself)
                if ahead:
                    run.step()
                self.count += 1
                yield None if sent is None else self._append(sent.tokens())
                if all(self.ended):
                    return
                if more and not ahead:
                    run.step()
        finally:
            run.close()

    def _append(self, tokens):
        new_tokens: list[int | None] = []
        for row, token in enumerate(tokens):
            if self.ended[row]:
                new_tokens.append(None)
                continue
            self.rows[row].append(token)
            self.ended[row] = self.stops.complete(self.rows[row])
            new_tokens.append(token)
        return new_tokens

    def results(self, padding):
        """Returns what `generate` returns."""
        columns = slice(self.run.prompt, self.run.prompt + self.count)
        tokens, logprobs = self.run.tokens[:, columns].clone(), self.run.logprobs
        logprobs = None if logprobs is None else logprobs[:, columns].clone()
        if any(self.ended):
            counts = torch.tensor([len(row) for row in self.rows])[:, None]
            over = (torch.arange(self.count) >= counts).to(tokens.device)
            tokens.masked_fill_(over, padding)
            if logprobs is not None:
                logprobs.masked_fill_(over, 0.0)
        return tokens if logprobs is None else (tokens, logprobs)


class _Sent:
    """The last tokens on their way to the host."""

    def __init__(self, token: Tensor):
        self.waits_for_itself = token.is_cuda  # and not for what comes after
        if self.waits_for_itself:
            self.host = torch.empty(token.shape, dtype=token.dtype, pin_memory=True)
            self.host.copy_(token, non_blocking=True)
            self.copied = torch.cuda.Event()
            self.copied.record(torch.cuda.current_stream(token.device))
        else:
            self.host = token

    def tokens(self) -> list[int]:
        if self.waits_for_itself:
            self.copied.synchronize()
        return self.host[:, 0].tolist()
