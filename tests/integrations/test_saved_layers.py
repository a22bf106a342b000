"""Models with layers in groups, with scales on a grid, or of bitsandbytes' types, through save_pretrained and
from_pretrained: each tensor that is read must be the one that was written."""

import json

import pytest
import torch

import metalcore
from metalcore.integrations import transformers as integration

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")


def affine_weight(rows, length, bits):
    packed = torch.randint(256, (rows, length * bits // 8), dtype=torch.uint8)
    return packed, torch.rand(rows, length // 32).half(), torch.randn(rows, length // 32).half(), bits


def model_of(tie=False):
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=96,
            hidden_size=64,
            intermediate_size=160,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=tie,
        )
    )


def with_layers(device, tie):
    """Returns a model that has a layer of each kind."""
    model = model_of(tie)
    attention, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
    attention.q_proj = metalcore.nn.AffineLinear(*affine_weight(64, 64, 3), order=torch.randperm(64))
    attention.k_proj = metalcore.nn.ScaledLinear(metalcore.quantize_scaled(torch.randn(32, 64), "e4m3", (32, 32)))
    attention.v_proj = metalcore.nn.ScaledLinear(metalcore.quantize_scaled(torch.randn(32, 64), "nvfp4"))
    attention.o_proj = metalcore.nn.Linear8bitLt.from_linear(attention.o_proj, threshold=6.0)
    mlp.gate_proj = metalcore.nn.Linear4bit.from_linear(mlp.gate_proj, "fp4", 32)
    mlp.up_proj = metalcore.nn.Linear4bit.from_linear(mlp.up_proj, compress=True)
    mlp.down_proj = metalcore.nn.QuantizedLinear(160, 64, "Q8_0", bias=False)
    model.model.embed_tokens = metalcore.nn.AffineEmbedding(*affine_weight(96, 64, 8), dtype=torch.float32)
    if tie:
        from metalcore.quant._affine_layers import TiedAffineLinear

        model.lm_head = TiedAffineLinear(model.model.embed_tokens)
    integration.note_layers(model)
    return model.to(device)


def tensors_of(model):
    return dict(model.named_parameters()) | dict(model.named_buffers())


@pytest.mark.parametrize("tie", [False, True])
def test_round_trip(device, tmp_path, tie):
    model = with_layers(device, tie)
    model.save_pretrained(tmp_path / "once")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "once", device_map=str(device), dtype=torch.float32
    )
    loaded.save_pretrained(tmp_path / "twice")
    first, second = (safetensors.load_file(tmp_path / name / "model.safetensors") for name in ("once", "twice"))
    assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)
    ours, theirs = tensors_of(model), tensors_of(loaded)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype and torch.equal(tensor, theirs[name]), name
    tokens = torch.tensor([[1, 2, 3]], device=device)
    assert torch.equal(model(tokens).logits, loaded(tokens).logits)
    assert not tie or loaded.lm_head.packed is loaded.model.embed_tokens.packed


def test_damaged(device, tmp_path):
    with_layers(device, False).save_pretrained(tmp_path)
    state = safetensors.load_file(tmp_path / "model.safetensors")
    prefix = "model.layers.0."

    def refused(message, **changes):
        changed = state | {prefix + name: tensor for name, tensor in changes.items()}
        changed = {name: tensor for name, tensor in changed.items() if tensor is not None}
        safetensors.save_file(changed, tmp_path / "model.safetensors", {"format": "pt"})
        with pytest.raises(ValueError, match=message):
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path, device_map=str(device))

    refused("gate_proj: the file has no absmax", **{"mlp.gate_proj.absmax": None})
    refused("gate_proj: .*absmax must have 320 elements", **{"mlp.gate_proj.absmax": torch.ones(319)})
    refused("k_proj: scales must be", **{"self_attn.k_proj.scales": torch.ones(2, 2)})
    refused("q_proj: ", **{"self_attn.q_proj.packed": torch.zeros(64, 32, dtype=torch.uint8)})
    refused("o_proj: Linear8bitLt: SCB must be float32 with 64 elements", **{"self_attn.o_proj.SCB": torch.ones(63)})
    rows = {"self_attn.o_proj.weight_format": torch.tensor(1, dtype=torch.uint8)}
    refused("o_proj: Linear8bitLt: weight_format must be 0", **rows)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["layers"][f"{prefix}mlp.up_proj"]["format"] = "nf3"
    (tmp_path / "config.json").write_text(json.dumps(config))
    refused("up_proj: there is no format 'nf3'")
    with pytest.raises(ValueError, match="no layer of the model is packed"):
        integration.note_layers(model_of())


@pytest.mark.only_on("simulator", "mps")
def test_files_for_bitsandbytes(device, tmp_path):
    """bitsandbytes reads layers of LLM.int8 by its own configuration."""
    pytest.importorskip("bitsandbytes")
    model = model_of().half()
    for name, module in list(model.named_modules()):
        if name.endswith("_proj"):
            model.set_submodule(name, metalcore.nn.Linear8bitLt.from_linear(module, threshold=6.0))
    integration.note_layers(model)
    model.to(device).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, device_map={"": str(device)})
    tokens = torch.tensor([[1, 2, 3]], device=device)
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)
