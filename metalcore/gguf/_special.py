"""Tokens that have a meaning by their texts, whatever a file says of them.

Files exist that name another end than their chat template writes, or that take the tokens of a template for plain text.
Source of the texts: github.com/ggml-org/llama.cpp, src/llama-vocab.cpp.
"""

from __future__ import annotations

from ._metadata import Metadata

__all__ = ["control", "stops"]

_ENDS = frozenset(
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s> <|eom_id|> "
    "<EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> [e~[ "
    "<\uff5cend\u2581of\u2581sentence\uff5c> <|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD] <|fim_repo|> <|repo_name|> "
    "<fim-repo> <REPO> <reponame> <|file_sep|>".split()
)
_CONTROL = _ENDS | frozenset(
    "<|fim_prefix|> <fim-prefix> <fim_prefix> <\uff5cfim\u2581begin\uff5c> <PRE> \u2581<PRE> <|code_prefix|> "
    "<|fim_suffix|> <fim-suffix> <fim_suffix> <\uff5cfim\u2581hole\uff5c> <SUF> \u2581<SUF> <|code_suffix|> "
    "<|fim_middle|> <fim-middle> <fim_middle> <\uff5cfim\u2581end\uff5c> <MID> \u2581<MID> <|code_middle|> "
    "<|prefix|> <|suffix|> <|middle|>".split()
)
# With all of these, another text is no end: messages of harmony's and Solar's templates have several parts.
_PARTS = (
    ({"<|return|>", "<|call|>"}, "<|end|>"),
    ({"<|calls|>", "<|flush|>"}, "<|end|>"),
    ({"<|tool_response>"}, "</s>"),
)


def control(tokens: list[str]) -> set[str]:
    """Returns the texts of tokens that are never plain text. (Gemma 4 has </s> as a tag of HTML.)"""
    found = {text for text in tokens if text in _CONTROL}
    return found - {"</s>"} if "<|tool_response>" in found else found


def stops(metadata: Metadata) -> list[int]:
    """Returns the tokens that end a text or a turn; the one that the file calls its end comes first."""
    named = [metadata.token(name) for name in ("eos", "eot", "eom")]
    texts = metadata.of_file("tokenizer.ggml.tokens", list, [])
    found = {text: number for number, text in enumerate(texts) if text in _ENDS}
    for all_of, text in _PARTS:
        if all_of <= found.keys():
            found.pop(text, None)
    return list(dict.fromkeys(token for token in (*named, *found.values()) if token is not None))
