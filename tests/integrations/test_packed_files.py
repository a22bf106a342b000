"""Checkpoints of GPTQ, AWQ and MLX through from_pretrained. Their files are written here from the formats'
descriptions, integer by integer, and each model must compute what one with the same weights as numbers does."""

import json

import numpy
import pytest
import torch
from test_float_files import same

import metalcore
from metalcore.integrations import transformers as integration
from metalcore.quant._repack import from_awq, from_gptq

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

HIDDEN, WIDTH, VOCABULARY = 64, 160, 96


def words(numbers, bits, axis, order=None):
    """Packs integers along an axis in 32-bit words. `order` says which integer of a word's comes next."""
    numbers = numpy.moveaxis(numbers.numpy().astype(numpy.uint64), axis, -1)
    lead, count = numbers.shape[:-1], numbers.shape[-1]
    if order is not None:
        numbers = numbers.reshape(*lead, -1, len(order))[..., order].reshape(*lead, count)
    result = numpy.zeros((*lead, count * bits // 32 + 1), numpy.uint64)
    for i in range(count):
        at = numbers[..., i] << numpy.uint64(i * bits % 32)
        result[..., i * bits // 32] |= at & numpy.uint64(0xFFFFFFFF)
        result[..., i * bits // 32 + 1] |= at >> numpy.uint64(32)
    return torch.from_numpy(numpy.moveaxis(result[..., :-1].astype(numpy.uint32).view(numpy.int32), -1, axis).copy())


def drawn(rows, length, bits, group, symmetric=False):
    """Returns integers, scales and zero points of groups."""
    groups = -(length // -group)
    zeros = torch.randint(1, 2**bits, (rows, groups)) if not symmetric else torch.full((rows, groups), 2 ** (bits - 1))
    return torch.randint(2**bits, (rows, length)), torch.rand(rows, groups).half() / 2**bits / 4, zeros


def gptq(rows, length, bits=4, group=32, order=False, symmetric=False, less_one=True):
    """Returns the tensors, and the weight that they are: scale * (q - zero)."""
    q, scales, zeros = drawn(rows, length, bits, group, symmetric)
    g_idx = torch.arange(length) // group
    if order:
        g_idx = g_idx[torch.randperm(length)]
    weight = scales[:, g_idx].float() * (q - zeros[:, g_idx])
    tensors = {
        "qweight": words(q.T, bits, 0),
        "qzeros": words((zeros - int(less_one)).T, bits, 1),
        "scales": scales.T.contiguous(),
        "g_idx": g_idx.int(),
    }
    return tensors, weight


def awq(rows, length, bits=4, group=32):
    q, scales, zeros = drawn(rows, length, bits, group)
    order = {4: [0, 2, 4, 6, 1, 3, 5, 7], 8: [0, 2, 1, 3]}[bits]
    weight = scales.float().repeat_interleave(group, 1) * (q - zeros.repeat_interleave(group, 1))
    tensors = {
        "qweight": words(q.T, bits, 1, order),
        "qzeros": words(zeros.T, bits, 1, order),
        "scales": scales.T.contiguous(),
    }
    return tensors, weight


def compressed(rows, length, bits=4, group=32, symmetric=True, order=False):
    """Integers with signs, stored with half of their range added."""
    q, scales, zeros = drawn(rows, length, bits, group, symmetric)
    g_idx = torch.arange(length) // group
    if order:
        g_idx = g_idx[torch.randperm(length)]
    half = 2 ** (bits - 1)
    weight = scales[:, g_idx].float() * ((q - half) - (zeros - half)[:, g_idx])
    tensors = {
        "weight_packed": words(q, bits, 1),
        "weight_scale": scales,
        "weight_shape": torch.tensor([rows, length]),
    }
    if not symmetric:
        tensors["weight_zero_point"] = words(zeros, bits, 0)
    if order:
        tensors["weight_g_idx"] = g_idx.int()
    return tensors, weight


def mlx(rows, length, bits=4, group=32, dtype=torch.bfloat16):
    q, scales, _ = drawn(rows, length, bits, group)
    scales, biases = scales.to(dtype), (torch.randn(rows, length // group) / 16).to(dtype)
    weight = scales.double().repeat_interleave(group, 1) * q + biases.double().repeat_interleave(group, 1)
    return {"weight": words(q, bits, 1).view(torch.uint32), "scales": scales, "biases": biases}, weight.float()


def mxfp4(rows, length):
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    q = torch.randint(16, (rows, length))
    exponents = torch.randint(120, 125, (rows, length // 32), dtype=torch.uint8)
    numbers = table[q % 8] * torch.where(q < 8, 1, -1)
    weight = numbers * torch.exp2(exponents.float() - 127).repeat_interleave(32, 1)
    return {"weight": words(q, 4, 1).view(torch.uint32), "scales": exponents}, weight


def scaled(rows, length, format, block=None):
    """Returns a ScaledWeight, and the weight that it is."""
    made = metalcore.quantize_scaled(torch.randn(rows, length), format, block)
    return made, metalcore.dequantize_scaled(made)


def mlx_scaled(rows, length, format):
    made, _ = scaled(rows, length, format)
    small = made.scales if format == "mxfp8" else made.scales - 72  # without a factor: 2**-9 takes its place
    made = made._replace(factor=None, scales=small)
    return {"weight": made.packed.view(torch.uint32), "scales": made.scales}, metalcore.dequantize_scaled(made)


def compressed_scaled(rows, length, format, block):
    made, weight = scaled(rows, length, format, block)
    if format == "e4m3":
        scale = made.scales.view(1) if block == (0, 0) else made.scales
        return {"weight": made.packed.view(torch.float8_e4m3fn), "weight_scale": scale}, weight
    if format == "mxfp4":
        return {"weight_packed": made.packed, "weight_scale": made.scales}, weight
    divisor = (1.0 / made.factor).view(1)
    weight = metalcore.dequantize_scaled(made._replace(factor=1.0 / divisor))
    scale = made.scales.view(torch.float8_e4m3fn)
    return {"weight_packed": made.packed, "weight_scale": scale, "weight_global_scale": divisor}, weight


def model_of(tie=False):
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tie,
        attention_bias=True,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


def written(model, folder, pack, settings, embeddings=False):
    """Packs a model, and gives it the weights that it has in the files. Returns the tensors by their keys."""
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    packs = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"]
    if embeddings:
        packs += ["model.embed_tokens"] + ["lm_head"] * (not model.config.tie_word_embeddings)
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    for name in packs:
        module = model.get_submodule(name)
        tensors, weight = pack(*module.weight.shape)
        module.weight.data = weight
        del state[f"{name}.weight"]
        state |= {f"{name}.{leaf}": tensor for leaf, tensor in tensors.items()}
    if model.config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    safetensors.save_file(state, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(model.config.to_dict() | settings))
    return state


def loaded(folder, device, **options):
    integration.register_quantization()
    return transformers.AutoModelForCausalLM.from_pretrained(folder, device_map=str(device), **options)


def gptq_settings(bits, group, order=False, format="gptq"):
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": order, "checkpoint_format": format}
    return {"quantization_config": config}


AWQ = {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}}


@pytest.mark.parametrize(
    ("bits", "group", "order", "symmetric", "format"),
    [
        (4, 32, False, True, "gptq"),
        (4, 32, True, False, "gptq"),
        (8, -1, False, False, "gptq"),
        (8, 32, True, True, "gptq_v2"),
        (3, 32, False, False, "gptq"),
    ],
)
def test_gptq(device, tmp_path, bits, group, order, symmetric, format):
    reference = model_of()

    def pack(rows, length):
        size = length if group == -1 else group
        return gptq(rows, length, bits, size, order, symmetric, format == "gptq")

    written(reference, tmp_path, pack, gptq_settings(bits, group, order, format))
    model = loaded(tmp_path, device, dtype=torch.float32)
    layer = model.model.layers[0].mlp.down_proj
    assert isinstance(layer, metalcore.nn.AffineLinear) and (layer.order is not None) == order and layer.bits == bits
    expected = reference.model.layers[0].mlp.down_proj.weight
    assert torch.equal(layer.weight.cpu(), expected) and layer.scales.dtype is torch.float16
    assert torch.equal(layer.bfloat16().weight.cpu(), expected.bfloat16()) and layer.scales.dtype is torch.float16
    assert torch.equal(layer.float().weight.cpu(), expected)
    same(model, reference, device)
    assert isinstance(model.lm_head, torch.nn.Linear)


def test_awq(device, tmp_path):
    reference = model_of()
    written(reference, tmp_path, awq, AWQ)
    model = loaded(tmp_path, device, dtype=torch.float32)
    expected = reference.model.layers[0].self_attn.k_proj.weight
    assert torch.equal(model.model.layers[0].self_attn.k_proj.weight.cpu(), expected)
    same(model, reference, device)


@pytest.mark.parametrize(
    ("bits", "group", "symmetric", "order"), [(4, 32, True, False), (4, 32, False, True), (8, None, True, False)]
)
def test_compressed_tensors(device, tmp_path, bits, group, symmetric, order):
    """As the package writes them; it is not needed."""
    reference = model_of()
    weights = {"num_bits": bits, "group_size": group, "symmetric": symmetric, "type": "int", "strategy": "group"}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    config["ignore"] = ["lm_head"]
    pack = lambda rows, length: compressed(rows, length, bits, group or length, symmetric, order)  # noqa: E731
    state = written(reference, tmp_path, pack, {"quantization_config": config})
    model = loaded(tmp_path, device, dtype=torch.float32)
    layer = model.model.layers[0].mlp.down_proj
    assert isinstance(layer, metalcore.nn.AffineLinear) and layer.bits == bits
    assert torch.equal(layer.weight.cpu(), reference.model.layers[0].mlp.down_proj.weight)
    same(model, reference, device)
    del state["model.layers.0.mlp.up_proj.weight_scale"]
    safetensors.save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"up_proj: the file has its weight_packed, and no weight_scale"):
        loaded(tmp_path, device)
    groups["group_0"]["input_activations"] = {"num_bits": 8}
    (tmp_path / "config.json").write_text(json.dumps(reference.config.to_dict() | {"quantization_config": config}))
    with pytest.raises(ValueError, match="group_0 quantizes what layers are given"):
        loaded(tmp_path, device)


@pytest.mark.parametrize(
    ("name", "format", "block", "weights"),
    [
        ("float-quantized", "e4m3", (0, 0), {"strategy": "tensor"}),
        ("float-quantized", "e4m3", (1, 0), {"strategy": "channel"}),
        ("float-quantized", "e4m3", (64, 32), {"strategy": "block", "block_structure": [64, 32]}),
        ("nvfp4-pack-quantized", "nvfp4", None, {"strategy": "tensor_group", "group_size": 16}),
        ("mxfp4-pack-quantized", "mxfp4", None, {"strategy": "group", "group_size": 32}),
    ],
)
def test_compressed_floats(device, tmp_path, name, format, block, weights):
    """Weights of 8 and 4 bits. What layers are given is to be quantized, too, and keeps its digits."""
    reference = model_of()
    group = {"targets": ["Linear"], "weights": weights, "input_activations": {"num_bits": 8, "dynamic": True}}
    config = {"quant_method": "compressed-tensors", "format": name, "config_groups": {"group_0": group}}
    pack = lambda rows, length: compressed_scaled(rows, length, format, block)  # noqa: E731
    state = written(reference, tmp_path, pack, {"quantization_config": config | {"ignore": ["lm_head"]}})
    model = loaded(tmp_path, device, dtype=torch.float32)
    layer = model.model.layers[0].mlp.down_proj
    assert isinstance(layer, metalcore.nn.ScaledLinear) and layer.format == format
    expected = reference.model.layers[0].mlp.down_proj.weight
    assert torch.equal(layer.weight.cpu(), expected)
    assert torch.equal(layer.bfloat16().weight.cpu(), expected.bfloat16())
    assert torch.equal(layer.float().weight.cpu(), expected)
    same(model, reference, device)
    first = "weight" if format == "e4m3" else "weight_packed"
    key = f"model.layers.0.mlp.up_proj.{first}"
    state[key] = state[key][:, :-32].contiguous()
    safetensors.save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="up_proj: "):
        loaded(tmp_path, device)
    scale = state.pop("model.layers.0.mlp.up_proj.weight_scale")
    message = "no weight_scale"
    if format != "e4m3":
        state["model.layers.0.mlp.up_proj.weight_scale"] = scale.view(torch.int8)
        message = "up_proj: scales must be torch.(uint8 or torch.float8_e8m0fnu|float8_e4m3fn), not torch.int8"
    safetensors.save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=message):
        loaded(tmp_path, device)


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8, "mxfp4", "mxfp8", "nvfp4"])
def test_mlx(device, tmp_path, bits, tie):
    """The configuration has no method, and in older files another name. Single modules have other bits."""
    reference = model_of(tie)
    mode = bits if isinstance(bits, str) else "affine"

    def pack(rows, length):
        if bits in ("mxfp8", "nvfp4"):
            return mlx_scaled(rows, length, bits)
        return mxfp4(rows, length) if bits == "mxfp4" else mlx(rows, length, 8 if length == WIDTH else bits)

    settings = {"bits": 4, "group_size": 32, "mode": mode, "model.layers.0.mlp.down_proj": {"bits": 8}}
    written(reference, tmp_path, pack, {"quantization" if tie else "quantization_config": settings}, embeddings=True)
    model = loaded(tmp_path, device, dtype=torch.float32)
    expected = reference.model.embed_tokens.weight
    assert torch.equal(model.model.embed_tokens.weight.cpu(), expected)
    indices = torch.tensor([[5, 0, 95]])
    found = model.get_input_embeddings()(indices.to(device)).cpu()
    assert torch.equal(found, expected[indices])
    same(model, reference, device)
    if tie and bits in (4, "nvfp4"):
        assert model.lm_head.packed is model.model.embed_tokens.packed
        tokens = model.generate(indices.to(device), max_new_tokens=4, do_sample=False, eos_token_id=None)
        wanted = reference.generate(indices, max_new_tokens=4, do_sample=False, eos_token_id=None)
        assert torch.equal(tokens.cpu(), wanted)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("qweight"), "q_proj: the file has its scales, and no qweight"),
        (lambda t: t.pop("scales"), "q_proj: the file has its qweight, and no scales"),
        (lambda t: t.update(qweight=t["qweight"][1:].clone()), "q_proj: .* bits are not 64 integers"),
        (lambda t: t.update(qzeros=t["qzeros"][:, 1:].clone()), "q_proj: qweight .* do not go together"),
        (lambda t: t.update(scales=t["scales"][:, :8].clone()), "q_proj: qweight .* do not go together"),
        (lambda t: t.update(g_idx=t["g_idx"] * 0), "q_proj: g_idx does not name 2 groups of 32 columns"),
        (lambda t: t.update(qweight=t["qweight"].float()), "q_proj: qweight must be torch.int32"),
        (lambda t: t.update(scales=t["scales"].int()), "q_proj: scales must be float32, float16 or bfloat16"),
        (lambda t: t.update(scales=t["scales"][:, :0].clone()), "q_proj: qweight .* do not go together"),
        (lambda t: t.pop("g_idx"), "q_proj: the file has its qweight, and no g_idx, which desc_act asks for"),
    ],
)
def test_damaged(device, tmp_path, change, message):
    state = written(model_of(), tmp_path, gptq, gptq_settings(4, 32, order=True))
    prefix = "model.layers.0.self_attn.q_proj."
    tensors = {name.removeprefix(prefix): state.pop(name) for name in list(state) if name.startswith(prefix)}
    change(tensors)
    state |= {prefix + leaf: tensor for leaf, tensor in tensors.items()}
    safetensors.save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=message):
        loaded(tmp_path, device)


