"""One run of a model over some prompts: a step at a time, all of it on the device."""

from __future__ import annotations

import inspect
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..paged import PagedKVCache
from ..quant._joined import join
from ..replay._graph import captured
from ..sampling import sample
from ._adjustments import Adjustments
from ._prefix import PrefixCache

__all__ = ["Run", "Sampling"]

_CAPTURED = 32  # tokens from which on a CUDA graph pays


class Sampling(NamedTuple):
    """Arguments of metalcore.sample."""

    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    generator: torch.Generator | None


class Run:
    """Attributes:
    token: int64 (rows, 1): the last ones that were drawn.
    tokens: int64 (rows, length): the prompts, padded on the left, and what was drawn.
    logprobs: float32, of that shape, or None.
    """

    def __init__(
        self,
        model: Any,
        tokens: Tensor,
        seen: Tensor,
        lengths: list[int],
        new: int,
        cache: str | PagedKVCache | PrefixCache,
        sampling: Sampling,
        adjustments: Adjustments,
        logprobs: bool,
    ):
        self.model, self.sampling, self.adjustments = model, sampling, adjustments
        self.rows, self.prompt = tokens.shape
        self.length = self.prompt + new
        inner = getattr(model, "_orig_mod", model)  # what torch.compile wraps
        accepted = inspect.signature(inner.forward).parameters
        self.accepted = accepted
        self.kept = cache if isinstance(cache, PrefixCache) else None
        self.lengths = lengths
        self.cache: Any = self._cache(cache, tokens, seen, new)
        join(model)
        self.tokens = torch.cat([tokens, tokens.new_zeros(self.rows, new)], 1)
        self.logprobs = torch.zeros(self.tokens.shape, device=tokens.device) if logprobs else None
        self.seen = self.cache.seen if self.by_metalcore else torch.cat([seen, seen.new_ones(self.rows, new)], 1)
        self.place = self.cache.place if self.by_metalcore else torch.full((1,), self.prompt, device=tokens.device)
        self.held = self.prompt  # on the host
        self.token = tokens[:, -1:].clone()
        self.positions = (seen.long().cumsum(1) - 1).clamp(min=0)
        self.padded = min(lengths) < self.prompt
        self.graph: torch.cuda.CUDAGraph | None = None
        self.steps = 0
        # What the caller's functions are given grows from step to step.
        self.capture = self.by_metalcore and tokens.is_cuda and new >= _CAPTURED and not adjustments.processors

    def _cache(self, kind, tokens, seen, new):
        from transformers import DynamicCache

        from ._caches import PagedKeysAndValues, StaticKeysAndValues, known_layers, register

        register()
        name, layers = type(self.model).__name__, known_layers(self.model, self.accepted)
        with_keys = "past_key_values" in self.accepted
        self.cache_name = "past_key_values" if with_keys else "cache_params"
        if not with_keys and (layers is None or self.cache_name not in self.accepted):
            raise ValueError(f"generate: {name} keeps no keys, values or states in a Cache of transformers")
        if kind == "dynamic":
            layers = None
        self.by_metalcore = layers is not None
        if layers is None:
            if self.kept is not None:
                raise ValueError(f"generate: {name} takes no PrefixCache; cache='dynamic' is its own")
            if kind not in ("dynamic", "static"):
                raise ValueError(f"generate: {name} takes no pages; cache='dynamic' is its own")
            return DynamicCache(config=self.model.config)
        if self.kept is not None and any(hasattr(layer, "update_conv_state") for layer in layers):
            raise ValueError(f"generate: {name} takes no PrefixCache: its states are those of whole texts")
        if kind == "static" or self.kept is not None:
            prefix = None if self.kept is None else self.kept.match(self.model, tokens, self.lengths)
            return StaticKeysAndValues(layers, seen, self.length, prefix)
        if kind != "paged" and not isinstance(kind, PagedKVCache):
            kinds = "'static', 'paged', 'dynamic', a PagedKVCache or a PrefixCache"
            raise ValueError(f"generate: cache must be {kinds}, not {kind!r}")
        pool = kind if isinstance(kind, PagedKVCache) else None
        cache = PagedKeysAndValues(layers, seen, self.length, self.lengths, new, pool)
        if not cache.attention:
            raise ValueError(f"generate: {name} has states alone, and nothing for pages; cache='static' holds them")
        return cache

    @torch.no_grad()
    def read(self) -> None:
        """Reads the prompts, and draws the first token of each row."""
        mask = self.seen[:, : self.prompt] if self.padded else None
        columns = slice(self.cache.read_from if self.by_metalcore else 0, self.prompt)
        logits = self._forward(self.tokens[:, columns], mask, self.positions[:, columns])
        if self.adjustments.any:
            self.adjustments.begin(self.tokens[:, : self.prompt], self.seen[:, : self.prompt], logits.shape[-1])
        self._draw(logits, self.prompt)
        self.positions = self.positions[:, -1:].clone()
        if self.by_metalcore:
            self.cache.reading = False

    @torch.no_grad()
    def step(self) -> None:
        """Draws the next token of each row."""
        self.steps += 1
        if self.capture and self.graph is None and self.steps > 1:  # the first step compiled the kernels
            self._capture()
        if self.graph is not None:
            self.graph.replay()
        else:
            self._step()
        self.held += 1

    def _step(self):
        self.positions.add_(1)
        if self.by_metalcore:
            self.cache.advance()
        # Models of states alone multiply a mask and the tokens, of which a step has one.
        unmasked = self.by_metalcore or not self.padded or self.cache_name == "cache_params"
        mask = None if unmasked else self.seen[:, : self.held + 1]
        logits = self._forward(self.token, mask, self.positions)
        self.place.add_(1)
        self._draw(logits, self.held + 1)

    def _capture(self):
        generator = self.sampling.generator
        try:
            with captured(*() if generator is None else (generator,)) as graph:
                self._step()
        except RuntimeError as error:  # the model waits for the device, as some mixtures of experts do
            warnings.warn(f"generate: a step cannot be a CUDA graph, and runs as usual: {error}", stacklevel=4)
            self.capture = False
        else:
            self.graph = graph

    def _forward(self, tokens, mask, positions):
        options: dict[str, Any] = {"attention_mask": mask, self.cache_name: self.cache, "use_cache": True}
        if "position_ids" in self.accepted:
            options["position_ids"] = positions
        if "logits_to_keep" in self.accepted:
            options["logits_to_keep"] = 1
        if self.by_metalcore:
            from ._caches import attending

            with attending(self.model, self.cache):
                output = self.model(tokens, **options)
        else:
            output = self.model(tokens, **options)
        if not hasattr(output, "logits"):
            raise ValueError(
                f"generate: {type(self.model).__name__} has no output layer; it is for causal language models"
            )
        return output.logits[:, -1]

    def _draw(self, logits, held):
        """Draws tokens after so many columns."""
        scores = self.adjustments(logits, self.tokens[:, :held]) if self.adjustments.any else logits
        drawn = sample(scores, *self.sampling)[:, None]
        self.adjustments.count(drawn)
        self.token.copy_(drawn)
        self.tokens.index_copy_(1, self.place, drawn)
        if self.logprobs is not None:
            self.logprobs.index_copy_(1, self.place, logits.float().log_softmax(-1).gather(1, drawn))

    def close(self) -> None:
        """Gives back what others lent, and keeps for the next call what it asked for."""
        if self.kept is not None and not self.cache.reading:
            layers = [(layer.keys, layer.values) for layer in self.cache.attention]
            lengths = [length + self.held - self.prompt for length in self.lengths]
            self.kept.keep(self.model, layers, self.tokens[:, : self.held], lengths)
        release = getattr(self.cache, "release", None)
        if release is not None:
            release()
