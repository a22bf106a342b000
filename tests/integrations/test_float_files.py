"""Checkpoints of transformers' quantizers "fp8" and "mxfp4" through from_pretrained. Each model must compute what one
with the same weights as numbers does."""

import json

import pytest
import torch

import metalcore

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

pytestmark = pytest.mark.only_on("simulator", "mps")  # elsewhere transformers has its own kernels, or none

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def save(model, state, folder, settings):
    safetensors.save_file(state, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(model.config.to_dict() | {"quantization_config": settings}))


def loaded(folder, device, **options):
    kind = transformers.AutoModelForCausalLM
    return kind.from_pretrained(folder, device_map=str(device), dtype=torch.float32, **options)


def same(model, reference, device, size=64):
    """Logits of a few and of many rows of x, and gradients by the input."""
    reference, embedded = reference.eval(), torch.randn(1, 40, size)
    for count in (2, 40):
        x, ours = embedded[:, :count].clone().requires_grad_(), embedded[:, :count].to(device).requires_grad_()
        expected, found = reference(inputs_embeds=x).logits, model(inputs_embeds=ours).logits
        assert torch.allclose(found.detach().cpu(), expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())
        for y in (expected, found):
            y.square().sum().backward()
        assert torch.allclose(ours.grad.cpu(), x.grad, rtol=1e-3, atol=1e-3 * x.grad.abs().max().item())
        with torch.no_grad():
            again = model(inputs_embeds=ours).logits
        assert torch.allclose(again.cpu(), expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


def eight_bits(weight, block):
    """Returns a weight in blocks, their scales, and the numbers that they are."""
    made = metalcore.quantize_scaled(weight, "e4m3", block)
    return made.packed.view(torch.float8_e4m3fn), made.scales, metalcore.dequantize_scaled(made)


@pytest.mark.parametrize("experts", [False, True])
def test_fp8(device, tmp_path, experts):
    """Blocks of 32 by 32, of which rows need not be whole, as DeepSeek's and Qwen's of 128 by 128."""
    block = (32, 32)
    torch.manual_seed(0)
    if experts:
        config = transformers.Qwen3MoeConfig(**SIZES, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=96)
        reference = transformers.Qwen3MoeForCausalLM(config)
    else:
        reference = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES))
    state = {}
    for name, tensor in reference.state_dict().items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            base, _, leaf = name.rpartition(".")
            for expert, weight in enumerate(tensor):
                parts = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else ("down_proj",)
                for part, own in zip(parts, weight.chunk(len(parts))):
                    key = f"{base}.{expert}.{part}.weight"
                    state[key], state[f"{key}_scale_inv"], numbers = eight_bits(own, block)
                    own.copy_(numbers)
        elif name.endswith("_proj.weight"):
            state[name], state[f"{name}_scale_inv"], numbers = eight_bits(tensor, block)
            tensor.copy_(numbers)
        else:
            state[name] = tensor.clone()
    skipped = ["lm_head", "mlp.gate"] if experts else ["lm_head"]
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(block)}
    save(reference, state, tmp_path, settings | {"modules_to_not_convert": skipped})
    model = loaded(tmp_path, device)
    assert model.model.layers[0].self_attn.q_proj.weight.dtype is torch.float8_e4m3fn
    if experts:
        assert model.model.layers[0].mlp.experts.down_proj.dtype is torch.float8_e4m3fn
    same(model, reference, device)
    del state["model.layers.0.self_attn.q_proj.weight_scale_inv"]
    save(reference, state, tmp_path, settings | {"modules_to_not_convert": skipped})
    with pytest.raises(ValueError, match="q_proj: the file has its weight in torch.float8_e4m3fn, and no scale"):
        loaded(tmp_path, device)


def test_fp8_of_numbers(device, tmp_path):
    """transformers packs a model's weights while it reads them, and saves what it packed."""
    torch.manual_seed(0)
    reference = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES))
    reference.save_pretrained(tmp_path / "numbers")
    config = transformers.FineGrainedFP8Config(weight_block_size=(32, 32))
    model = loaded(tmp_path / "numbers", device, quantization_config=config)
    for name, module in model.named_modules():
        if getattr(module, "weight_scale_inv", None) is not None:
            scales = module.weight_scale_inv.repeat_interleave(32, 0).repeat_interleave(32, 1)
            numbers = reference.get_submodule(name).weight.data
            packed = (module.weight.float() * scales).cpu()
            assert module.weight.dtype is torch.float8_e4m3fn
            assert ((packed - numbers).abs() <= 2**-4 * numbers.abs() + 2**-10 * scales.cpu()).all()
            numbers.copy_(packed)
    same(model, reference, device)
    model.save_pretrained(tmp_path / "packed")
    tokens = torch.tensor([[1, 2, 3]], device=device)
    with torch.no_grad():
        assert torch.equal(loaded(tmp_path / "packed", device)(tokens).logits, model(tokens).logits)


def test_gpt_oss(device, tmp_path):
    torch.manual_seed(0)
    config = transformers.GptOssConfig(**SIZES, num_local_experts=3, num_experts_per_tok=2)
    reference = transformers.GptOssForCausalLM(config)
    state = {}
    for name, tensor in reference.state_dict().items():
        leaf = name.rpartition(".")[2]
        if leaf in ("gate_up_proj", "down_proj"):
            rows = tensor.mT.contiguous()
            made = [metalcore.quantize_scaled(weight * 8, "mxfp4") for weight in rows]
            state[f"{name}_blocks"] = torch.stack([each.packed.view(len(each.packed), -1, 16) for each in made])
            state[f"{name}_scales"] = torch.stack([each.scales for each in made])
            tensor.copy_(torch.stack([metalcore.dequantize_scaled(each) for each in made]).mT)
        else:
            state[name] = tensor.clone()
    save(reference, state, tmp_path, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    model = loaded(tmp_path, device)
    experts = model.model.layers[0].mlp.experts
    assert isinstance(experts, metalcore.nn.QuantizedExperts) and experts.types[0].name == "MXFP4"
    assert experts.gate.shape == (3, 160, 2 * 17)
    same(model, reference, device)
    state["model.layers.0.mlp.experts.down_proj_blocks"] = state["model.layers.0.mlp.experts.down_proj_blocks"][:, 1:]
    save(reference, {k: v.contiguous() for k, v in state.items()}, tmp_path, model.config.quantization_config.to_dict())
    with pytest.raises((ValueError, RuntimeError)):
        loaded(tmp_path, device)
