"""A call of generate goes on from what an earlier one left, with the tokens that it has without that."""

import pytest
import torch
from small_models import MODELS, prompts, small_model

import metalcore
from metalcore.generation import PrefixCache, stream

NEW = 8


@pytest.fixture(scope="module")
def llama(device):
    return small_model("llama", device)


@pytest.fixture
def read(monkeypatch):
    """The tokens (rows × columns) of each pass through the model."""
    from metalcore.generation._run import Run

    shapes, forward = [], Run._forward

    def watched(self, tokens, *arguments):
        shapes.append(tuple(tokens.shape))
        return forward(self, tokens, *arguments)

    monkeypatch.setattr(Run, "_forward", watched)
    return shapes


def generated(model, rows, **options):
    return metalcore.generate(model, rows, max_new_tokens=NEW, **options).tolist()


@pytest.mark.parametrize("family", MODELS)
def test_a_conversation_goes_on(family, device, read):
    model, cache = small_model(family, device), PrefixCache()
    row = prompts("cpu", 1)[0].tolist()
    for turn, more in enumerate(([], [3, 1, 4], [5], [9, 2, 6, 5, 3])):
        row = row + more
        expected = generated(model, [row])
        read.clear()
        assert generated(model, [row], cache=cache) == expected
        # The last token that was drawn has been read by nobody.
        assert read[0] == (1, len(row) if turn == 0 else len(more) + 1)
        assert cache.reused == [len(row) - read[0][1]]
        row = row + expected[0]


def test_rows_that_begin_alike(llama, device, read):
    """One row was read; four have its beginning, shorter or longer, and are padded."""
    cache, row = PrefixCache(), prompts("cpu", 1, 20)[0].tolist()
    generated(llama, [row], cache=cache)
    rows = [[*row[:15], 1, 2, 3], [*row[:12], 7], row, row[:17]]
    expected = generated(llama, rows)
    read.clear()
    assert generated(llama, rows, cache=cache) == expected
    assert read[0] == (4, 3) and cache.reused == [15, 10, 17, 14]
    # Each row takes the row that agrees with it for longest. Drawn tokens count as well.
    rows = [rows[1] + expected[1] + [4], [*rows[0][:16], 8, 8], [5, 5]]
    expected = generated(llama, rows)
    read.clear()
    assert generated(llama, rows, cache=cache) == expected
    assert read[0] == (3, 2) and cache.reused == [len(rows[0]) - 2, 16, 0]
    assert generated(llama, rows, cache=cache) == expected and read[-NEW] == (3, 1)


def test_nothing_in_common(llama, device, read):
    cache = PrefixCache()
    generated(llama, [[1, 2, 3, 4]], cache=cache)
    assert generated(llama, [[2, 2, 3, 4]], cache=cache) == generated(llama, [[2, 2, 3, 4]])
    assert read[NEW] == (1, 4) and cache.reused == [0]
    # A row that has none makes all be read.
    rows = [[2, 2, 3, 4], [9, 8, 7, 6]]
    read.clear()
    assert generated(llama, rows, cache=cache) == generated(llama, rows)
    assert read[0] == (2, 4)


def test_streams_that_end_early(llama, device, read):
    cache, row = PrefixCache(), prompts("cpu", 1)[0].tolist()
    some = stream(llama, [row], max_new_tokens=NEW, cache=cache)
    drawn = [next(some)[0] for _ in range(4)]
    some.close()
    more = row + drawn + [3]
    read.clear()
    assert generated(llama, [more], cache=cache) == generated(llama, [more])
    assert read[0] == (1, 2)
    # A call that fails leaves what was there.
    with pytest.raises(TypeError, match="returned no tensor"):
        generated(llama, [[*more, 1, 1]], cache=cache, logits_processor=lambda tokens, logits: None)
    assert generated(llama, [more], cache=cache) == generated(llama, [more])
    assert cache.reused == [len(more) - 1]


def test_penalties_see_the_whole_prompt(llama, device):
    cache, row = PrefixCache(), prompts("cpu", 1)[0].tolist()
    generated(llama, [row], cache=cache)
    expected = generated(llama, [[*row, 3]], repetition_penalty=0.5)
    assert expected != generated(llama, [[*row, 3]])
    assert generated(llama, [[*row, 3]], repetition_penalty=0.5, cache=cache) == expected and cache.reused == [9]


def test_of_another_model(llama, device):
    cache, row = PrefixCache(), prompts("cpu", 1)[0].tolist()
    generated(llama, [row], cache=cache)
    other = small_model("qwen2", device)
    with pytest.raises(ValueError, match="the PrefixCache holds keys and values of another model; clear"):
        generated(other, [row], cache=cache)
    cache.clear()
    assert generated(other, [row], cache=cache) == generated(other, [row]) and cache.reused == [0]
    mamba = small_model("mamba", device)
    with pytest.raises(ValueError, match="takes no PrefixCache: its states are those of whole texts"):
        generated(mamba, [row], cache=PrefixCache())


@pytest.mark.only_on("mps")
def test_a_model_that_moves(device):
    model, cache, row = small_model("llama", device), PrefixCache(), [1, 2, 3]
    expected = generated(model, [row], cache=cache)
    model.to("cpu")
    assert generated(model, [row], cache=cache) == expected and cache.reused == [0]
    model.to(torch.float64)
    assert generated(model, [row], cache=cache) == expected and cache.reused == [2]