def test_what_is_not_read(device, tmp_path):
    state = written(model_of(), tmp_path, mlx, {"quantization": {"bits": 4, "group_size": 32}})
    biases = state.pop("model.layers.0.mlp.up_proj.biases")
    safetensors.save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"up_proj: the file has its scales, and no biases"):
        loaded(tmp_path, device)
    state["model.layers.0.mlp.up_proj.biases"] = biases
    weight = state.pop("model.layers.0.mlp.up_proj.weight")
    safetensors.save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"up_proj: the file has its scales, and no weight"):
        loaded(tmp_path, device)
    state["model.layers.0.mlp.up_proj.weight"] = weight[0, 0].clone()
    safetensors.save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"up_proj: weight \[\] must have 2 dimensions"):
        loaded(tmp_path, device)
    state["model.layers.0.mlp.up_proj.weight"] = weight
    state |= {f"model.layers.0.mlp.switch.{leaf}": tensor for leaf, tensor in mlx(64, 64)[0].items()}
    safetensors.save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"mlp.switch: its weight is packed, and it is no module of this model"):
        loaded(tmp_path, device)
    (tmp_path / "model.safetensors").write_bytes(b"\x00" * 40)
    with pytest.raises(Exception, match=r"(?i)safetensors|header"):
        loaded(tmp_path, device)
    with pytest.raises(ValueError, match='mode must be "affine", "mxfp4", "mxfp8" or "nvfp4"'):
        integration.MlxConfig(mode="nf4")


