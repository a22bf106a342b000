"""Logits and tokens of llama.cpp for the same files."""

import layouts
import llama
import pytest
import torch
from transformers.convert_slow_tokenizer import bytes_to_unicode

from metalcore import gguf
from metalcore.gguf._pre_tokenizers import _TABLE
from metalcore.gguf._tokenizer import tokenizer_of

if llama.llama_cpp is None:
    pytest.skip(
        "llama-cpp-python cannot be imported: nothing is compared with llama.cpp (pip install llama-cpp-python)",
        allow_module_level=True,
    )
each_layout = pytest.mark.parametrize("name", list(layouts.CASES))
# llama.cpp rotates other pairs of numbers than transformers in Bamba's attention.
each_same_layout = pytest.mark.parametrize("name", [name for name in layouts.CASES if name != "bamba"])
COUNT = 64


def difference(actual, expected):
    return ((actual - expected).norm() / expected.norm()).item()


@torch.no_grad()
def greedy(model, tokens):
    """Logits of the tokens, and the most likely ones that follow."""
    out = model(tokens, use_cache=True)
    logits, found = out.logits[0], []
    name = "past_key_values" if "past_key_values" in out else "cache_params"
    for _ in range(COUNT):
        found.append(int(out.logits[0, -1].argmax()))
        out = model(torch.tensor([found[-1:]]), **{name: out[name]}, use_cache=True)
    return logits, found


@each_same_layout
def test_logits_and_tokens(made, name, tmp_path):
    """llama.cpp rounds what it multiplies packed weights with to 8 bits; here ggml dequantizes the file for it."""
    file, tokens = made(name), layouts.tokens()[:1]
    model, _ = gguf.load(file.path, tokenizer=False, attn_implementation="eager")
    logits, found = greedy(model, tokens)
    with llama.Llama(llama.dequantized(file.path, tmp_path / "x.gguf")) as other:
        expected = other.logits(tokens[0].tolist())
    with llama.Llama(str(tmp_path / "x.gguf")) as other:
        assert other.greedy(tokens[0].tolist(), COUNT) == found
    assert difference(logits, expected) < 1e-3


@each_same_layout
def test_logits_of_the_packed_file(made, name):
    """As llama.cpp computes with packed weights: no farther away than such rounding takes the same model."""
    file, tokens = made(name), layouts.tokens()[:1]
    model, _ = gguf.load(file.path, tokenizer=False, attn_implementation="eager")
    with torch.no_grad():
        logits = model(tokens).logits[0]
        llama.round_as_llama(model)
        rounded = model(tokens).logits[0]
    with llama.Llama(file.path) as other:
        expected = other.logits(tokens[0].tolist())
    # Two ways of rounding are apart by the sum of both at most; 1e-3 is for what is not rounded.
    assert difference(logits, expected) < 2 * difference(logits, rounded) + 1e-3


@each_layout
def test_written_files_are_opened(made, name, tmp_path):
    """llama.cpp computes the same from the file that save_gguf writes."""
    file, tokens = made(name), layouts.tokens()[0].tolist()
    gguf.save_gguf(gguf.load(file.path, tokenizer=False).model, tmp_path / "x.gguf")
    with llama.Llama(file.path) as one, llama.Llama(str(tmp_path / "x.gguf")) as other:
        torch.testing.assert_close(other.logits(tokens), one.logits(tokens), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_tokens_of_texts(made, tmp_path, kind):
    """llama.cpp splits texts as the tokenizer whose vocabulary save_gguf writes, and as the one that is loaded."""
    model, tokenizer = gguf.load(made("qwen2").path)
    tokenizer = tokenizer if kind == "byte-level" else layouts.sentencepiece()
    gguf.save_gguf(model, tmp_path / "x.gguf", tokenizer)
    text = "the thing\n in  the ñ hat"
    with llama.Llama(str(tmp_path / "x.gguf")) as other:
        expected = other.tokens(text)
    assert tokenizer.encode(text) == expected
    assert gguf.load(tmp_path / "x.gguf").tokenizer.encode(text) == expected


# llama.cpp comes near to these rows' patterns, and differs where capitals, marks or digits are next to other letters.
NEAR = ("gpt-4o", "tekken", "tiny_aya", "youtu", "kimi-k2")
PLAIN, MIXED = "i'll 12345 de  a?/\n\n  (b)", "I'LLx 12 de\u0301f  aB?/\n\u4e2d\u3002\u30ab"


@pytest.mark.parametrize("names", [names for names, way in _TABLE.items() if way.byte_level])
def test_pieces_of_each_way_to_split_texts(tmp_path, names):
    """Pairs join any part of a text, so that each piece is one token."""
    texts = [PLAIN] if names.startswith(NEAR) else [PLAIN, MIXED]
    spelling = bytes_to_unicode()
    parts: dict[str, None] = {}
    for text in texts:
        spelled = "".join(spelling[byte] for byte in text.encode())
        parts.update(dict.fromkeys(spelled[i:j] for i in range(len(spelled)) for j in range(i + 1, len(spelled) + 1)))
    longer = sorted((part for part in parts if len(part) > 1), key=len)
    writer = layouts.gguf.GGUFWriter(str(tmp_path / "x.gguf"), "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(names.split()[-1])
    writer.add_token_list([*spelling.values(), *longer])
    writer.add_token_merges([f"{part[:cut]} {part[cut:]}" for part in longer for cut in range(1, len(part))])
    writer.add_bos_token_id(0)
    layouts.finish(writer)
    tokenizer = tokenizer_of(gguf.GGUFFile(tmp_path / "x.gguf"))
    found = [tokenizer.encode(text) for text in texts]
    assert found == llama.vocabulary_tokens(str(tmp_path / "x.gguf"), texts)
