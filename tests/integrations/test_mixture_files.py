"""Mixtures of experts through from_pretrained: MLX's checkpoints, and what save_pretrained writes of them."""

import json

import pytest
import torch
from test_packed_files import VOCABULARY, loaded, mlx, mlx_scaled, mxfp4

import metalcore
from metalcore.integrations.transformers import note_layers

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
EXPERTS, WIDTH = 3, 96


def model_of(family):
    torch.manual_seed(0)
    if family == "gpt_oss":
        config = transformers.GptOssConfig(
            **SIZES | {"intermediate_size": WIDTH}, num_local_experts=EXPERTS, num_experts_per_tok=2
        )
        return transformers.GptOssForCausalLM(config)
    if family == "mixtral":
        config = transformers.MixtralConfig(**SIZES, num_local_experts=EXPERTS, num_experts_per_tok=2)
        return transformers.MixtralForCausalLM(config)
    config = transformers.Qwen3MoeConfig(
        **SIZES, num_experts=EXPERTS, num_experts_per_tok=2, moe_intermediate_size=WIDTH, mlp_only_layers=[0]
    )
    return transformers.Qwen3MoeForCausalLM(config)


def written(model, folder, family, pack, pack_router):
    """Gives experts and routers the weights that the files have. Other modules are numbers."""
    at = {"gpt_oss": "mlp.experts", "mixtral": "block_sparse_moe.switch_mlp"}.get(family, "mlp.switch_mlp")
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for number, layer in enumerate(model.model.layers):
        experts = getattr(layer.mlp, "experts", None)
        if experts is None:
            continue
        prefix, biased = f"model.layers.{number}.", hasattr(experts, "gate_up_proj_bias")
        router = "router" if biased else "gate"
        for name in [name for name in state if name.startswith(f"{prefix}mlp.experts.")]:
            del state[name]
        numbers = {}
        for part, shape in (("gate_proj", (WIDTH, 64)), ("up_proj", (WIDTH, 64)), ("down_proj", (64, WIDTH))):
            each = [pack(*shape) for _ in range(EXPERTS)]
            numbers[part] = torch.stack([weight for _, weight in each]).float()
            state |= {
                f"{prefix}{at}.{part}.{leaf}": torch.stack([tensors[leaf] for tensors, _ in each])
                for leaf in each[0][0]
            }
        if biased:
            up = torch.stack([numbers["gate_proj"], numbers["up_proj"]], 2).flatten(1, 2)
            experts.gate_up_proj.data, experts.down_proj.data = up.mT.contiguous(), numbers["down_proj"].mT.contiguous()
            bias = experts.gate_up_proj_bias.data.normal_()
            parts = {"gate_proj": bias[:, ::2], "up_proj": bias[:, 1::2], "down_proj": experts.down_proj_bias.data}
            state |= {f"{prefix}{at}.{part}.bias": each.clone() for part, each in parts.items()}
        else:
            experts.gate_up_proj.data = torch.cat([numbers["gate_proj"], numbers["up_proj"]], 1)
            experts.down_proj.data = numbers["down_proj"]
        tensors, weight = pack_router(EXPERTS, 64)
        getattr(layer.mlp, router).weight.data = weight.float()
        del state[f"{prefix}mlp.{router}.weight"]
        at_router = "block_sparse_moe" if family == "mixtral" else "mlp"
        state |= {f"{prefix}{at_router}.{router}.{leaf}": tensor for leaf, tensor in tensors.items()}
    settings = {"quantization": {"bits": 4, "group_size": 32}}
    safetensors.save_file(state, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(model.config.to_dict() | settings))
    return state


FORMATS = {
    "4 bits": (lambda rows, length: mlx(rows, length, 4), metalcore.nn.AffineExperts),
    "6 bits": (lambda rows, length: mlx(rows, length, 6), metalcore.nn.AffineExperts),
    "mxfp4": (mxfp4, metalcore.nn.QuantizedExperts),
    "mxfp8": (lambda rows, length: mlx_scaled(rows, length, "mxfp8"), metalcore.nn.ScaledExperts),
}


