"""Tokens as text, as they come."""

from __future__ import annotations

from typing import Any

__all__ = ["Text"]


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
