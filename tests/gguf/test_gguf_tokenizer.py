"""Vocabularies of GGUF files that contradict themselves or the model."""

import sys
import warnings

import pytest
from changed import changed, drop_key, set_key

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


@pytest.mark.parametrize("token", [-1, ROWS, 2**32 - 1])
@pytest.mark.parametrize("name", ["bos", "eos", "padding"])
def test_special_tokens_without_rows_are_left_out(tmp_path, name, token):
    path = changed(tmp_path, set_key(f"{KEY}{name}_token_id", token))
    with pytest.warns(UserWarning, match=f"{name}_token_id': the model has no token {token}; it is left out"):
        model, tokenizer = gguf.load(path)
    short = {"padding": "pad"}.get(name, name)
    assert getattr(model.config, f"{short}_token_id") is None and getattr(tokenizer, f"{short}_token_id") is None
    assert tokenizer.encode("the") == [259]
    assert model.generation_config.eos_token_id == [257]  # </s>, by its text


def test_more_rows_than_tokens(tmp_path):
    def shorter(writer):
        for name in ("tokens", "token_type"):
            del writer.kv_data[0][f"{KEY}{name}"].value[280:]
        writer.kv_data[0][f"{KEY}eos_token_id"].value = 285

    model, tokenizer = gguf.load(changed(tmp_path, shorter))
    assert len(tokenizer) == 280 and model.config.vocab_size == ROWS
    assert model.generation_config.eos_token_id == [285, 257] and tokenizer.eos_token is None


@pytest.mark.parametrize(
    "key, value, reason",
    [
        ("pre", "nobody's", 'metalcore does not know how "nobody\'s" splits texts'),
        ("pre", "whitespace", "metalcore does not know how 'whitespace' splits texts"),
        *(("model", kind, f"{kind!r} is none of gemma4, gpt2, llama") for kind in ("bert", "t5", "rwkv", "plamo2")),
    ],
)
def test_what_is_unknown_makes_no_tokenizer(tmp_path, key, value, reason):
    """The model is loaded all the same, with a warning that names what is unknown."""
    path = changed(tmp_path, set_key(f"{KEY}{key}", value))
    with pytest.warns(UserWarning, match=f"x.gguf: no tokenizer is made of it: key 'tokenizer.ggml.{key}': {reason}$"):
        assert gguf.load(path).tokenizer is None


def test_merges_of_what_is_no_token_make_no_tokenizer(tmp_path):
    path = changed(tmp_path, set_key(f"{KEY}merges", ["t h", "th zz"]))
    with pytest.warns(UserWarning, match="no tokenizer is made of it: .*Token `zz` out of vocabulary"):
        assert gguf.load(path).tokenizer is None


def several(*changes):
    def change(writer):
        for one in changes:
            one(writer)

    return change


def set_token(number, text, kind=1):
    """Gives a token another text, and a type."""

    def change(writer):
        writer.kv_data[0][f"{KEY}tokens"].value[number] = text
        writer.kv_data[0][f"{KEY}token_type"].value[number] = kind

    return change


