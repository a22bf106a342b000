"""Each key that changes a model's results is honoured or refused, in both directions."""

import json

import layout_cases
import layouts
import pytest
import torch
from changed import add, changed, drop, drop_key, set_key

from metalcore import cli, gguf
from metalcore.gguf._config import REFUSED
from metalcore.quant import dequantize, quantize

OTHERS = {  # a value that changes results, by key
    **dict.fromkeys(REFUSED, 0.5),
    **dict.fromkeys(("expert_group_count", "expert_group_used_count"), 2),
    **dict.fromkeys(("leading_dense_block_count", "nextn_predict_layers"), 1),
    "rope.dimension_sections": [8, 12, 12, 0],
    "use_parallel_residual": True,
    "swiglu_clamp_exp": [7.0, 7.0],
    "swiglu_clamp_shexp": [7.0, 7.0],
    "rope.dimension_count": 32,
    "rope.dimension_count_swa": 32,
    "rope.freq_base_swa": 20000.0,
    "attention.key_length_swa": 32,
    "attention.value_length_swa": 32,
    "embedding_length_out": 64,
    "expert_gating_func": 2,
}


@torch.no_grad()
def logits(model):
    return model(layouts.tokens()).logits


@pytest.mark.parametrize("key", OTHERS)
def test_a_setting_that_the_layout_lacks_is_refused_by_name(tmp_path, key):
    path = changed(tmp_path, set_key(f"llama.{key}", OTHERS[key]))
    with pytest.raises(gguf.GGUFError, match=rf"x.gguf: key 'llama.{key}': .* cannot be loaded for llama"):
        gguf.load(path, tokenizer=False)


@pytest.mark.parametrize("key", [key for key, values in REFUSED.items() if values])
def test_a_setting_that_the_layout_has_is_taken(tmp_path, made, key):
    path = changed(tmp_path, set_key(f"llama.{key}", REFUSED[key][-1]))
    found = gguf.load(path, tokenizer=False).model
    assert torch.equal(logits(found), logits(gguf.load(made("llama-plain").path, tokenizer=False).model))


@pytest.mark.parametrize("name, normalized", [("qwen2moe", True), ("qwen3moe", False), ("mixtral", False)])
def test_weights_of_experts(tmp_path, name, normalized):
    key = f"{layouts.CASES[name].architecture}.expert_weights_norm"
    path = changed(tmp_path, set_key(key, normalized), name)
    with pytest.raises(gguf.GGUFError, match=f"key '{key}'"):
        gguf.load(path, tokenizer=False)


@pytest.mark.parametrize("name", ["llama-plain", "qwen2", "qwen3"])
def test_partial_rotation_is_refused(tmp_path, name):
    architecture = name.partition("-")[0]
    path = changed(tmp_path, set_key(f"{architecture}.rope.dimension_count", 32), name)
    with pytest.raises(gguf.GGUFError, match=f"'{architecture}.rope.dimension_count': 32 cannot be loaded"):
        gguf.load(path, tokenizer=False)


@pytest.mark.parametrize("name", ["llama-plain", "qwen2", "qwen3", "qwen3moe", "phi3"])
def test_models_that_are_not_causal(tmp_path, made, name):
    architecture = name.partition("-")[0]
    path = changed(tmp_path, set_key(f"{architecture}.attention.causal", False), name)
    model = gguf.load(path, dtype=torch.float32, tokenizer=False, attn_implementation="eager").model
    causal = gguf.load(made(name).path, dtype=torch.float32, tokenizer=False, attn_implementation="eager").model
    found = logits(model)
    assert not torch.allclose(found[:, 0], logits(causal)[:, 0], atol=1e-3)  # the first token sees the others
    gguf.save_gguf(model, tmp_path / "y.gguf")
    assert gguf.GGUFFile(tmp_path / "y.gguf").metadata[f"{architecture}.attention.causal"] is False
    again = gguf.load(tmp_path / "y.gguf", dtype=torch.float32, tokenizer=False, attn_implementation="eager").model
    assert torch.equal(logits(again), found)


def test_windows_that_are_not_causal_are_refused(tmp_path, made):
    path = changed(tmp_path, set_key("gemma3.attention.causal", False), "gemma3")
    with pytest.raises(gguf.GGUFError, match="attention.causal is false, and windows"):
        gguf.load(path, tokenizer=False)
    model = gguf.load(made("gemma3").path, tokenizer=False).model
    model.config.is_causal = False
    with pytest.raises(ValueError, match="has sliding_window None, and the model 8"):
        gguf.save_gguf(model, tmp_path / "y.gguf")


