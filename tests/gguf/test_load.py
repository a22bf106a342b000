"""Models that are loaded from GGUF files compute what transformers' models with the dequantized weights do."""

import math
import random
import warnings
from pathlib import Path

import layout_cases
import layouts
import pytest
import torch
from changed import add, changed, drop, reshape, set_key

from metalcore import gguf
from metalcore.nn import QuantizedEmbedding, QuantizedExperts, QuantizedLinear

each_layout = pytest.mark.parametrize("name", list(layouts.CASES))


def difference(actual, expected):
    return ((actual.cpu().float() - expected).abs().max() / expected.abs().max()).item()


@torch.no_grad()
def logits(model, device="cpu"):
    return model(layouts.tokens().to(device)).logits


@each_layout
def test_logits(made, name):
    file = made(name)
    model, _ = gguf.load(file.path, tokenizer=False, attn_implementation="eager")
    assert type(model) is type(file.reference)
    # Sums of at most 512 terms in float32, in another order, in a few tens of layers' steps.
    assert difference(logits(model), logits(file.reference)) < 1e-5


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen2moe", "gpt-oss"])
def test_logits_on_the_device(made, name, device):
    file = made(name)
    model, _ = gguf.load(file.path, device, torch.float32, tokenizer=False, attn_implementation="eager")
    assert all(tensor.device.type == device for tensor in (*model.parameters(), *model.buffers()))
    assert difference(logits(model, device), logits(file.reference)) < 1e-4


def test_bfloat16_is_the_default_on_gpus(made, device):
    file = made("llama-tied")
    model, _ = gguf.load(file.path, device, tokenizer=False)
    found = logits(model, device)
    assert found.dtype == (torch.float32 if device == "cpu" else torch.bfloat16)
    assert difference(found, logits(file.reference)) < 0.05


@each_layout
def test_weights_stay_packed(made, name):
    file = made(name)
    model, _ = gguf.load(file.path, tokenizer=False)
    source = gguf.GGUFFile(file.path)
    packed = [info for info in source.tensors.values() if info.type.name not in ("F32", "F16", "BF16")]
    kinds = (QuantizedLinear, QuantizedEmbedding, QuantizedExperts)
    held = {}
    for module in model.modules():
        if isinstance(module, kinds):
            held.update({buffer.data_ptr(): buffer.numel() for buffer in module.buffers(recurse=False)})
    assert sum(held.values()) == sum(info.nbytes for info in packed)
    # What is not packed has one dimension, is a router, DeepSeek's kv_b, whose rows are in two tensors, or a Mamba's
    # rates and steps.
    parts = ("mlp.gate.weight", "kv_b_proj.weight", "A_log", "dt_proj.weight")
    wide = [name for name, value in model.named_parameters() if value.dim() > 1 and min(value.shape) > 4]
    floats = [name for name in wide if not name.endswith(parts)]
    assert bool(floats) == (file.case.types == ("F32",))


def test_configuration_of_llama_3(made):
    """The factors in the file are Llama 3's, which has a rule of its own in transformers."""
    file = made("llama")
    model, _ = gguf.load(file.path, tokenizer=False)
    assert model.config.rope_parameters == layout_cases.LLAMA3
    assert model.generation_config.eos_token_id == [257]


def test_factors_that_follow_no_rule(tmp_path, monkeypatch):
    monkeypatch.setitem(layout_cases.LLAMA3, "low_freq_factor", 2.0)
    made = layouts.make("llama", tmp_path / "x.gguf", ("F32",))
    model, _ = gguf.load(made.path, tokenizer=False)
    assert model.config.rope_parameters["rope_type"] == "longrope"
    assert difference(logits(model), logits(made.reference)) < 1e-5


def test_tied_weights_are_held_once(made):
    model, _ = gguf.load(made("llama-tied").path, tokenizer=False)
    assert model.lm_head.packed is model.model.embed_tokens.packed
    model.tie_weights()
    assert model.lm_head.packed is model.model.embed_tokens.packed


def test_tokenizer(made):
    _, tokenizer = gguf.load(made("qwen2").path)
    text = "the thing\n in  the ñ"
    tokens = tokenizer.encode(text)
    assert tokens[0] == 259 and tokenizer.decode(tokens) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, len(tokenizer)) == (256, 257, layout_cases.VOCABULARY)
    assert tokenizer.encode("</s>") == [257]


def test_types_without_kernels_become_numbers(tmp_path, monkeypatch):
    """TQ2_0 stands for them: it is the one that can be made."""
    made = layouts.make("qwen3moe", tmp_path / "x.gguf", ("TQ2_0", "Q8_0"))
    with pytest.warns(UserWarning, match=r"TQ2_0 has no kernels; 14 tensors \(blk.0.attn_q.weight, .*became"):
        model, _ = gguf.load(made.path, tokenizer=False)
    assert not any(isinstance(module, QuantizedExperts) for module in model.modules())
    assert isinstance(model.lm_head, QuantizedLinear)
    assert difference(logits(model), logits(made.reference)) < 1e-5


