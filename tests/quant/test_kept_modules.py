"""Modules that compute something else than packed weights would stay as they are, and the report says why."""

import copy

import pytest
import torch
from transformers import BioGptConfig, BioGptForCausalLM, T5Config, T5ForConditionalGeneration
from transformers.models.qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

import metalcore
from metalcore.nn import QuantizedExperts, QuantizedLinear
from metalcore.quant import quantize_model


class Tripled(torch.nn.Linear):
    def forward(self, x):
        return 3 * super().forward(x)


def with_own_forward():
    module = torch.nn.Linear(64, 64)
    module.forward = lambda x: x
    return module


KEPT = {
    "parametrized": (lambda: torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(64, 64)), "is no parameter"),
    "subclass": (lambda: Tripled(64, 64), "its class Tripled has a forward of its own"),
    "own forward": (with_own_forward, "its forward is another function"),
    "attention": (lambda: torch.nn.MultiheadAttention(64, 4), "MultiheadAttention reads its weight"),
    "encoder": (lambda: torch.nn.TransformerEncoderLayer(64, 4, 64), "TransformerEncoderLayer reads its weight"),
}


@pytest.mark.parametrize("case", KEPT)
def test_modules_that_compute_something_else(device, case):
    make, reason = KEPT[case]
    model = torch.nn.Sequential(make()).eval().to(device)
    x = torch.randn(3, 5, 64, device=device)
    arguments = (x, x, x) if case == "attention" else (x,)
    with torch.no_grad():
        before = model[0](*arguments)
        report = quantize_model(model, "q8_0")
        after = model[0](*arguments)
    assert not report.types and any(reason in row.reason for row in report.rows)
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_a_module_without_numbers_yet():
    report = quantize_model(torch.nn.Sequential(torch.nn.LazyLinear(64)))
    assert "has no numbers yet" in str(report)


def test_embeddings_that_change_their_rows():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens = torch.nn.Embedding(8, 64, max_norm=0.5)

        def get_input_embeddings(self):
            return self.tokens

    assert "renormalizes its rows" in str(quantize_model(Model(), "q8_0"))
    options = dict(vocab_size=96, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4)
    model = BioGptForCausalLM(BioGptConfig(**options, scale_embedding=True)).eval()
    tokens = torch.arange(12).view(2, 6)
    embedding = model.get_input_embeddings()
    expected = embedding(tokens)
    report = quantize_model(model, "q8_0")
    assert report.types and "BioGptScaledWordEmbedding has a forward of its own" in str(report)
    assert torch.equal(model.get_input_embeddings()(tokens), expected)


def test_what_a_model_keeps_in_float32(device):
    # T5's layers read the dtype of the weight of wo.
    config = T5Config(vocab_size=96, d_model=64, d_kv=16, d_ff=64, num_layers=1, num_heads=4, decoder_start_token_id=0)
    model = T5ForConditionalGeneration(config).eval().to(device)
    tokens = torch.arange(12, device=device).view(2, 6)
    with torch.no_grad():
        before = model(input_ids=tokens, decoder_input_ids=tokens).logits
        report = quantize_model(model, "q8_0")
        after = model(input_ids=tokens, decoder_input_ids=tokens).logits
    assert {row.name.rpartition(".")[2] for row in report.rows if row.reason == "the model keeps it in float32"} == {
        "wo"
    }
    assert (after - before).norm() < 0.03 * before.norm()


class Limited(Qwen3MoeExperts):
    def _apply_gate(self, gate_up):
        gate, up = gate_up.chunk(2, -1)
        return self.act_fn(gate.clamp(max=0.1)) * up


def experts(of):
    options = dict(hidden_size=64, moe_intermediate_size=32, num_experts=4)
    made = of(Qwen3MoeConfig(**options, experts_implementation="eager"))
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter)
    return made


@pytest.mark.parametrize("overrides", [False, True])
def test_experts_with_limits_or_norms(device, overrides):
    if overrides:
        metalcore.enable_pytorch_overrides("swiglu")
    try:
        model = torch.nn.ModuleDict({"plain": experts(Qwen3MoeExperts), "limited": experts(Limited)})
        model["normed"] = experts(Qwen3MoeExperts)
        model["normed"].post_expert_norm = torch.nn.RMSNorm(64)
        chosen = torch.tensor([[0, 1], [2, 3]], device=device)
        for module in model.to(device).values():  # overrides look at classes when they are used
            module(torch.randn(2, 64, device=device), chosen, torch.ones(2, 2, device=device))
        report = quantize_model(model, "q8_0")
    finally:
        metalcore.disable_pytorch_overrides()
    assert list(report.types) == ["plain"] and isinstance(model["plain"], QuantizedExperts)


def test_hooks_and_the_mode_go_over_to_the_packed_module(device):
    model = torch.nn.Sequential(torch.nn.Linear(64, 64)).to(device).eval()
    x = torch.randn(3, 64, device=device)
    plain = copy.deepcopy(model)
    model[0].register_forward_pre_hook(lambda module, args, kwargs: ((2 * args[0],), kwargs), with_kwargs=True)
    handle = model[0].register_forward_hook(lambda module, args, result: result + 1)
    quantize_model(model, "q8_0")
    quantize_model(plain, "q8_0")
    assert isinstance(model[0], QuantizedLinear) and not model[0].training
    torch.testing.assert_close(model(x), plain(2 * x) + 1)
    handle.remove()
    torch.testing.assert_close(model(x), plain(2 * x))
