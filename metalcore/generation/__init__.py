"""Text from transformers' causal language models: `generate`, and `stream`, which gives tokens as they come."""

from ._generate import generate, stream

__all__ = ["generate", "stream"]
