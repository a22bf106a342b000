"""Modules whose weights stay packed."""

import copy

import pytest
import torch

from metalcore import dequantize, nn
from metalcore.quant import quantize
from metalcore.quant._layers import TiedLinear

pytest.importorskip("gguf")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("type", ["Q4_K", "Q6_K", "Q8_0"])
def test_linear(device, type, bias):
    plain = torch.nn.Linear(256, 12, bias=bias).to(device)
    ours = nn.QuantizedLinear.from_linear(plain, type)
    plain.weight.data = dequantize(ours.packed, type)
    for x in (torch.randn(3, 256, device=device), torch.randn(2, 10, 256, device=device)):
        torch.testing.assert_close(ours(x), plain(x), rtol=1e-4, atol=1e-5)
    assert [name for name, _ in ours.named_parameters()] == ["bias"] * bias
    assert f"type={type}" in repr(ours)


def test_embedding(device):
    plain = torch.nn.Embedding(20, 256, device=device, dtype=torch.float16)
    ours = nn.QuantizedEmbedding.from_embedding(plain, "Q5_K")
    plain.weight.data = dequantize(ours.packed, "Q5_K", dtype=torch.float16)
    indices = torch.tensor([[3, 19], [0, 3]], device=device)
    assert torch.equal(ours(indices), plain(indices))


def test_embedding_that_scales_its_rows(device):
    """As transformers' of Gemma: the scale is rounded to the dtype of the rows."""
    plain = torch.nn.Embedding(20, 256, device=device, dtype=torch.bfloat16)
    plain.scalar_embed_scale = 256**0.5 + 0.1
    ours = nn.QuantizedEmbedding.from_embedding(plain, "Q8_0")
    rows = dequantize(ours.packed, "Q8_0", dtype=torch.bfloat16)
    scale = torch.tensor(plain.scalar_embed_scale, device=device)
    indices = torch.tensor([[3, 19], [0, 3]], device=device)
    assert torch.equal(ours(indices), rows[indices] * scale.to(torch.bfloat16))
    assert "scale=16.125" in repr(ours)


def test_conversions_of_a_module_convert_what_its_embedding_returns(device):
    plain = torch.nn.Embedding(20, 256, device=device)
    plain.scalar_embed_scale = 32.3
    tokens = torch.arange(20, device=device)
    model = torch.nn.Sequential(nn.QuantizedEmbedding.from_embedding(plain, "Q8_0"), torch.nn.Linear(256, 4))
    model = model.to(device)
    expected = plain.bfloat16()
    of_bfloat16 = nn.QuantizedEmbedding.from_embedding(expected, "Q8_0")
    of_bfloat16.packed = model[0].packed
    assert model(tokens).dtype == torch.float32
    assert model.bfloat16()(tokens).dtype == torch.bfloat16
    assert torch.equal(model[0](tokens), of_bfloat16(tokens))
    assert model.to("cpu")[0](tokens.cpu()).dtype == torch.bfloat16
    assert copy.deepcopy(model)[0].dtype == torch.bfloat16


def _gated(gate, up):
    return torch.nn.functional.silu(gate) * up


def _squares(up):
    return up.relu().square()


@pytest.mark.parametrize("bias, activation", [(True, _gated), (False, _gated), (False, _squares)])
def test_experts(device, bias, activation):
    types = ("Q4_K", "Q5_K", "Q8_0") if activation is _gated else ("Q4_K", "Q8_0")
    ours = nn.QuantizedExperts(3, 256, 32, types, bias=bias, activation=activation, device=device)
    assert ours.parts == (("gate", "up", "down") if activation is _gated else ("up", "down"))
    weights = {}
    for part, type in zip(ours.parts, types):
        shape = (3, 256, 32) if part == "down" else (3, 32, 256)
        packed = quantize(torch.randn(shape) / 16, type)
        setattr(ours, part, packed.to(device))
        weights[part] = dequantize(packed, type)
        if bias:
            torch.nn.init.normal_(getattr(ours, f"{part}_bias"))
    x, chosen = torch.randn(5, 256), torch.tensor([[0, 2], [1, 0], [2, 1], [0, 1], [2, 0]])
    share = torch.rand(5, 2)
    expected = torch.zeros(5, 256)

    def product(part, expert, x):
        shift = getattr(ours, f"{part}_bias")
        return weights[part][expert] @ x + (shift[expert].detach().cpu() if bias else 0)

    for token in range(5):
        for expert, part in zip(chosen[token], share[token]):
            width = activation(*(product(name, expert, x[token]) for name in ours.parts[:-1]))
            expected[token] += part * product("down", expert, width)
    found = ours(x.to(device), chosen.to(device), share.to(device))
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-4)

    again = nn.QuantizedExperts(3, 256, 32, types, bias=bias, device=device)
    again.load_state_dict(ours.state_dict())
    assert torch.equal(again.up, ours.up)
    others = (*types[:-1], "Q4_0")
    with pytest.raises(ValueError, match=f"packed as {', '.join(types)}, and the module is for {', '.join(others)}"):
        nn.QuantizedExperts(3, 256, 32, others, bias=bias).load_state_dict(ours.state_dict(), False)
    with pytest.raises(ValueError, match="Q4_K's blocks of 256 do not divide rows of 32"):
        nn.QuantizedExperts(3, 256, 32, "Q4_K")


