"""Text from transformers' causal language models: `generate`, and `stream`, which gives tokens as they come."""

from ._generate import generate, stream
from ._prefix import PrefixCache

__all__ = ["PrefixCache", "generate", "stream"]
