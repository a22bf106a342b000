"""Packed layers that are given the same tensor are one product of a token, and are otherwise as they were."""

import copy

import pytest
import torch
from small_models import prompts, small_model

import metalcore
from metalcore.generation import stream
from metalcore.nn import QuantizedLinear
from metalcore.quant import quantize_model
from metalcore.recording import record

pytest.importorskip("gguf")
NEW = 6


def packed(family, device, **types):
    model = small_model(family, device)
    quantize_model(model, "q8_0", types=types)
    return model


def without_joining(patch):
    patch.setattr("metalcore.generation._run.join", lambda model: None)


def dispatches_of_a_token(model, rows, device):
    """Of products with packed weights, of all metalcore's kernels, and of PyTorch's operators."""
    tokens = stream(model, prompts(device, rows), max_new_tokens=4)
    next(tokens), next(tokens)
    _, recording = record(next, tokens)
    products = [kernel for kernel in recording.kernels if kernel.startswith("quant_mv")]
    return len(products), len(recording.dispatches), len(recording.torch_steps)


@pytest.mark.parametrize("family, rows", [("llama", 1), ("llama", 2), ("qwen2", 1), ("gemma2", 3)])
def test_a_token_has_fewer_dispatches_and_the_same_bits(device, monkeypatch, family, rows):
    model = packed(family, device)
    with monkeypatch.context() as patch:
        without_joining(patch)
        before = dispatches_of_a_token(model, rows, device)
        expected = metalcore.generate(model, prompts(device, rows), max_new_tokens=NEW, return_logprobs=True)
    after = dispatches_of_a_token(model, rows, device)
    found = metalcore.generate(model, prompts(device, rows), max_new_tokens=NEW, return_logprobs=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected))
    if device != "cpu":
        layers = 2  # each had seven products and has four; the output has one
        assert (before[0], after[0]) == (7 * layers + 1, 4 * layers + 1)
        assert after[1] <= before[1] - 3 * layers and after[2] <= before[2]


def test_weights_of_other_types_stay_by_themselves(device):
    model = packed("llama", device, v_proj="Q4_0", up_proj="Q4_0")
    metalcore.generate(model, prompts(device), max_new_tokens=2)
    layer = model.model.layers[0]
    assert layer.self_attn.q_proj.joined is layer.self_attn.k_proj.joined is not None
    assert layer.self_attn.v_proj.joined is layer.mlp.gate_proj.joined is None


def test_layers_are_as_they_were(device, tmp_path):
    """The state_dict, saved files, copies and moves have each weight by itself."""
    model = packed("llama", device)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    metalcore.gguf.save_gguf(model, tmp_path / "before")
    tokens = metalcore.generate(model, prompts(device), max_new_tokens=NEW)

    def same(other):
        state = other.state_dict()
        assert state.keys() == before.keys()
        assert all(torch.equal(state[name], value) for name, value in before.items())
        assert torch.equal(metalcore.generate(other, prompts(device), max_new_tokens=NEW), tokens)

    same(copy.deepcopy(model))
    same(model.to("cpu").to(device))
    metalcore.gguf.save_gguf(model, tmp_path / "after")
    assert (tmp_path / "before").read_bytes() == (tmp_path / "after").read_bytes()
    model.save_pretrained(tmp_path / "saved")
    same(type(model).from_pretrained(tmp_path / "saved").to(device))
    torch.save(model.state_dict(), tmp_path / "state")
    fresh = packed("llama", device)
    metalcore.generate(fresh, prompts(device), max_new_tokens=1)
    fresh.model.layers[0].mlp.up_proj.packed.zero_()
    fresh.load_state_dict(torch.load(tmp_path / "state"))
    same(fresh)


class _Pair(torch.nn.Module):
    """Two layers, of which the second may be given something else."""

    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = (QuantizedLinear(32, 8, "Q8_0", bias=False) for _ in range(2))
        for number, layer in enumerate((self.gate_proj, self.up_proj)):
            plain = torch.nn.Linear(32, 8, bias=False)
            torch.nn.init.normal_(plain.weight, generator=torch.Generator().manual_seed(number))
            layer.packed = QuantizedLinear.from_linear(plain, "Q8_0").packed


@pytest.fixture
def pair(device):
    from metalcore.quant._joined import join

    made = _Pair().to(device)
    alone = copy.deepcopy(made)
    join(made)
    assert made.gate_proj.joined is not None
    return made, alone


def test_what_is_not_the_same_tensor_is_multiplied_by_itself(pair, device):
    ours, alone = pair
    x, y = torch.randn(2, 2, 32).to(device)

    def same(gate, up):
        assert torch.equal(ours.gate_proj(gate), alone.gate_proj(gate))
        assert torch.equal(ours.up_proj(up), alone.up_proj(up))

    same(x, x)
    x.mul_(2)  # the same tensor with other numbers
    assert torch.equal(ours.gate_proj(x), alone.gate_proj(x))
    x.mul_(2)
    assert torch.equal(ours.up_proj(x), alone.up_proj(x))
    assert not ours.gate_proj.joined.together
    same(x, y)


def test_gradients_and_many_rows_are_multiplied_one_by_one(pair, device):
    ours, alone = pair
    many = torch.randn(9, 32).to(device)
    x = torch.randn(2, 32).to(device).requires_grad_()
    for given in (many, x):
        found = [model.gate_proj(given) * model.up_proj(given) for model in pair]
        assert torch.equal(*found) and ours.gate_proj.joined.pending is None
    gradients = [torch.autograd.grad(each.sum(), x)[0] for each in found]
    assert torch.equal(*gradients)
    ours.gate_proj.packed = ours.gate_proj.packed.clone()  # it lies elsewhere
    with torch.no_grad():
        assert torch.equal(ours.gate_proj(x), alone.gate_proj(x))
        assert ours.gate_proj.joined.pending is None
