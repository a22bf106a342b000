"""How texts are split, by name: the table's patterns as tokenizers runs them, and as Python's regex does."""

import json
import random

import pytest

from metalcore.gguf._pre_tokenizers import _TABLE, PRE_TOKENIZERS, name_of, steps

regex = pytest.importorskip("regex")
tokenizers = pytest.importorskip("tokenizers")

TEXT = "I'LLx 12345 de\u0301 f  aB?/\n\n \u4e2d\u6587\u3002\u30abHi_b'Is       z"
# What the first name of each row of the table makes of TEXT: pieces that llama.cpp's tokens of vocabularies agree with.
PIECES = {
    "gpt-2": "I|'|LLx| 12345| de|\u0301| f| | aB|?/|\n\n| \u4e2d\u6587|\u3002|\u30abHi|_|b|'|Is|      | z",
    "default": "I|'|LLx| |123|45| de|\u0301| f| | aB|?/|\n\n| \u4e2d\u6587|\u3002|\u30abHi|_|b|'|Is|      | z",
    "falcon": "I|'|LLx| |123|45| de|\u0301| f| | aB|?/|\n\n| \u4e2d\u6587|\u3002|\u30abHi|_|b|'|Is|      | z",
    "smollm": "I|'|LLx| |1|2|3|4|5| de|\u0301| f| | aB|?/|\n\n| \u4e2d\u6587|\u3002|\u30abHi|_|b|'|Is|      | z",
    "llama-bpe": "I|'LL|x| |123|45| de|\u0301| f| | aB|?/\n\n| \u4e2d\u6587|\u3002\u30abHi|_b|'Is|      | z",
    "glm4": "I|'LL|x| |123|45| de|\u0301| f| | aB|?/\n\n| \u4e2d\u6587|\u3002\u30abHi|_b|'Is|      | z",
    "dbrx": "I|'LL|x| |123|45| de|\u0301| f| | aB|?/\n\n| \u4e2d\u6587|\u3002\u30abHi|_b|'Is|      | z",
    "qwen2": "I|'LL|x| |1|2|3|4|5| de|\u0301| f| | aB|?/\n\n| \u4e2d\u6587|\u3002\u30abHi|_b|'Is|      | z",
    "qwen35": "I|'LL|x| |1|2|3|4|5| de\u0301| f| | aB|?/\n\n| \u4e2d\u6587|\u3002\u30abHi|_b|'Is|      | z",
    "gpt-4o": "I'LL|x| |123|45| de\u0301| f| | a|B|?/\n\n| \u4e2d\u6587|\u3002\u30abHi|_b|'Is|      | z",
    "granite-embed-multi-97m": (
        "I'LL|x| |123|45| de\u0301| f| | a|B|?/\n\n| \u4e2d\u6587|\u3002\u30abHi|_b|'Is|      | z"
    ),
    "tekken": "I|'LLx| |1|2|3|4|5| de\u0301| f| | a|B|?/\n\n| \u4e2d\u6587|\u3002\u30abHi|_b|'Is|      | z",
    "tiny_aya": "I'LL|x| |12|345| de\u0301| f| | a|B|?/\n\n| \u4e2d\u6587|\u3002\u30abHi|_b|'Is|      | z",
    "youtu": "I'LL|x| |1|2|3|4|5| de\u0301| f| | a|B|?/\n\n| |\u4e2d\u6587|\u3002|\u30ab|Hi|_b|'Is|      | z",
    "kimi-k2": "I'LL|x| |123|45| de\u0301| f| | a|B|?/\n\n| |\u4e2d\u6587|\u3002\u30abHi|_b|'Is|      | z",
    "deepseek-llm": "I|'|LLx| |12345| de|\u0301| f| | aB|?/|\n|\n| |\u4e2d\u6587|\u3002|\u30ab|Hi|_|b|'|Is|      | z",
    "deepseek-coder": (
        "I|'|LLx| |1|2|3|4|5| de|\u0301| f| | aB|?/|\n|\n| |\u4e2d\u6587|\u3002|\u30ab|Hi|_|b|'|Is|      | z"
    ),
    "deepseek-v3": "I|'LLx| |123|45| de\u0301| f| | aB|?/\n\n| |\u4e2d\u6587|\u3002|\u30ab|Hi|_b|'Is|      | z",
    "spark2_5": "I|'LLx| |1|2|3|4|5| de\u0301| f| | aB|?/|\n|\n| |\u4e2d\u6587|\u3002|\u30ab|Hi|_b|'Is|      | z",
    "afmoe": "I|'LLx| |12|345| de\u0301| f| | aB|?/\n\n| |\u4e2d\u6587|\u3002|\u30ab|Hi|_b|'Is|      | z",
    "bloom": "I'LLx| 12345| de\u0301| f| | aB|?|/|\n\n| \u4e2d\u6587|\u3002|\u30abHi_b'Is|      | z",
    "viking": "I'LLx| |1|2|3|4|5| de\u0301| f| | aB|?|/|\n\n| \u4e2d\u6587|\u3002|\u30abHi_b'Is|      | z",
    "jais-2": "I|'LL|x| |123|45| de|\u0301| f| | aB|?/\n\n| \u4e2d\u6587|\u3002\u30abHi|_b|'Is|    |  | z",
    "minicpm5": "I|'LL|x| |123|45| de|\u0301| f| | aB|?/\n\n| \u4e2d\u6587|\u3002\u30abHi|_b|'Is|      | z",
    "bailingmoe": "I|'LL|x| |1|2|3|4|5| de|\u0301| f| | aB|?/\n\n| \u4e2d\u6587|\u3002\u30abHi|_b|'Is|      | z",
    "seed-coder": "I|'LL|x| |1|2|3|4|5| de|\u0301| f| | aB|?/|\n\n| \u4e2d\u6587|\u3002\u30abHi|_b|'Is|      | z",
    "ufakzeka": "I|'LLx| |1|2|3|4|5| de|\u0301| f| | aB|?/\n\n| \u4e2d\u6587|\u3002\u30abHi|_b|'Is|      | z",
    "laguna": "I|'LL|x| |1|2|3|4|5| de|\u0301| f| | aB|?/|\n\n| \u4e2d\u6587|\u3002\u30abHi|_b|'Is|      | z",
    "exaone-moe": "I|'LL|x| |1|2|3|4|5| de\u0301 f| | aB|?/\n|\n| \u4e2d\u6587|\u3002\u30abHi|_b|'Is|      | z",
    "superbpe": "I'LLx |12|345| de\u0301 f  aB?/\n\n \u4e2d\u6587\u3002\u30abHi_b'Is       z",
    "chameleon": "I|'|LLx| |1|2|3|4|5| de|\u0301| f|  |aB|?|/|\n|\n| \u4e2d\u6587|\u3002|\u30abHi|_|b|'|Is|    |  | z",
    "gemma4": "I'LLx 12345 de\u0301 f  aB?/|\n\n| \u4e2d\u6587\u3002\u30abHi_b'Is       z",
    "sarvam-moe": "I'LLx 12345 de\u0301 f  aB?/|\n\n| \u4e2d\u6587\u3002\u30abHi_b'Is       z",
}
_LETTERS = [
    *" \n\t\r'sdlmtveabzABZ019.,!?-_/$=+(){}<>",
    "  ",
    "\n\n",
    "'ll",
    "'RE",
    "\u4e2d",
    "\u65e5",
    "\u306e",
    "\u30ab",
]
_LETTERS += ["\ud55c", "\xe9", "\xdf", "\u0416", "\u0436", "\U0001f600", "\u093e", "\u0301", "\xbd", "\u3002", "\u201c"]
each = pytest.mark.parametrize("names", list(_TABLE))


