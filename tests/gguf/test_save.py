"""Files that save_gguf writes are those that models were loaded from, and hold other models too."""

import layouts
import pytest
import torch
import transformers

from metalcore import gguf
from metalcore.nn import QuantizedEmbedding, QuantizedExperts, QuantizedLinear

each_layout = pytest.mark.parametrize("name", list(layouts.CASES))


@torch.no_grad()
def logits(model):
    return model(layouts.tokens()).logits


@each_layout
def test_the_same_bits(made, name, tmp_path, device):
    """The file of a loaded model has the tensors and metadata of the file that it came from."""
    file = made(name)
    model, _ = gguf.load(file.path, device, torch.float32, tokenizer=False)
    gguf.save_gguf(model, tmp_path / "x.gguf")
    before, after = gguf.GGUFFile(file.path), gguf.GGUFFile(tmp_path / "x.gguf")
    assert before.tensors.keys() == after.tensors.keys()
    for key, info in before.tensors.items():
        assert after.tensors[key][:3] == info[:3]
        if key == "rope_freqs.weight" or key.endswith("ssm_a"):  # computed again from the rule or from logarithms
            torch.testing.assert_close(after.packed(key).view(torch.float32), before.packed(key).view(torch.float32))
        else:
            assert torch.equal(after.packed(key), before.packed(key)), key
    assert {key: after.metadata.get(key) for key in before.metadata} == before.metadata
    assert gguf.load(tmp_path / "x.gguf", tokenizer=False).model.config.to_dict() == model.config.to_dict()
    assert [path.name for path in tmp_path.iterdir()] == ["x.gguf"]


@each_layout
def test_models_that_are_not_packed(made, name, tmp_path):
    model = made(name).reference
    gguf.save_gguf(model, tmp_path / "x.gguf")
    loaded, tokenizer = gguf.load(tmp_path / "x.gguf", attn_implementation="eager")
    assert tokenizer is None
    assert not any(isinstance(m, QuantizedLinear | QuantizedEmbedding | QuantizedExperts) for m in loaded.modules())
    torch.testing.assert_close(logits(loaded), logits(model), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype, type", [(torch.float16, "F16"), (torch.bfloat16, "BF16")])
def test_dtypes_of_weights(made, tmp_path, dtype, type):
    model = gguf.load(made("llama-plain").path, dtype=dtype, tokenizer=False).model
    gguf.save_gguf(model, tmp_path / "x.gguf", name="a name")
    file = gguf.GGUFFile(tmp_path / "x.gguf")
    kinds = {info.type.name for info in file.tensors.values() if len(info.shape) == 2}
    assert kinds == {type} and file.tensors["output_norm.weight"].type.name == "F32"
    assert file.metadata["general.name"] == "a name"
    again = gguf.load(tmp_path / "x.gguf", dtype=dtype, tokenizer=False).model
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters()))


def test_byte_level_tokenizer(made, tmp_path):
    model, tokenizer = gguf.load(made("qwen2").path)
    del model.gguf_metadata
    gguf.save_gguf(model, tmp_path / "x.gguf", tokenizer)
    before, after = gguf.GGUFFile(made("qwen2").path).metadata, gguf.GGUFFile(tmp_path / "x.gguf").metadata
    names = ("model", "pre", "tokens", "merges", "bos_token_id", "eos_token_id", "add_bos_token")
    assert all(after[f"tokenizer.ggml.{name}"] == before[f"tokenizer.ggml.{name}"] for name in names)
    text = "the thing\n in  the ñ </s>"
    assert gguf.load(tmp_path / "x.gguf").tokenizer.encode(text) == tokenizer.encode(text)


def test_sentencepiece_tokenizer(made, tmp_path):
    tokenizer = layouts.sentencepiece()
    model = gguf.load(made("llama-plain").path, tokenizer=False).model
    gguf.save_gguf(model, tmp_path / "x.gguf", tokenizer)
    metadata = gguf.GGUFFile(tmp_path / "x.gguf").metadata
    assert metadata["tokenizer.ggml.model"] == "llama"
    assert list(metadata["tokenizer.ggml.token_type"][:4]) == [2, 3, 3, 6]
    text = "the hat and the ñ"
    assert gguf.load(tmp_path / "x.gguf").tokenizer.encode(text) == tokenizer.encode(text)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda model: setattr(model.config, "model_type", "bert"), "cannot be written; these can: bamba, deepseek"),
        (lambda model: setattr(model.config, "hidden_act", "relu"), "hidden_act 'silu', and the model 'relu'"),
        (
            lambda model: setattr(model.config, "rope_parameters", {"rope_type": "dynamic", "rope_theta": 1.0}),
            "'dynamic'",
        ),
        (lambda model: model.model.register_module("more", torch.nn.Linear(2, 2)), "no place for model.more.weight"),
        (lambda model: model.double(), "is of torch.float64"),
    ],
)
def test_what_cannot_be_written(made, tmp_path, change, message):
    model = gguf.load(made("llama-plain").path, tokenizer=False).model
    change(model)
    with pytest.raises(ValueError, match=message):
        gguf.save_gguf(model, tmp_path / "x.gguf")
    assert not list(tmp_path.iterdir())


def test_windows_that_llama_cpp_ignores(made, tmp_path):
    model = gguf.load(made("mistral").path, tokenizer=False).model
    model.config.sliding_window = 8
    with pytest.warns(UserWarning, match="mistral has no sliding window: texts of more than 8 tokens"):
        gguf.save_gguf(model, tmp_path / "x.gguf")


@pytest.mark.parametrize("name", ["llama-tied", "gemma3", "qwen2moe", "gpt-oss"])
def test_a_loaded_model_is_saved_and_loaded_by_transformers(made, tmp_path, name):
    model, _ = gguf.load(made(name).path, tokenizer=False)
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    ours, theirs = model.state_dict(), again.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[key]) and value.dtype == theirs[key].dtype for key, value in ours.items())
    assert repr(again) == repr(model)
    tokens = layouts.tokens()
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, model(tokens).logits)


def test_a_model_without_packed_weights_is_saved_as_any_other(made, tmp_path):
    model, _ = gguf.load(made("llama-plain").path, tokenizer=False)
    model.save_pretrained(tmp_path)
    assert not hasattr(model, "hf_quantizer") and "quantization_config" not in model.config.to_dict()
