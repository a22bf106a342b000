"""Each key that changes a model's results is honoured or refused, in both directions."""

import json

import layouts
import pytest
import torch
from changed import changed, set_key

from metalcore import cli, gguf
from metalcore.gguf._keys import REFUSED

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


def _qwen2(**yarn):
    rope = {**layouts.YARN, **yarn}
    torch.manual_seed(0)
    config = layouts.transformers.Qwen2Config(**{**layouts.SIZES, "rope_parameters": rope})
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


@layouts.needs_tokenizers
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