DEEPSEEK = {  # a value that the architecture does not take, by key, and the error
    "rope.scaling.attn_factor": (1.5, "key 'deepseek2.rope.scaling.attn_factor': 1.5 cannot be loaded"),
    "rope.scaling.type": ("linear", "rope scaling of type 'linear' is unknown for deepseek2"),
    "expert_gating_func": (3, "key 'deepseek2.expert_gating_func': 3 cannot be loaded"),
    "expert_weights_norm": (True, "key 'deepseek2.expert_weights_norm': True cannot be loaded"),
    "expert_used_count": (9, "9 of 8 experts in 1 of 1 groups cannot be used"),
    "expert_group_count": (3, "2 of 8 experts in 1 of 3 groups"),
    "leading_dense_block_count": (4, "4 of 3 layers cannot be dense"),
    "attention.layer_norm_rms_epsilon": (1e-5, "attention.layer_norm_rms_epsilon is .*, and transformers' has 1e-06"),
    "attention.key_length": (100, r"\(1, 100, 128\) do not go with rows of 128"),
    "attention.value_length": (64, r"\(1, 160, 64\) do not go"),
    "attention.head_count_kv": (4, r"\(4, 160, 128\) do not go"),
    "attention.key_length_mla": (300, "blk.0.attn_q.weight is not there, or has not 4 heads of 300"),
    "attention.value_length_mla": (128, "attn_k_b.weight and .*attn_v_b.weight are no .* together"),
    "attention.kv_lora_rank": (64, r"do not go with rows of 64"),
    "rope.dimension_count": (96, "96 of 96 numbers of a head cannot be rotated"),
    "expert_shared_count": (0, "expert_shared_count': 0 is no number"),
    "nextn_predict_layers": (1, "key 'deepseek2.nextn_predict_layers'"),
    "attention.temperature_scale": (0.1, "key 'deepseek2.attention.temperature_scale'"),
}
GEMMA4 = {  # the same
    "expert_count": (4, "key 'gemma4.expert_count': 4 cannot be loaded for gemma4_text, which has 0"),
    "rope.dimension_count": (64, "key 'gemma4.rope.dimension_count': 64 cannot be loaded"),
    "rope.dimension_count_swa": (32, "key 'gemma4.rope.dimension_count_swa': 32 cannot be loaded"),
    "rope.scaling.factor": (2.0, "rope scaling of type 'linear' by 2.0 is unknown for gemma4"),
    "rope.scaling.type": ("yarn", "rope scaling of type 'yarn'"),
    "attention.shared_kv_layers": (2, "attention.shared_kv_layers is 2: the layers before must be one with a window"),
    "attention.sliding_window_pattern": ([True] * 6, "must have a boolean for each of 6 layers, and the last"),
    "attention.key_length": (256, "keys and values have different lengths"),
    "attention.key_length_swa": (128, "blk.0 has no weights of 4 heads of 128"),
    "attention.value_length": (64, "keys and values have different lengths"),
    "attention.value_length_swa": (32, "key 'gemma4.attention.value_length_swa': 32 cannot be loaded"),
    "attention.head_count_kv": ([2, 2, 1] * 2, "head_count_kv': 1 and 2 need keys for values"),
    "feed_forward_length": ([512] * 5 + [1024], "feed_forward_length': only layers that share may be double"),
    "embedding_length_per_layer_input": (32, "tensor 'blk.0.inp_gate.weight' has shape"),
    "attention.sliding_window": (0, "attention.sliding_window': 0 is no number from 1"),
    "attention.causal": (False, "attention.causal is false, and windows"),
}
LFM2 = {
    "attention.head_count_kv": ([0, 2, 4], "head_count_kv is not one number, or 0, of each layer"),
    "shortconv.l_cache": (4, "tensor 'blk.0.shortconv.conv.weight' has shape"),
    "rope.dimension_count": (32, "key 'lfm2.rope.dimension_count': 32 cannot be loaded"),
}
MAMBA = {
    "ssm.inner_size": (384, "ssm.inner_size is 384, which is no multiple of 256"),
    "ssm.state_size": (2**30, "tensor 'blk.0.ssm_a' must be .* numbers of type F32"),
    "ssm.time_step_rank": (8, "tensor 'blk.0.ssm_.*' has shape"),
    "attention.layer_norm_rms_epsilon": (-1.0, "attention.layer_norm_rms_epsilon is -1.0"),
}
GRANITE = {
    "ssm.group_count": (3, "512 numbers cannot be 8 heads in 3 groups"),
    "ssm.time_step_rank": (7, "512 numbers cannot be 7 heads"),
    "ssm.conv_kernel": (3, "tensor 'blk.0.ssm_conv1d.weight' has shape"),
    "rope.dimension_count": (32, "key 'granitehybrid.rope.dimension_count': 32 cannot be loaded"),
    "attention.head_count_kv": ([0, 0, 0], "head_count_kv is not one number, or 0, of each layer"),
}
NEMOTRON_H = {
    "attention.head_count_kv": ([2, 0, 0], "no layer has a tensor attn_q.weight of at least 256 rows"),
    "feed_forward_length": ([0, 512], "feed_forward_length are not one number, or 0, of each layer"),
    "expert_used_count": (5, "5 of 4 experts, 1 of 1 groups cannot be used"),
    "expert_gating_func": (1, "key 'nemotron_h_moe.expert_gating_func': 1 cannot be loaded"),
}
SETTINGS = (
    ("deepseek2-lite", "deepseek2", DEEPSEEK),
    ("gemma4", "gemma4", GEMMA4),
    ("lfm2", "lfm2", LFM2),
    ("mamba", "mamba", MAMBA),
    ("granitehybrid", "granitehybrid", GRANITE),
    ("bamba", "granitehybrid", {"rope.dimension_count": (64, "cannot be loaded for bamba, which has 32")}),
    ("nemotron_h_moe", "nemotron_h_moe", NEMOTRON_H),
)