def test_state_dict(tmp_path, device):
    safetensors = pytest.importorskip("safetensors.torch")

    def model(type):
        return torch.nn.Sequential(nn.QuantizedEmbedding(9, 256, type), nn.QuantizedLinear(256, 5, type)).to(device)

    saved, loaded = model("Q4_K"), model("Q4_K")
    for module in saved:
        module.packed.random_()
    torch.nn.init.normal_(saved[1].bias)
    safetensors.save_file({name: tensor.cpu() for name, tensor in saved.state_dict().items()}, tmp_path / "model")
    loaded.load_state_dict(safetensors.load_file(tmp_path / "model"))
    for ours, theirs in zip(loaded.state_dict().values(), saved.state_dict().values()):
        assert torch.equal(ours, theirs)
    # Q4_0 has as many bytes.
    with pytest.raises(ValueError, match="the weights are packed as Q4_K, and the module is for Q4_0"):
        model("Q4_0").load_state_dict(saved.state_dict())


def test_lora(device):
    """Adapters on packed weights learn what they learn on the same weights as numbers."""
    torch.manual_seed(0)
    packed = nn.QuantizedLinear.from_linear(torch.nn.Linear(64, 32, bias=False), "Q8_0").to(device)
    plain = torch.nn.Linear(64, 32, bias=False, device=device)
    plain.weight.data = dequantize(packed.packed, "Q8_0")
    plain.requires_grad_(False)
    x, target = torch.randn(40, 64).to(device), torch.randn(40, 32).to(device)
    before = torch.randn(64, 64) / 64
    losses = {}
    for name, layer in (("packed", packed), ("plain", plain)):
        adapter = torch.nn.Parameter(before.clone().to(device))
        optimizer = torch.optim.SGD([adapter], lr=1.0)
        for _ in range(5):
            loss = (layer(x + x @ adapter) - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.setdefault(name, []).append(loss.item())
    assert losses["packed"][-1] < losses["packed"][0]
    assert losses["packed"] == pytest.approx(losses["plain"], rel=1e-4)


def test_models_ask_weights_for_their_dtype_and_device(device):
    """seamless and longt5 read `layer.weight.dtype`, mamba that of its output layer."""
    embedding = nn.QuantizedEmbedding.from_embedding(torch.nn.Embedding(9, 64), "Q8_0")
    model = torch.nn.Sequential(
        embedding, nn.QuantizedLinear.from_linear(torch.nn.Linear(64, 5), "Q8_0"), TiedLinear(embedding)
    ).to(device, torch.bfloat16)
    names = [name for name, _ in model.named_parameters()], list(model.state_dict())
    for module, shape in zip(model, ((9, 64), (5, 64), (9, 64))):
        weight = module.weight
        assert (weight.dtype, weight.device, weight.shape) == (torch.bfloat16, module.packed.device, shape)
    assert names == (["1.bias"], [f"{i}.{name}" for i, name in _STATE])
    assert {module.weight.dtype for module in model.half()} == {torch.float16}


_STATE = [(0, "packed"), (0, "_extra_state"), (1, "bias"), (1, "packed"), (1, "_extra_state"), (2, "_extra_state")]


def test_errors():
    with pytest.raises(ValueError, match="Q4_K's blocks of 256 do not divide rows of 100"):
        nn.QuantizedLinear(100, 5, "Q4_K")
