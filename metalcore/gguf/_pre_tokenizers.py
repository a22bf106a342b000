"""How texts are split before pairs are joined, by the names that llama.cpp gives (`tokenizer.ggml.pre`).

Each pattern splits what the one before it left, and what no pattern matches stays as it is. Where llama.cpp comes near
to the pattern of a model's own tokenizer.json, which its std::regex cannot take, the table has the model's.
Source of names, patterns and defaults: github.com/ggml-org/llama.cpp, src/llama-vocab.cpp.
"""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["PRE_TOKENIZERS", "PreTokenizer", "name_of", "steps"]


class PreTokenizer(NamedTuple):
    """A way to split texts.

    Attributes:
        patterns: regular expressions of Oniguruma.
        ignore_merges: whether a piece that is a token stays whole, even if no merges lead to it.
        add_bos: whether texts begin with the first token, where the file does not say.
        byte_level: whether tokens are spelled in GPT-2's letters for bytes. In the others "▁" is a space.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    byte_level: bool = True


_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_REST = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_SHORT}|{_WORD}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_SHORT}|{_WORD}|\p{{N}}|{_REST}"


def _cased(end: str, digits: str, rest: str, but: str = "") -> str:
    """Returns a pattern that also splits words before capitals."""
    upper, lower = (rf"[\p{{L{one}}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]" for one in "ul")
    lower = lower.replace(r"\p{Lt}", "")
    first = r"[^\r\n\p{L}\p{N}]?"
    return rf"{first}{upper}*{lower}+{end}|{first}{upper}+{lower}*{end}|{digits}|{rest}"


_SLASH = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_GPT4O = _cased(f"{_SHORT}?", r"\p{N}{1,3}", _SLASH)
_KIMI = r"[\p{Han}]+|" + _cased(f"{_SHORT}?", r"\p{N}{1,3}", _REST, r"&&[^\p{Han}]")
_KANA = "\u3040-\u309f\u30a0-\u30ff"
_CJK = f"[\u4e00-\u9fa5{_KANA}]+"
_OLD_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_MARKED = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"""
_CLAUSE = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_PHRASES = r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+"
_NEWLINE = r"\s*[\r\n]|\s+(?!\S)|\s+"
_LINES = r"[^\n]+|[\n]+"
_THREES = "[0-9][0-9][0-9]"
_LETTERS = (  # those that have an upper and a lower case, as DeepSeek's first tokenizer lists them
    "A-Za-z\xb5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
    "\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556"
    "\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc"
    "\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    "\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b"
    "\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_ASIAN = (
    f"[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff{_KANA}\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff"
    "\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
_YOUTU = (
    "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f"
    f"\ufe30-\ufe4f]+|[\u3105-\u312f]+|{_CJK}"
)
_JAIS2 = "".join(rf"|\s{{{count}}}(?!\S)" for count in ("512", "256", "128", "64", "32", "16", "8", "4", "1,2"))

# Names of one way, of which the first is what a tokenizer is saved with.
_TABLE: dict[str, PreTokenizer] = {
    "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de jina-v1-en jina-v2-code roberta-bpe a.x-4.0 mellum "
    "modern-bert mpt olmo jais exaone4 trillion granite-docling": PreTokenizer((_GPT2,)),
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", _THREES)),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, _THREES)),
    "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2": PreTokenizer((r"\p{N}", _GPT2)),
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": PreTokenizer(
        (_LLAMA3,), ignore_merges=True, add_bos=True
    ),
    "glm4 glm5": PreTokenizer((_LLAMA3,), ignore_merges=True),
    "dbrx smaug-bpe chatglm-bpe": PreTokenizer((_LLAMA3,)),
    "qwen2 deepseek-r1-qwen kormo f2llmv2 hunyuan grok-2 solar-open stablelm2 megrez": PreTokenizer((_QWEN2,)),
    "qwen35": PreTokenizer(
        (rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",)
    ),
    "gpt-4o llama4 kanana2 talkie minimax-m2": PreTokenizer((_GPT4O,)),
    "granite-embed-multi-97m": PreTokenizer((_GPT4O,), ignore_merges=True),
    "tekken": PreTokenizer((_cased("", r"\p{N}", _SLASH),), ignore_merges=True, add_bos=True),
    "tiny_aya cohere2moe": PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O)),
    "youtu": PreTokenizer((_YOUTU, _cased(f"{_SHORT}?", r"\p{N}", _SLASH)), ignore_merges=True),
    "kimi-k2": PreTokenizer((_KIMI,)),
    "deepseek-llm": PreTokenizer(
        (
            r"[\r\n]",
            rf"\s?[{_LETTERS}]+",
            "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+$",
            _OLD_CJK,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _OLD_CJK, r"\p{N}")),
    "deepseek-v3 hunyuan-dense hy_v4 joyai-llm": PreTokenizer((r"\p{N}{1,3}", _CJK, rf"{_MARKED}[\r\n]*|{_SPACES}")),
    "spark2_5": PreTokenizer((r"\p{N}{1,3}", _CJK, rf"{_MARKED}|[\r\n]|\s+(?!\S)|\s+", r"\p{N}")),
    "afmoe": PreTokenizer((r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))", _ASIAN, rf"{_MARKED}[\r\n]*|{_SPACES}")),
    "bloom gpt3-finnish poro-chat": PreTokenizer((_CLAUSE,)),
    "viking": PreTokenizer((_CLAUSE, r"\p{N}")),
    "jais-2": PreTokenizer(
        (rf"{_SHORT}|{_WORD}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+{_JAIS2}|\s{{1}}",)
    ),
    "minicpm5": PreTokenizer((r"\p{N}{1,3}", rf"{_SHORT}|{_WORD}|\p{{N}}+|{_REST}"), ignore_merges=True),
    "bailingmoe bailingmoe2 llada-moe": PreTokenizer(
        (rf"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{{L}}\p{{N}}]?+\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]++[\r\n]*|{_NEWLINE}",)
    ),
    "seed-coder": PreTokenizer((rf"{_SHORT}|{_WORD}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",)),
    "ufakzeka": PreTokenizer((rf"{_WORD}|\p{{N}}|{_REST}",)),
    "laguna": PreTokenizer((_LINES, _QWEN2)),
    "exaone-moe": PreTokenizer((rf"{_SHORT}|{_PHRASES}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|{_NEWLINE}",)),
    "superbpe": PreTokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    "chameleon": PreTokenizer(
        (
            "<sentinel:[0-9]+>",
            "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
            r"([\t\n]|    |  )",
            r"\p{N}",
            r"[\p{P}!-/:-@\[-`{-~]",
            _GPT2,
        ),
        add_bos=True,
    ),
    "gemma4": PreTokenizer((_LINES,), add_bos=True, byte_level=False),
    "sarvam-moe": PreTokenizer((_LINES,), byte_level=False),
}
PRE_TOKENIZERS = {name: way for names, way in _TABLE.items() for name in names.split()}