def test_gradients_reach_an_adapter(made, device):
    """A low-rank adapter on packed weights learns as on the dequantized ones."""
    file = made("llama")
    model, _ = gguf.load(file.path, device, torch.float32, tokenizer=False, attn_implementation="eager")
    found = []
    for each, place in ((model, device), (file.reference, "cpu")):
        torch.manual_seed(1)
        adapter = torch.randn(256, 256).mul_(0.01).to(place).requires_grad_()
        target = each.model.layers[0].self_attn.q_proj
        handle = target.register_forward_hook(lambda module, given, out, a=adapter: out + given[0] @ a.T)
        tokens = layouts.tokens().to(place)
        losses = []
        for _ in range(3):
            loss = each(tokens, labels=tokens).loss
            (gradient,) = torch.autograd.grad(loss, adapter)
            with torch.no_grad():
                adapter -= 2 * gradient
            losses.append(loss.item())
        handle.remove()
        found.append(losses)
    ours, expected = found
    assert ours[2] < ours[1] < ours[0]
    assert ours == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "change, message",
    [
        (set_key("general.architecture", "falcon"), "architecture 'falcon' cannot be loaded; these can: deepseek"),
        (drop("blk.1.ffn_up.weight"), "1 tensors are missing: blk.1.ffn_up.weight"),
        (add("blk.7.x"), "1 tensors are unknown: blk.7.x"),
        (drop("token_embd.weight"), "tensor 'token_embd.weight' is missing"),
        (reshape("blk.0.attn_v.weight", (128, 512)), r"has shape \(128, 512\), and the metadata say \(256, 256\)"),
        (set_key("llama.block_count", 2**31), "2147483648 layers are promised"),
        (set_key("llama.block_count", 0), "'llama.block_count': 0 is no number from 1 to 4294967295"),
        (
            set_key("llama.attention.head_count", 3),
            "dimension_count.: 64 cannot be loaded for llama, which has 85",
        ),
        (set_key("llama.attention.head_count", 2**31), "no weights of 2147483648 heads of 1 for queries"),
        (set_key("llama.rope.dimension_count", 2**31), "2147483648 of 64 numbers of a head cannot be rotated"),
        (set_key("llama.embedding_length", 2**32 - 1), "blk.0 has no weights of 4 heads of 1073741823"),
        (set_key("llama.rope.freq_base", float("nan")), "'llama.rope.freq_base': nan is no finite number"),
        (
            set_key("llama.attention.layer_norm_rms_epsilon", -1.0),
            "layer_norm_rms_epsilon is -1.0, which is less than 0",
        ),
        (set_key("llama.context_length", [1, 2]), "'llama.context_length': layers differ"),
        (set_key("llama.context_length", "x" * 200), "'llama.context_length': 'x+[.]+x+' is of a wrong type"),
    ],
)
def test_what_cannot_be_loaded(tmp_path, change, message):
    path = changed(tmp_path, change)
    with pytest.raises(gguf.GGUFError, match=message):
        gguf.load(path)


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("llama", add("rope_freqs.weight", [math.nan] * 32), "'rope_freqs.weight' must have finite numbers above 0"),
        ("llama", add("rope_freqs.weight", [0] * 32), "'rope_freqs.weight' must have finite numbers above 0"),
        ("llama", add("rope_freqs.weight", [1] * 31), r"must be F32 of shape \(32,\), not \(31,\)"),
        ("phi3", add("rope_factors_long.weight", [1] * 25), r"must be F32 of shape \(24,\), not \(25,\)"),
        (
            "phi3",
            drop("rope_factors_short.weight"),
            "rope_factors_long.weight and rope_factors_short.weight is missing",
        ),
        ("qwen2", set_key("qwen2.rope.freq_base", 1.0), "YaRN needs a rope.freq_base above 1, not 1.0"),
        ("qwen2moe", set_key("qwen2moe.expert_used_count", 5), "5 of 4 experts cannot be used"),
        ("gpt-oss", set_key("gpt-oss.expert_used_count", 5), "5 of 4 experts cannot be used"),
        ("granitehybrid", set_key("granitehybrid.expert_used_count", 5), "5 of 4 experts cannot be used"),
        ("qwen3next", reshape("blk.0.attn_gate.weight", (128, 512)), r"attn_gate.weight are no \(768, 256\) together"),
    ],
)
def test_what_does_not_go_together(tmp_path, name, change, message):
    path = changed(tmp_path, change, name)
    with pytest.raises(gguf.GGUFError, match=message):
        gguf.load(path)


def test_small_factors_are_no_rule(tmp_path):
    """Llama 3's rule divides by its factor, which rounds to 0 here."""
    path = changed(tmp_path, add("rope_freqs.weight", [0.25] * 32), "llama")
    rope = gguf.load(path, tokenizer=False).model.config.rope_parameters
    assert rope["rope_type"] == "longrope" and rope["long_factor"] == [0.25] * 32


def test_random_damage_is_an_error_or_a_model(tmp_path):
    """Of what a file says of the model and its tensors."""
    data = Path(layouts.make("gpt-oss", tmp_path / "x.gguf", ("Q4_0", "Q8_0")).path).read_bytes()
    first = min(info.offset for info in gguf.GGUFFile(tmp_path / "x.gguf").tensors.values())
    keys = [key.encode() for key in gguf.GGUFFile(tmp_path / "x.gguf").metadata if key.startswith("gpt-oss.")]
    chance, refused = random.Random(0), 0
    for number in range(60):
        damaged = bytearray(data)
        key = chance.choice(keys)
        at = chance.randrange(24, first) if number % 2 else damaged.find(key) + len(key) + 4
        for more in range(chance.choice((1, 4))):
            damaged[at + more] = chance.choice((0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)))
        (tmp_path / "y.gguf").write_bytes(damaged)
        try:
            gguf.load(tmp_path / "y.gguf", tokenizer=False, attn_implementation="eager")
        except gguf.GGUFError:
            refused += 1
    assert 10 < refused < 60


def test_no_warning_where_all_is_known(made):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gguf.load(made("llama").path)


@pytest.mark.parametrize("dtype", ["float16", torch.int32])
def test_dtypes_that_no_model_has(tmp_path, dtype):
    with pytest.raises(TypeError, match=r"gguf.load: dtype must be a floating-point torch.dtype, not "):
        gguf.load(tmp_path / "model.gguf", dtype=dtype)