def split(way, text):
    """Pieces by regex: each pattern splits what those before it left."""
    pieces = [text]
    for pattern in way.patterns:
        expression, found = regex.compile(pattern, regex.V1 if "&&" in pattern else 0), []
        for piece in pieces:
            end = 0
            for match in expression.finditer(piece):
                found += [piece[end : match.start()], match[0]]
                end = match.end()
            found.append(piece[end:])
        pieces = [piece for piece in found if piece]
    return pieces


def pieces(way, text):
    return [text[start:end] for _, (start, end) in steps(way).pre_tokenize_str(text)]


@each
def test_splits(names):
    """As written down for one text, and as regex splits texts of everything that patterns name."""
    way, chance = _TABLE[names], random.Random(0)
    # Oniguruma's \b takes no fraction for a part of a word, and Python's does.
    letters = [letter for letter in _LETTERS if letter != "\xbd" or r"\b" not in way.patterns[0]]
    assert "|".join(pieces(way, TEXT)) == PIECES[names.split()[0]]
    for _ in range(60):
        text = "".join(chance.choices(letters, k=40))
        assert pieces(way, text) == split(way, text), text


@each
def test_names_of_what_is_split(names):
    """A tokenizer of this table is saved with a name of the same row, or of one that differs in add_bos alone."""
    way = _TABLE[names]
    model = tokenizers.models.BPE(ignore_merges=way.ignore_merges)
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = steps(way)
    parts = json.loads(backend.to_str())
    if way.byte_level:
        assert PRE_TOKENIZERS[name_of(parts)][:2] == way[:2]
    else:
        with pytest.raises(ValueError, match="llama.cpp's name for texts that are split by"):
            name_of(parts)


def test_steps_that_mean_the_same():
    """Models' own tokenizers have steps of other types than Split."""
    made = tokenizers.pre_tokenizers
    for names, expected in (
        ([made.Digits(True), made.ByteLevel(False)], "smollm"),
        ([made.ByteLevel(False)], "gpt-2"),
        (
            [
                made.Split(tokenizers.Regex(PRE_TOKENIZERS["qwen2"].patterns[0]), "removed", True),
                made.ByteLevel(False, use_regex=False),
            ],
            "qwen2",
        ),
    ):
        backend = tokenizers.Tokenizer(tokenizers.models.BPE())
        backend.pre_tokenizer = made.Sequence(names)
        assert name_of(json.loads(backend.to_str())) == expected
    for step in (made.ByteLevel(True), made.Whitespace(), made.Split("x", "isolated"), made.Punctuation()):
        backend = tokenizers.Tokenizer(tokenizers.models.BPE())
        backend.pre_tokenizer = step
        with pytest.raises(ValueError, match="llama.cpp's name for texts that are split by"):
            name_of(json.loads(backend.to_str()))