@pytest.mark.parametrize(
    ("family", "format"),
    [
        *(("qwen3_moe", format) for format in ("4 bits", "mxfp4", "mxfp8")),
        ("mixtral", "6 bits"),
        *(("gpt_oss", format) for format in ("4 bits", "mxfp4")),
    ],
)
def test_experts(device, tmp_path, family, format):
    """Logits of few and of many tokens are those of the model with the files' numbers."""
    reference, (pack, kind) = model_of(family).eval(), FORMATS[format]
    written(reference, tmp_path, family, pack, lambda rows, length: mlx(rows, length, 8))
    model = loaded(tmp_path, device, dtype=torch.float32).eval()
    experts = [module for module in model.modules() if isinstance(module, metalcore.nn.QuantizedExperts)]
    assert len(experts) == (2 if family != "qwen3_moe" else 1) and all(type(one) is kind for one in experts)
    assert not [name for name, _ in model.named_modules() if "switch_mlp" in name]
    for count in (2, 40):
        tokens = torch.randint(VOCABULARY, (1, count))
        with torch.no_grad():
            expected, found = reference(tokens).logits, model(tokens.to(device)).logits.cpu()
        assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())
    model.save_pretrained(tmp_path / "again")
    again = loaded(tmp_path / "again", device, dtype=torch.float32).eval()
    ours, theirs = (dict(one.named_buffers()) | dict(one.named_parameters()) for one in (model, again))
    assert ours.keys() == theirs.keys()
    assert all(each.dtype == theirs[name].dtype and torch.equal(each, theirs[name]) for name, each in ours.items())
    with torch.no_grad():
        assert torch.equal(again(tokens.to(device)).logits.cpu(), found)


def test_saved_experts(device, tmp_path):
    """Experts with blocks of scales and one factor each are read as they were written, or refused."""
    model = model_of("qwen3_moe")
    experts = model.model.layers[1].mlp.experts
    gate, up = experts.gate_up_proj.detach().chunk(2, 1)

    def packed(numbers, *how):
        each = [metalcore.quantize_scaled(one, *how) for one in numbers]
        tensors = {
            name: None if getattr(each[0], name) is None else torch.stack([getattr(one, name) for one in each])
            for name in ("packed", "scales", "factor")
        }
        return each[0]._replace(**tensors)

    weights = packed(gate, "e4m3", (32, 64)), packed(up, "nvfp4"), packed(experts.down_proj.detach(), "e5m2", (0, 0))
    model.model.layers[1].mlp.experts = metalcore.nn.ScaledExperts(*weights)
    note_layers(model)
    model.to(device).save_pretrained(tmp_path)
    again = loaded(tmp_path, device, dtype=torch.float32).model.layers[1].mlp.experts
    for name, tensor in model.model.layers[1].mlp.experts.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name])
    assert again.formats == [("e4m3", (32, 64)), ("nvfp4", ()), ("e5m2", (0, 0))]
    state, config = safetensors.load_file(tmp_path / "model.safetensors"), tmp_path / "config.json"
    at = "model.layers.1.mlp.experts"
    safetensors.save_file(state | {f"{at}.up.factor": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"up: factor \[2\] has no matrices of 3 experts"):
        loaded(tmp_path, device)
    settings = json.loads(config.read_text())
    del settings["quantization_config"]["layers"][f"{at}.up"]
    config.write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=f"{at}: config.json has no format of its up"):
        loaded(tmp_path, device)
    model.model.layers[1].mlp.experts.activation = torch.mul
    with pytest.raises(ValueError, match="cannot write ScaledExperts with gates of its own"):
        model.save_pretrained(tmp_path)


PREFIX = "model.layers.1.mlp.switch_mlp."


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop(f"{PREFIX}up_proj.biases"), "switch_mlp.up_proj: the file has its scales, and no biases"),
        (lambda s: s.pop(f"{PREFIX}up_proj.weight"), "switch_mlp.up_proj: the file has no weight"),
        (
            lambda s: s.update({key: s[key][:2].clone() for key in list(s) if f"{PREFIX}down_proj" in key}),
            r"switch_mlp.down_proj: scales \[2, 64, 3\] has no matrices of 3 experts",
        ),
        (
            lambda s: s.update({f"{PREFIX}gate_proj.weight": s[f"{PREFIX}gate_proj.weight"][:, :90].clone()}),
            "switch_mlp.gate_proj: weight .* do not go together",
        ),
        (
            lambda s: s.update(
                {key.replace("layers.1", "layers.0"): s[key].clone() for key in list(s) if PREFIX in key}
            ),
            "layers.0.mlp.switch_mlp: its weights are of experts, and the model has no",
        ),
    ],
)
def test_damaged(device, tmp_path, change, message):
    def pack(rows, length):
        return mlx(rows, length, 4)

    state = written(model_of("qwen3_moe"), tmp_path, "qwen3_moe", pack, pack)
    change(state)
    safetensors.save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=message):
        loaded(tmp_path, device)