@pytest.mark.parametrize(
    "name, key, value, message",
    [
        (name, f"{architecture}.{key}", value, message)
        for name, architecture, table in SETTINGS
        for key, (value, message) in table.items()
    ],
)
def test_settings_that_an_architecture_has_not(tmp_path, name, key, value, message):
    path = changed(tmp_path, set_key(key, value), name)
    with pytest.raises(gguf.GGUFError, match=message):
        gguf.load(path, tokenizer=False)


@pytest.mark.parametrize(
    "name, key, value, field",
    [
        ("deepseek2-lite", "rope.scaling.yarn_log_multiplier", 0.0, ("rope_parameters", "attention_factor")),
        ("deepseek2-lite", "rope.scaling.yarn_log_multiplier", 0.1, ("rope_parameters", "mscale_all_dim")),
        ("deepseek2-lite", "expert_weights_scale", 2.5, ("routed_scaling_factor",)),
        ("deepseek2-lite", "expert_group_count", 4, ("topk_method",)),
        ("deepseek2", "expert_group_used_count", 1, ("topk_group",)),
        ("deepseek2", "expert_weights_norm", False, ("norm_topk_prob",)),
        ("deepseek2", "expert_used_count", 3, ("num_experts_per_tok",)),
        ("granitehybrid", "attention.scale", 0.5, ("attention_multiplier",)),
        ("granitehybrid", "embedding_scale", 1.0, ("embedding_multiplier",)),
        ("granitehybrid", "residual_scale", 1.0, ("residual_multiplier",)),
        ("granitehybrid", "logit_scale", 1.0, ("logits_scaling",)),
        ("granitehybrid", "rope.scaling.finetuned", True, ("position_embedding_type",)),
        ("mamba", "ssm.dt_b_c_rms", True, ("model_type",)),
        ("gemma4", "rope.freq_base", 5000.0, ("rope_parameters", "full_attention", "rope_theta")),
        ("gemma4", "rope.freq_base_swa", 500.0, ("rope_parameters", "sliding_attention", "rope_theta")),
        ("gemma4", "attention.sliding_window", 3, ("sliding_window",)),
        ("gemma4", "final_logit_softcapping", 2.0, ("final_logit_softcapping",)),
        ("gemma4", "attention.layer_norm_rms_epsilon", 0.1, ("rms_norm_eps",)),
    ],
)
def test_settings_of_an_architecture(tmp_path, made, name, key, value, field):
    """They change the model, and are written as they were."""
    path = changed(tmp_path, set_key(f"{name.partition('-')[0]}.{key}", value), name)
    model, before = (gguf.load(one, dtype=torch.float32, tokenizer=False).model for one in (path, made(name).path))
    here, there = model.config.to_dict(), before.config.to_dict()
    for part in field:
        here, there = here[part], there[part]
    assert here != there
    assert not torch.allclose(logits(model), logits(before), rtol=1e-3)
    gguf.save_gguf(model, tmp_path / "y.gguf")
    again = gguf.load(tmp_path / "y.gguf", dtype=torch.float32, tokenizer=False).model
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize("factors", [None, [1.0] * 16 + [2.0] * 48, [1e30] * 48 + [1.0] * 16])
def test_factors_of_gemma4(tmp_path, factors):
    name = "rope_freqs.weight"
    path = changed(tmp_path, drop(name) if factors is None else add(name, factors), "gemma4")
    with pytest.raises(gguf.GGUFError, match="'rope_freqs.weight' (is missing|must have ones, and then)"):
        gguf.load(path, tokenizer=False)


