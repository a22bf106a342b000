"""Penalties, biases and processors of logits change the tokens as they do in transformers, and where it has none as
their formulas say."""

import math

import pytest
import torch
from small_models import VOCABULARY, prompts, small_model
from transformers import LogitsProcessor, LogitsProcessorList, NoRepeatNGramLogitsProcessor

import metalcore
from metalcore.generation import stream

NEW = 16


@pytest.fixture(scope="module")
def llama(device):
    return small_model("llama", device)


def generated(model, tokens, mask=None, **options):
    return metalcore.generate(model, tokens, mask, max_new_tokens=NEW, **options).tolist()


def by_transformers(model, tokens, mask=None, **options):
    mask = torch.ones_like(tokens) if mask is None else mask
    found = model.generate(
        tokens, attention_mask=mask, max_new_tokens=NEW, do_sample=False, pad_token_id=0, use_cache=True, **options
    )
    return found[:, tokens.shape[1] :].tolist()


@torch.no_grad()
def by_formula(model, tokens, presence=0.0, frequency=0.0):
    """The tokens of one row, from counts on the host."""
    text = tokens.tolist()
    counts = torch.zeros(VOCABULARY)
    for _ in range(NEW):
        logits = model(torch.tensor([text], device=tokens.device)).logits[0, -1].cpu()
        text.append(int((logits - presence * (counts > 0) - frequency * counts).argmax()))
        counts[text[-1]] += 1
    return text[len(tokens) :]


@pytest.mark.parametrize("cache", ["static", "paged", "dynamic"])
def test_repetition(llama, device, cache):
    tokens, plain = prompts(device), generated(llama, prompts(device))
    for penalty in (1.7, 0.6):
        expected = by_transformers(llama, tokens, repetition_penalty=penalty)
        assert expected != plain
        assert generated(llama, tokens, repetition_penalty=penalty, cache=cache) == expected


def test_padding_is_not_repetition(llama, device):
    tokens = prompts(device)
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    found = generated(llama, tokens, mask, repetition_penalty=3.0)
    assert found[0] == by_transformers(llama, tokens[:1, 4:], repetition_penalty=3.0)[0]
    assert found[1] == by_transformers(llama, tokens[1:], repetition_penalty=3.0)[0]


@pytest.mark.parametrize("presence, frequency", [(2.0, 0.0), (0.0, 1.5), (3.0, -1.0), (-5.0, 0.5)])
def test_presence_and_frequency(llama, device, presence, frequency):
    tokens = prompts(device)
    expected = [by_formula(llama, row, presence, frequency) for row in tokens]
    assert expected != generated(llama, tokens)
    assert generated(llama, tokens, presence_penalty=presence, frequency_penalty=frequency) == expected


def test_bias(llama, device):
    tokens, plain = prompts(device), generated(llama, prompts(device))
    forbidden = plain[0][0]
    bias = {forbidden: -math.inf, 5: 2.5}
    expected = by_transformers(llama, tokens, sequence_bias={(token,): value for token, value in bias.items()})
    found = generated(llama, tokens, logit_bias=bias)
    assert found == expected != plain and all(forbidden not in row for row in found)
    row = torch.zeros(VOCABULARY)
    row[list(bias)] = torch.tensor(list(bias.values()))
    assert generated(llama, tokens, logit_bias=row) == expected
    both = torch.stack([row, torch.zeros(VOCABULARY)]).to(device)
    assert generated(llama, tokens, logit_bias=both) == [expected[0], plain[1]]
    assert generated(llama, tokens, logit_bias={}) == plain