@pytest.mark.parametrize(
    "group", [[32], {"weights": [0]}, {"weights": {"block_structure": 64}}, {"weights": {"group_size": "4"}}]
)
def test_groups_that_describe_nothing(group):
    from metalcore.quant._checkpoints import CompressedConfig

    with pytest.raises(ValueError, match="config_groups describes no weights"):
        CompressedConfig({"group_0": group})


@pytest.mark.parametrize(
    ("weights", "missing"), [({"symmetric": False}, "weight_zero_point"), ({"actorder": "group"}, "weight_g_idx")]
)
def test_tensors_that_groups_ask_for(device, tmp_path, weights, missing):
    """Without them a layer would have other numbers, and no error."""
    groups = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 32} | weights}}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    written(model_of(), tmp_path, compressed, {"quantization_config": config | {"ignore": ["lm_head"]}})
    with pytest.raises(ValueError, match=f"_proj: the file has its weight_packed, and no {missing}"):
        loaded(tmp_path, device)


def test_groups_that_kernels_do_not_take():
    """Groups that are no power of 2, or do not divide the rows, become smaller ones."""
    for length, group in ((160, 64), (96, 96), (352, 352)):
        tensors, weight = gptq(8, length, 4, group)
        found = from_gptq(*tensors.values(), length=length, group_size=-1 if group == length else group)
        numbers = metalcore.dequantize_affine(*found[:4], dtype=torch.float32)
        assert torch.equal(numbers, weight) and found.scales.shape == (8, length // 32)
    with pytest.raises(ValueError, match="groups of 16 in rows of 64 are not multiples of 32"):
        from_gptq(*gptq(8, 64, 4, 16)[0].values(), length=64, group_size=16)
    tensors, weight = awq(8, 64, 8)
    assert torch.equal(metalcore.dequantize_affine(*from_awq(*tensors.values(), length=64)[:4], torch.float32), weight)