def test_deepseek_without_a_bias_of_experts_is_refused(tmp_path):
    path = changed(tmp_path, drop("blk.1.exp_probs_b.bias"), "deepseek2")
    with pytest.raises(gguf.GGUFError, match="1 tensors are missing: blk.1.exp_probs_b.bias"):
        gguf.load(path, tokenizer=False)


@pytest.mark.parametrize("type", ["Q8_0", "F16"])
def test_kv_b_in_other_types_and_in_one(tmp_path, made, type):
    """Packed halves become numbers; older files have one tensor, and other lengths of heads."""
    kinds, packed = layouts.gguf.GGMLQuantizationType, {}

    def pack(writer):
        for number in range(3):
            for half in "kv":
                name = f"blk.{number}.attn_{half}_b.weight"
                numbers = torch.from_numpy(writer.tensors[0].pop(name).tensor)
                packed[name] = raw = quantize(numbers, type)
                writer.add_tensor(name, raw.numpy(), raw_dtype=getattr(kinds, type))

    def one(writer):
        pack(writer)
        for number in range(3):
            k, v = (packed[f"blk.{number}.attn_{half}_b.weight"] for half in "kv")
            for half in "kv":
                writer.tensors[0].pop(f"blk.{number}.attn_{half}_b.weight")
            both = torch.cat([dequantize(k, type).mT, dequantize(v, type)], 1).flatten(0, 1)
            writer.add_tensor(f"blk.{number}.attn_kv_b.weight", both.contiguous().numpy())
        for key in ("key_length_mla", "value_length_mla"):
            drop_key(f"deepseek2.attention.{key}")(writer)
        for key, value in (("key_length", 96), ("value_length", 64), ("head_count_kv", 4)):
            set_key(f"deepseek2.attention.{key}", value)(writer)

    (tmp_path / "one").mkdir()
    two, single = (
        gguf.load(changed(folder, change, "deepseek2"), dtype=torch.float32, tokenizer=False).model
        for folder, change in ((tmp_path, pack), (tmp_path / "one", one))
    )
    assert torch.equal(logits(two), logits(single))
    plain = gguf.load(made("deepseek2").path, dtype=torch.float32, tokenizer=False).model
    for found, expected in zip(two.model.layers, plain.model.layers):
        weight = expected.self_attn.kv_b_proj.weight.detach()
        # Q8_0's step is a block's largest number over 127, and float16's 2^-11 of each.
        torch.testing.assert_close(
            found.self_attn.kv_b_proj.weight, weight, rtol=0, atol=weight.abs().max().item() / 250
        )


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("deepseek2", dict(rope_interleave=False), "rope_interleave True, and the model False"),
        ("deepseek2", dict(rms_norm_eps=1e-5), "rms_norm_eps 1e-06, and the model 1e-05"),
        ("deepseek2", dict(attention_bias=True), "attention_bias False"),
        ("deepseek2-lite", dict(norm_topk_prob=True), "norm_topk_prob False"),
        (
            "deepseek2-lite",
            dict(rope_parameters={**layout_cases.DEEPSEEK_YARN, "mscale": 1.0}),
            "attention factor of YaRN 1.0, and the model 1.085",
        ),
        (
            "deepseek2-lite",
            dict(rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=2.0)),
            "no rotary embedding of type 'linear'",
        ),
        ("mamba", dict(intermediate_size=384), "intermediate_size 512, and the model 384"),
        ("gemma4", dict(enable_moe_block=True), "enable_moe_block False, and the model True"),
        ("gemma4", dict(vocab_size_per_layer_input=7), "vocab_size_per_layer_input 288, and the model 7"),
        ("gemma4", dict(num_kv_shared_layers=2), "cannot share keys and values of 2 layers"),
        ("gemma4", dict(use_bidirectional_attention="vision"), "use_bidirectional_attention False"),
    ],
)
def test_models_that_have_no_file(tmp_path, made, name, change, message):
    model = gguf.load(made(name).path, tokenizer=False).model
    for field, value in change.items():
        setattr(model.config, field, value)
    with pytest.raises(ValueError, match=message):
        gguf.save_gguf(model, tmp_path / "x.gguf")