class Halves(LogitsProcessor):
    """transformers' kind, which writes to what it is given."""

    def __call__(self, input_ids, scores):
        scores[:, VOCABULARY // 2 :] = -math.inf
        return scores


def test_processors(llama, device):
    tokens = prompts(device)
    ours = NoRepeatNGramLogitsProcessor(2)
    expected = by_transformers(llama, tokens, no_repeat_ngram_size=2)
    assert generated(llama, tokens, logits_processor=ours) == expected
    both = LogitsProcessorList([Halves(), ours])
    expected = by_transformers(llama, tokens, logits_processor=both)
    assert max(map(max, expected)) < VOCABULARY // 2
    for given in (both, [Halves(), ours]):
        assert generated(llama, tokens, logits_processor=given) == expected
    seen = []

    def plain(given, logits):
        seen.append((tuple(given.shape), logits.dtype, given[0].tolist()))
        return -logits

    found = generated(llama, tokens, logits_processor=plain)
    assert found != generated(llama, tokens)
    assert [one[0] for one in seen] == [(2, 9 + i) for i in range(NEW)]
    assert seen[-1][2] == tokens[0].tolist() + found[0][:-1] and seen[0][1] == torch.float32


def test_all_together(llama, device):
    """In transformers' order; logprobs are the model's own in any case."""
    tokens = prompts(device)
    expected = by_transformers(
        llama,
        tokens,
        repetition_penalty=1.5,
        sequence_bias={(7,): 3.0},
        logits_processor=LogitsProcessorList([Halves()]),
    )
    options = {"repetition_penalty": 1.5, "logit_bias": {7: 3.0}, "logits_processor": Halves()}
    found, logprobs = metalcore.generate(llama, tokens, max_new_tokens=NEW, return_logprobs=True, **options)
    assert found.tolist() == expected
    with torch.no_grad():
        own = llama(torch.cat([tokens, found], 1)).logits[:, 8:-1].log_softmax(-1)
    torch.testing.assert_close(logprobs, own.gather(2, found[..., None])[..., 0], rtol=1e-4, atol=1e-4)
    assert list(stream(llama, tokens, max_new_tokens=NEW, **options)) == found.T.tolist()


@pytest.mark.only_on("mps")
def test_penalties_send_nothing_for_a_token(llama, device, monkeypatch):
    """A step with penalties runs no operator that copies between the host and the device."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from metalcore.generation._run import Run

    copies = []

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            found = function(*arguments, **(options or {}))
            devices = {x.device.type for x in (*arguments, found) if isinstance(x, torch.Tensor) and x.dim()}
            if len(devices) > 1 or function is torch.ops.aten._local_scalar_dense.default:
                copies.append(function)
            return found

    step = Run._step

    def watched(self):
        with Copies():
            step(self)

    monkeypatch.setattr(Run, "_step", watched)
    options = {"repetition_penalty": 1.5, "presence_penalty": 1.0, "frequency_penalty": 1.0, "logit_bias": {7: 3.0}}
    generated(llama, prompts(device), **options)
    assert copies == []
    generated(llama, prompts(device), logits_processor=lambda tokens, logits: logits.cpu().to(device))
    assert len(copies) == 2 * (NEW - 1)


def test_what_is_refused(llama, device):
    for wrong in (0, -1.0, math.nan, math.inf, "2", True, None):
        with pytest.raises(ValueError, match="generate: repetition_penalty must be "):
            generated(llama, prompts(device), repetition_penalty=wrong)
    for name in ("presence_penalty", "frequency_penalty"):
        with pytest.raises(ValueError, match=f"generate: {name} must be a finite number, not nan"):
            generated(llama, prompts(device), **{name: math.nan})
    for wrong, message in (
        ({VOCABULARY: 1.0}, f"the tokens 0 to {VOCABULARY - 1}, and not {VOCABULARY}"),
        ({-1: 1.0}, "and not -1"),
        ({"a": 1.0}, "and not 'a'"),
        ({3: math.nan}, "logit_bias of token 3 must be a number or -inf, not nan"),
        ({3: "a"}, "logit_bias of token 3"),
        (torch.zeros(3), rf"logit_bias must be of shape \({VOCABULARY},\) or \(2, {VOCABULARY}\), not \(3,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            generated(llama, prompts(device), logit_bias=wrong)
    with pytest.raises(TypeError, match="logit_bias must be a mapping or a tensor, not list"):
        generated(llama, prompts(device), logit_bias=[1.0])
    for wrong in (3, ["a"], [None]):
        with pytest.raises(TypeError, match="logits_processor must be functions, not "):
            generated(llama, prompts(device), logits_processor=wrong)

    def nothing(tokens, logits):
        pass

    with pytest.raises(TypeError, match="logits_processor nothing returned no tensor: NoneType"):
        generated(llama, prompts(device), logits_processor=nothing)
    with pytest.raises(
        ValueError, match=rf"returned a tensor of shape \(97,\), and the logits have \(2, {VOCABULARY}\)"
    ):
        generated(llama, prompts(device), logits_processor=lambda tokens, logits: logits[0])
    with pytest.raises(TypeError, match="unknown options penalty"):
        stream(llama, prompts(device), penalty=2.0)