def steps(way: PreTokenizer) -> Any:
    """Returns the pre-tokenizer of the package tokenizers."""
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

    splits = [Split(Regex(pattern), behavior="isolated") for pattern in way.patterns]
    return Sequence([*splits, ByteLevel(add_prefix_space=False, use_regex=False)] if way.byte_level else splits)


def name_of(parts: dict[str, Any]) -> str:
    """Returns the name of how a byte-level tokenizer splits texts, from its JSON.

    Raises:
        ValueError: llama.cpp has none.
    """
    whole, merges = parts["pre_tokenizer"], parts["model"].get("ignore_merges", False)
    patterns = tuple(pattern for step in whole.get("pretokenizers", [whole]) for pattern in _patterns(step))
    for name, way in PRE_TOKENIZERS.items():
        if (way.patterns, way.ignore_merges, way.byte_level) == (patterns, merges, True):
            return name
    words = " and pieces that are tokens stay whole" if merges else ""
    raise ValueError(f"llama.cpp's name for texts that are split by {patterns}{words} is unknown")


def _patterns(step):
    """Returns the patterns of a step."""
    if step["type"] == "ByteLevel" and not step["add_prefix_space"]:
        return [_GPT2] if step["use_regex"] else []
    if step["type"] == "Digits":
        return [r"\p{N}" if step["individual_digits"] else r"\p{N}+"]
    if step["type"] == "Split" and "Regex" in step["pattern"]:
        if (step["behavior"], step["invert"]) in (("Isolated", False), ("Isolated", True), ("Removed", True)):
            return [step["pattern"]["Regex"].replace("\r", r"\r").replace("\n", r"\n")]
    raise ValueError(f"llama.cpp's name for texts that are split by {step} is unknown")