def test_groups_of_deepseek_v2_are_a_warning(tmp_path, made):
    model = gguf.load(made("deepseek2-lite").path, tokenizer=False).model
    model.config.update(dict(topk_method="group_limited_greedy", n_group=4, topk_group=2))
    with pytest.warns(UserWarning, match="llama.cpp chooses groups by their two best experts"):
        gguf.save_gguf(model, tmp_path / "x.gguf")


def _qwen2(**yarn):
    rope = {**layout_cases.YARN, **yarn}
    torch.manual_seed(0)
    config = layouts.transformers.Qwen2Config(**{**layout_cases.SIZES, "rope_parameters": rope})
    return layouts.transformers.Qwen2ForCausalLM(config).eval()


@pytest.mark.parametrize(
    "yarn", [dict(mscale=0.7, mscale_all_dim=1.3), dict(mscale=2.0), dict(attention_factor=1.4), dict(factor=1.0)]
)
def test_yarn(tmp_path, yarn):
    model = _qwen2(**yarn)
    gguf.save_gguf(model, tmp_path / "x.gguf")
    found = gguf.load(tmp_path / "x.gguf", "cpu", torch.float32, tokenizer=False).model
    torch.testing.assert_close(logits(found), logits(model), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda config: config.rope_parameters.update(truncate=False), "truncate of YaRN True, and the model False"),
        (lambda config: config.rope_parameters.update(partial_rotary_factor=0.5), "partial_rotary_factor 1.0"),
        (lambda config: setattr(config, "use_bidirectional_attention", True), "use_bidirectional_attention False"),
    ],
)
def test_fields_without_a_key_are_refused(tmp_path, change, message):
    model = _qwen2()
    change(model.config)
    with pytest.raises(ValueError, match=message):
        gguf.save_gguf(model, tmp_path / "x.gguf")


@pytest.mark.parametrize("prefix", [True, False])
def test_a_space_in_front_of_texts(made, tmp_path, prefix):
    tokenizer = layouts.sentencepiece()
    model = gguf.load(made("llama-plain").path, tokenizer=False).model
    gguf.save_gguf(model, tmp_path / "x.gguf", tokenizer)

    def write(self, *arguments, original=layouts.gguf.GGUFWriter.write_header_to_file):
        self.kv_data[0]["tokenizer.ggml.add_space_prefix"].value = prefix
        return original(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layouts.gguf.GGUFWriter, "write_header_to_file", write)
        gguf.save_gguf(model, tmp_path / "y.gguf", tokenizer)
    found = gguf.load(tmp_path / "y.gguf").tokenizer
    assert found.tokenize("the hat")[0] == ("▁the" if prefix else "the")
    assert found.decode(found.encode("the hat", add_special_tokens=False)) == "the hat"


def test_info_marks_what_nothing_reads(tmp_path, capsys):
    path = changed(tmp_path, set_key("llama.nobody", 3))
    assert cli.main(["gguf", "info", path]) == 0
    out = capsys.readouterr().out
    assert "llama.nobody = 3  (nothing reads it)" in out and out.count("nothing reads it") <= 3
    assert cli.main(["gguf", "info", path, "--json"]) == 0
    not_read = json.loads(capsys.readouterr().out)["not_read"]
    assert "llama.nobody" in not_read and "llama.block_count" not in not_read


@pytest.mark.parametrize("name", ["gemma3", "gemma4"])
def test_windows_of_layers_may_be_integers(made, tmp_path, name):
    """Writers of GGUF's keys exist that know no arrays of booleans."""
    config = gguf.load(made(name).path, tokenizer=False).model.config
    slides = [int(kind == "sliding_attention") for kind in config.layer_types]
    path = changed(tmp_path, set_key(f"{name}.attention.sliding_window_pattern", slides), name)
    assert gguf.load(path, tokenizer=False).model.config.layer_types == config.layer_types
