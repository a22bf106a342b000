"""python -m metalcore generate, and tokens as text."""

import pytest
from small_models import small_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import metalcore
from metalcore.cli import main
from metalcore.generation._text import Stops, Text


def letters():
    """A tokenizer of bytes, whose letters with more than one are several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    small_model("llama", vocab_size=256).save_pretrained(path)
    letters().save_pretrained(path)
    return path


@pytest.fixture
def run(folder, capsys, device):
    name = {"mps": "simulator"}.get(device, device)

    def call(*words, model=folder):
        capsys.readouterr()
        status = main(["generate", str(model), *words, "--device", name, "--dtype", "float32"])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


def test_it_prints_what_the_model_writes(run, device):
    model = small_model("llama", device, vocab_size=256)
    expected = metalcore.generate(model, letters()("Hello")["input_ids"], max_new_tokens=12)[0].tolist()
    for cache in ("static", "paged"):
        status, out, err = run("-p", "Hello", "-n", "12", "--cache", cache)
        assert (status, out) == (0, letters().decode(expected) + "\n")
        lines = err.splitlines()
        assert lines[0].startswith("prompt: 5 tokens, ") and lines[1].startswith("decode: 11 tokens, ")
        assert all(line.endswith(" tokens/s") for line in lines[:2])


def test_options(run, folder):
    drawn = [run("-p", "Hello", "-n", "12", "--temperature", "1", "--seed", seed)[1] for seed in ("1", "1", "2")]
    assert drawn[0] == drawn[1] != drawn[2]
    plain, *penalized = [
        run("-p", "Hello", "-n", "12", *words)[1]
        for words in ((), ("--repetition-penalty", "0.5"), ("--presence-penalty", "-9"), ("--frequency-penalty", "-9"))
    ]
    assert plain not in penalized
    (folder / "text").write_text("Hello")
    assert run("-p", f"@{folder / 'text'}", "-n", "5")[1] == run("-p", "Hello", "-n", "5")[1]


def test_chat(run, folder, device):
    assert run("-p", "Hi", "--chat")[::2] == (2, f"metalcore generate: {folder} has no chat template\n")
    tokenizer = letters()
    tokenizer.chat_template = "{% for message in messages %}<{{ message.content }}>{% endfor %}"
    tokenizer.save_pretrained(folder)
    try:
        assert run("-p", "Hi", "--chat", "-n", "5")[1] == run("-p", "<Hi>", "-n", "5")[1]
    finally:
        (folder / "chat_template.jinja").unlink()


def test_what_it_refuses(run, folder):
    assert run("-p", "a", model=folder / "none")[2] == (
        f"metalcore generate: {folder / 'none'}: there is no such file or folder\n"
    )
    assert "the prompt is empty" in run("-p", "")[2]
    assert run("-p", "a", "-n", "0")[2].startswith("metalcore generate: max_new_tokens must be ")
    assert f"--seed {2**70}: PyTorch's seeds" in run("-p", "a", "--seed", str(2**70))[2]
    (folder / "bytes").write_bytes(b"\xff")
    assert "bytes is no text in UTF-8: invalid start byte at byte 0" in run("-p", f"@{folder / 'bytes'}")[2]


def test_a_stop_that_begins_with_the_space_of_the_first_word():
    """SentencePiece's decoders leave that space out."""
    words = Tokenizer(models.WordLevel({"\u2581a": 0, "\u2581b": 1}, unk_token="\u2581a"))
    words.decoder = decoders.Metaspace()
    stops = Stops(frozenset(), [" b"], PreTrainedTokenizerFast(tokenizer_object=words))
    assert stops.complete([1]) and stops.complete([0, 1]) and not stops.complete([0, 0])


def test_text_comes_in_whole_letters():
    words = "naïve ☃ snow 🙂🙂 é"
    tokens = letters()(words)["input_ids"]
    text = Text(letters())
    parts = [text.push(token) for token in tokens]
    assert "".join(parts) == words and text.rest() == ""
    assert max(map(len, parts)) == 1 and "" in parts
    cut = Text(letters())
    assert "".join(cut.push(token) for token in tokens[:-1]) == words[:-1]
    assert cut.rest() == "\N{REPLACEMENT CHARACTER}"