@pytest.mark.parametrize("pre, expected", [("smollm", "1|2|th|e"), ("gpt-2", "12|th|e"), ("llama-bpe", "12|the")])
def test_texts_are_split_as_the_file_says(tmp_path, pre, expected):
    """smollm has each digit alone. llama-bpe keeps a piece that is a token whole, though no pair makes it."""
    change = several(
        set_key(f"{KEY}pre", pre),
        set_token(262, "12"),
        set_key(f"{KEY}merges", ["t h", "i n", "1 2"]),
        drop_key(f"{KEY}add_bos_token"),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tokenizer = gguf.load(changed(tmp_path, change)).tokenizer
    found = tokenizer.convert_ids_to_tokens(tokenizer("12the")["input_ids"])
    assert "|".join(found) == ("<s>|" if pre == "llama-bpe" else "") + expected


def test_a_split_that_is_missing_is_llama_cpps_default(tmp_path):
    path = changed(tmp_path, several(drop_key(f"{KEY}pre"), set_token(262, "12"), set_key(f"{KEY}merges", ["1 2"])))
    with pytest.warns(UserWarning, match="'tokenizer.ggml.pre': it is missing, and llama.cpp's default splits texts"):
        tokenizer = gguf.load(path).tokenizer
    # GPT-2's way keeps numbers together, and the default has threes of them.
    assert tokenizer.tokenize("3312") == ["3", "3", "1", "2"] and tokenizer.tokenize("33312") == ["3", "3", "3", "12"]


def test_control_tokens_of_any_letters_stay_whole(tmp_path):
    """DeepSeek's have letters that no byte is spelled with."""
    text = "<\uff5cbegin\u2581of\u2581sentence\uff5c>"
    path = changed(tmp_path, several(set_token(256, text, 3), set_token(262, "<t\xefnk>", 4)))
    tokenizer = gguf.load(path).tokenizer
    assert len(tokenizer) == ROWS and tokenizer.bos_token == text
    assert tokenizer.encode(f"{text}the<t\xefnk>") == [256, 259, 262]
    assert (
        tokenizer.decode([256, 259]) == f"{text}the" and tokenizer.decode([256, 259], skip_special_tokens=True) == "the"
    )


def test_texts_of_templates_are_no_plain_text(tmp_path):
    """A file that calls <|im_end|> plain text, and another token its end: generation ends at both."""
    path = changed(tmp_path, several(set_token(262, "<|im_end|>"), set_token(263, "<|fim_prefix|>")))
    model, tokenizer = gguf.load(path)
    assert model.generation_config.eos_token_id == [257, 262]
    assert tokenizer.encode("the<|im_end|><|fim_prefix|>") == [259, 262, 263]
    ends = several(
        *map(set_token, (262, 263, 264), ("<|end|>", "<|return|>", "<|call|>")), set_key(f"{KEY}eom_token_id", 9)
    )
    assert gguf.load(changed(tmp_path, ends)).model.generation_config.eos_token_id == [257, 9, 263, 264]
    tags = several(set_token(262, "<|tool_response>"), set_token(263, "<eos>"), set_key(f"{KEY}eos_token_id", 263))
    model, tokenizer = gguf.load(changed(tmp_path, several(tags, set_token(257, "</s>"))))
    assert model.generation_config.eos_token_id == [263, 262] and tokenizer.encode("</s>") != [257]


def test_plain_text_that_fills_texts_stays_plain(tmp_path):
    """Conversions of Llama 3 exist that name the first token for it, which is "!"."""
    change = several(set_key(f"{KEY}padding_token_id", 0), set_token(262, "!!"), set_key(f"{KEY}merges", ["! !"]))
    model, tokenizer = gguf.load(changed(tmp_path, change))
    assert model.config.pad_token_id == 0 and tokenizer.pad_token is None
    assert tokenizer.encode("!!!") == [262, 0] and tokenizer.decode([262, 0], skip_special_tokens=True) == "!!!"


def test_tokens_without_texts_of_their_own(tmp_path):
    """Google's Gemma 4 with 4 bits has three such tokens (llama.cpp#25739)."""
    path = changed(tmp_path, several(*(set_token(number, "") for number in (262, 263)), set_token(264, "the")))
    with pytest.warns(
        UserWarning, match=r"'tokenizer.ggml.tokens': other tokens have the texts of 264 \('the'\), which"
    ):
        tokenizer = gguf.load(path).tokenizer
    assert len(tokenizer) == ROWS and tokenizer.encode("the") == [259]
    assert tokenizer.convert_ids_to_tokens([262, 264]) == ["[EMPTY_262]", "[SAME_264]"]


def test_more_numbers_than_tokens(tmp_path):
    change = several(set_key(f"{KEY}scores", [0] * (ROWS + 5)), set_key(f"{KEY}token_type", [1] * 256 + [3] * ROWS))
    tokenizer = gguf.load(changed(tmp_path, change)).tokenizer
    assert len(tokenizer) == ROWS and tokenizer.encode("the</s>") == [259, 257]


def test_a_first_token_that_is_missing_is_left_out(tmp_path):
    change = several(drop_key(f"{KEY}bos_token_id"), set_key(f"{KEY}add_bos_token", True))
    with pytest.warns(UserWarning, match="'tokenizer.ggml.add_bos_token': there is no such token; it is left out"):
        tokenizer = gguf.load(changed(tmp_path, change)).tokenizer
    assert tokenizer.encode("the") == [259] and tokenizer.bos_token is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gone = (drop_key(f"{KEY}{key}") for key in ("bos_token_id", "add_bos_token"))
        change = several(set_key(f"{KEY}pre", "llama-bpe"), *gone)
        assert gguf.load(changed(tmp_path, change)).tokenizer.encode("the") == [259]


def sentencepiece(**keys):
    """A vocabulary whose pairs are joined by scores, with other keys."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *"adehnt", "th", "the"]
    tokens += ["\u2581the", "at", "<|user|>", "ha"]
    tokens += [f"<unused{number}>" for number in range(ROWS - len(tokens))]
    scores = [0.0] * 259 + [-1000.0] * 7 + [-1.0, -2.0, -3.0, -5.0, 0.0, -4.0] + [0.0] * (ROWS - 272)
    kinds = [2, 3, 3] + [6] * 256 + [1] * 11 + [3, 1] + [5] * (ROWS - 272)
    made = {"model": "llama", "tokens": tokens, "scores": scores, "token_type": kinds, **keys}
    gone = ("pre", "merges", "bos_token_id", "eos_token_id", "add_bos_token")
    return several(
        *(drop_key(f"{KEY}{key}") for key in gone), *(set_key(f"{KEY}{key}", value) for key, value in made.items())
    )


def test_sentencepiece_has_llama_cpps_defaults(tmp_path):
    """The first token is 1, the last 2, unknown ones 0, and texts begin with the first and a space. Each text between
    special tokens begins with a space too, as in Llama's own tokenizer then. "ha" has a better score than "at"."""
    model, tokenizer = gguf.load(changed(tmp_path, sentencepiece()))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (1, 2, 0)
    assert model.config.bos_token_id == 1 and model.generation_config.eos_token_id == [2]
    found = tokenizer("the hat</s>the\xf1")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(found) == (
        ["<s>", "\u2581the", "\u2581", "ha", "t", "</s>", "\u2581the", "<0xC3>", "<0xB1>"]
    )
    assert tokenizer.decode(found[1:5]) == "the hat"
    tokenizer = gguf.load(changed(tmp_path, sentencepiece(add_space_prefix=False, add_bos_token=False))).tokenizer
    assert tokenizer.tokenize(" the") == ["\u2581the"] and tokenizer.tokenize("the") == ["the"]
    assert tokenizer.decode(tokenizer.encode(" the")) == " the"


def test_special_tokens_of_phi_3_take_the_spaces_after_them(tmp_path):
    change = several(sentencepiece(), set_key("general.name", "Phi-3-mini"))
    tokenizer = gguf.load(changed(tmp_path, change)).tokenizer
    tokens = tokenizer.convert_ids_to_tokens(tokenizer.encode("<|user|>\n the<s> the", add_special_tokens=False))
    assert tokens == ["<|user|>", "\u2581the", "<s>", "\u2581", "\u2581the"]


def test_transformers_that_is_too_old_makes_no_model(tmp_path, monkeypatch):
    path = changed(tmp_path, lambda writer: None)
    version(monkeypatch, "5.3.0.dev0")
    with pytest.raises(ImportError, match="metalcore.gguf.load needs transformers 5.4 or newer, and this is 5.3.0"):
        gguf.load(path)


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
