"""Convolutions along time in transformers' models call causal_conv1d and its step."""

import importlib

import pytest
import torch
from models import tokens

import metalcore
from metalcore.integrations import transformers as integration

pytest.importorskip("transformers.models.lfm2")

FILES = ("mamba", "mamba2", "qwen3_next", "lfm2", "falcon_h1", "bamba", "granitemoehybrid", "nemotron_h")
OVERRIDES = ("causal_conv1d", "causal_conv1d_update")


@pytest.fixture(autouse=True)
def off():
    yield
    metalcore.disable_pytorch_overrides()


def ran():
    return {row.what.rpartition(".models.")[2]: row.ran for row in metalcore.report().rows if row.override in OVERRIDES}


@pytest.mark.parametrize("name", FILES)
def test_functions_of_transformers(device, name):
    file = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    originals = file.causal_conv1d_fn, file.causal_conv1d_update
    x, state = torch.randn(2, 3, 6, device=device, requires_grad=True), torch.randn(2, 3, 4, device=device)
    weight, bias = (torch.randn(*shape, device=device, requires_grad=True) for shape in ((3, 4), (3,)))

    def results():
        y = file.causal_conv1d_fn(x, weight, bias, activation="silu", other=1)
        with torch.no_grad():
            after = state.clone()
            step = file.causal_conv1d_update(x[..., :1], after, weight, bias, "silu")
        return [y, step, after, *torch.autograd.grad(y.square().sum(), (x, weight, bias))]

    expected = results()
    with metalcore.enable_pytorch_overrides(*OVERRIDES):
        found = results()
        for member in ("causal_conv1d_fn", "causal_conv1d_update"):
            assert ran()[f"{name}.modeling_{name}.{member}"] == 1
    assert (file.causal_conv1d_fn, file.causal_conv1d_update) == originals
    for ours, theirs in zip(found, expected):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def _mamba():
    from transformers import MambaConfig, MambaForCausalLM

    return MambaForCausalLM, MambaConfig(vocab_size=64, hidden_size=16, state_size=4, num_hidden_layers=2)


def _lfm2():
    from transformers import Lfm2Config, Lfm2ForCausalLM

    return Lfm2ForCausalLM, Lfm2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        layer_types=["conv", "full_attention"],
    )


@pytest.mark.parametrize("make", [_mamba, _lfm2], ids=["mamba", "lfm2"])
def test_models(device, make):
    """Losses, gradients and generated tokens are those of the model without patches, which the report tells."""
    cls, config = make()
    torch.manual_seed(0)
    model = cls(config).to(device)
    ids = tokens(device)

    def results():
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
        generated = model.generate(input_ids=ids, max_new_tokens=3, do_sample=False, pad_token_id=0)
        return [loss, *(g for g in gradients if g is not None)], generated

    expected, expected_tokens = results()
    with integration.patch(*OVERRIDES):
        found, generated = results()
        counts = ran()
    for member in ("causal_conv1d_fn", "causal_conv1d_update"):
        assert sum(count for what, count in counts.items() if what.endswith(member)) > 0
    assert torch.equal(generated, expected_tokens)
    for ours, theirs in zip(found, expected):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_compiled(device):
    file = importlib.import_module("transformers.models.mamba.modeling_mamba")
    x, weight = torch.randn(2, 3, 6, device=device), torch.randn(3, 4, device=device)
    with metalcore.enable_pytorch_overrides(*OVERRIDES):
        called = torch.compile(lambda x: file.causal_conv1d_fn(x, weight, other=1), fullgraph=True, backend="aot_eager")
        found = called(x)
    torch.testing.assert_close(found, metalcore.causal_conv1d(x, weight))


def test_packed_sequences(device):
    """transformers' own function refuses them without the package."""
    file = importlib.import_module("transformers.models.mamba2.modeling_mamba2")
    x, weight = torch.randn(1, 3, 6, device=device), torch.randn(3, 4, device=device)
    numbers = torch.tensor([[0, 0, 0, 1, 1, 1]], dtype=torch.int32, device=device)
    with metalcore.enable_pytorch_overrides(*OVERRIDES):
        y = file.causal_conv1d_fn(x, weight, activation="silu", seq_idx=numbers)
    assert torch.equal(y, metalcore.causal_conv1d(x, weight, None, numbers, activation="silu"))


def test_other_functions_stay(device, monkeypatch):
    file = importlib.import_module("transformers.models.mamba.modeling_mamba")

    def causal_conv1d_fn(x, weight, bias=None, activation=None, **kwargs):
        return x * weight.sum()

    monkeypatch.setattr(file, "causal_conv1d_fn", causal_conv1d_fn)
    with metalcore.enable_pytorch_overrides(*OVERRIDES):
        assert file.causal_conv1d_fn is causal_conv1d_fn
