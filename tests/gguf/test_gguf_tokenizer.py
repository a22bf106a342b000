"""Vocabularies of GGUF files that contradict themselves or the model."""

import math
import sys
import warnings

import pytest
from changed import changed, drop_key, set_key
from layouts import needs_tokenizers

from metalcore import gguf

KEY = "tokenizer.ggml."
ROWS = 288


def version(monkeypatch, text):
    """Lets transformers say that it is of another release. (It puts another module in its place while it is used.)"""
    monkeypatch.setattr(sys.modules["transformers"], "__version__", text)


def longer(writer):
    """More tokens than the model has rows."""
    writer.kv_data[0][f"{KEY}tokens"].value.append("more")
    writer.kv_data[0][f"{KEY}token_type"].value.append(1)


@pytest.mark.parametrize(
    "change, message",
    [
        (set_key(f"{KEY}model", 3), "model': 3 is of a wrong type"),
        (set_key(f"{KEY}tokens", [1, 2]), r"tokens': array\(.* is of a wrong type"),
        (set_key(f"{KEY}tokens", [True] * 5), "tokens': it is no list of texts"),
        (longer, "tokens': 289 tokens, and the model has rows for 288"),
        (set_key(f"{KEY}token_type", [1, 1]), "token_type': 2 numbers for 288 tokens"),
        (set_key(f"{KEY}scores", [0.5] * 9), "scores': 9 numbers for 288 tokens"),
        (set_key(f"{KEY}merges", ["a b", "abc"]), "merges': 'abc' is no pair of tokens"),
        (drop_key(f"{KEY}merges"), "merges': it is missing"),
        (set_key(f"{KEY}add_bos_token", "yes"), "add_bos_token': 'yes' is of a wrong type"),
        (set_key("tokenizer.chat_template", 3), "chat_template': 3 is of a wrong type"),
        (set_key(f"{KEY}eos_token_id", "2"), "eos_token_id': '2' is of a wrong type"),
    ],
)
def test_contradictions(tmp_path, change, message):
    path = changed(tmp_path, change)
    with pytest.raises(gguf.GGUFError, match=f"x.gguf: key 'tokenizer.*{message}"):
        gguf.load(path)


@needs_tokenizers
@pytest.mark.parametrize("token", [-1, ROWS, 2**32 - 1])
@pytest.mark.parametrize("name", ["bos", "eos", "padding"])
def test_special_tokens_without_rows_are_left_out(tmp_path, name, token):
    path = changed(tmp_path, set_key(f"{KEY}{name}_token_id", token))
    with pytest.warns(UserWarning, match=f"{name}_token_id': the model has no token {token}; it is left out"):
        model, tokenizer = gguf.load(path)
    short = {"padding": "pad"}.get(name, name)
    assert getattr(model.config, f"{short}_token_id") is None and getattr(tokenizer, f"{short}_token_id") is None
    assert tokenizer.encode("the") == [259]
    assert model.generation_config.eos_token_id == (None if name == "eos" else [257])


@needs_tokenizers
def test_more_rows_than_tokens(tmp_path):
    def shorter(writer):
        for name in ("tokens", "token_type"):
            del writer.kv_data[0][f"{KEY}{name}"].value[280:]
        writer.kv_data[0][f"{KEY}eos_token_id"].value = 285

    model, tokenizer = gguf.load(changed(tmp_path, shorter))
    assert len(tokenizer) == 280 and model.config.vocab_size == ROWS
    assert model.generation_config.eos_token_id == [285] and tokenizer.eos_token is None


@needs_tokenizers
def test_splits_that_are_unknown(tmp_path):
    path = changed(tmp_path, set_key(f"{KEY}pre", "nobody's"))
    with pytest.warns(UserWarning, match='does not know how "nobody\'s" splits texts'):
        assert gguf.load(path).tokenizer.encode("the") == [259]
    path = changed(tmp_path, set_key(f"{KEY}pre", "qwen2"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gguf.load(path)


@needs_tokenizers
def test_what_transformers_cannot_make_is_a_warning(tmp_path):
    path = changed(tmp_path, set_key(f"{KEY}model", "t5"))
    with pytest.warns(UserWarning, match="no tokenizer of type 't5': KeyError: 'scores'"):
        assert gguf.load(path).tokenizer is None
    path = changed(tmp_path, set_key(f"{KEY}scores", [math.nan] * ROWS))
    assert gguf.load(path).tokenizer is not None


def test_transformers_that_is_too_old_makes_no_tokenizer(tmp_path, monkeypatch):
    path = changed(tmp_path, lambda writer: None)
    version(monkeypatch, "5.17.0")
    with pytest.warns(UserWarning, match="the tokenizer needs transformers 5.18 or newer, and this is 5.17.0$"):
        assert gguf.load(path).tokenizer is None


@needs_tokenizers
def test_transformers_that_is_too_old_names_no_split(tmp_path, monkeypatch):
    model, tokenizer = gguf.load(changed(tmp_path, set_key(f"{KEY}pre", "qwen2")))
    version(monkeypatch, "5.17.0")
    with pytest.raises(ImportError, match="5.18 or newer"):
        gguf.save_gguf(model, tmp_path / "y.gguf", tokenizer)


def test_transformers_that_is_too_old_makes_no_model(tmp_path, monkeypatch):
    path = changed(tmp_path, lambda writer: None)
    version(monkeypatch, "5.3.0.dev0")
    with pytest.raises(ImportError, match="metalcore.gguf.load needs transformers 5.4 or newer, and this is 5.3.0"):
        gguf.load(path)


@needs_tokenizers
def test_gemma4_has_a_vocabulary_with_merges(tmp_path):
    """Spaces are U+2581 as in SentencePiece's, pairs are joined in the order of the merges."""
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["▁", *"adehnt", "th", "the", "▁the", "at"]
    tokens += [f"<unused{number}>" for number in range(ROWS - len(tokens))]

    def change(writer):
        for key, value in {
            "model": "gemma4",
            "tokens": tokens,
            "token_type": [3, 3, 3, 2] + [6] * 256 + [1] * (ROWS - 260),
            "merges": ["t h", "th e", "▁ the", "a t"],
            "add_space_prefix": False,
            "add_bos_token": True,
            "bos_token_id": 2,
            "eos_token_id": 1,
        }.items():
            set_key(f"{KEY}{key}", value)(writer)

    tokenizer = gguf.load(changed(tmp_path, change, "gemma4")).tokenizer
    assert tokenizer.tokenize("the the hat") == ["the", "▁the", "▁", "h", "at"]
    found = tokenizer("the\u00f1")["input_ids"]
    assert found == [2, tokens.index("the"), 4 + 0xC3, 4 + 0xB1] and tokenizer.decode(found[1:]) == "the\u00f1"
