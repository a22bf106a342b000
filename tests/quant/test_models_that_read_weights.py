"""Models that read dtypes of their layers' weights, or have no embedding of tokens, are packed, and work afterwards."""

import copy
import functools

import pytest
import torch
from transformers import (
    LongT5Config,
    LongT5ForConditionalGeneration,
    MambaConfig,
    MambaForCausalLM,
    Wav2Vec2Config,
    Wav2Vec2ForPreTraining,
    Wav2Vec2Model,
)

from metalcore.integrations.transformers import MetalcoreConfig
from metalcore.nn import QuantizedLinear
from metalcore.quant import dequantize, quantize_model


def mamba(device):
    config = MambaConfig(vocab_size=64, hidden_size=64, num_hidden_layers=1, state_size=8)
    return MambaForCausalLM(config), {"input_ids": torch.arange(12, device=device)[None]}


def longt5(device):
    sizes = {"vocab_size": 64, "d_model": 64, "d_kv": 32, "d_ff": 64, "num_layers": 1, "num_heads": 2}
    config = LongT5Config(**sizes, local_radius=4, pad_token_id=0, decoder_start_token_id=0)
    ids = torch.arange(12, device=device)[None]
    return LongT5ForConditionalGeneration(config), {"input_ids": ids, "decoder_input_ids": ids}


def wav2vec2(device, kind=Wav2Vec2ForPreTraining):
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    convolutions = {"conv_dim": (32, 32), "conv_stride": (2, 2), "conv_kernel": (4, 4), "num_feat_extract_layers": 2}
    positions = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    codes = {"codevector_dim": 32, "proj_codevector_dim": 32, "num_codevectors_per_group": 8}
    model = kind(Wav2Vec2Config(**sizes, **convolutions, **positions, **codes))
    return model, {"input_values": torch.linspace(-1, 1, 100, device=device)[None]}


@pytest.mark.parametrize("make", [mamba, longt5, wav2vec2])
def test_a_packed_model_computes_what_its_numbers_say(make, device):
    torch.manual_seed(0)
    plain, inputs = make(device)
    plain = plain.to(device).eval()
    packed = copy.deepcopy(plain)
    quantize_model(packed, "q8_0")
    layers = [(name, module) for name, module in packed.named_modules() if isinstance(module, QuantizedLinear)]
    assert layers
    for name, module in layers:
        plain.get_submodule(name).weight.data = dequantize(module.packed, module.type)
    with torch.no_grad():
        expected, found = plain(**inputs)[0], packed(**inputs)[0]
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("make", [mamba, functools.partial(wav2vec2, kind=Wav2Vec2Model)], ids=["mamba", "wav2vec2"])
def test_a_packed_model_is_saved_and_loaded(make, tmp_path):
    """wav2vec2 initializes weights of its layers by hand, also where a checkpoint has them."""
    torch.manual_seed(0)
    model, inputs = make("cpu")
    model.eval().save_pretrained(tmp_path / "plain")
    packed = type(model).from_pretrained(tmp_path / "plain", quantization_config=MetalcoreConfig("q8_0"))
    packed.save_pretrained(tmp_path / "packed")
    loaded = type(model).from_pretrained(tmp_path / "packed")
    with torch.no_grad():
        assert torch.equal(loaded(**inputs)[0], packed(**inputs)[0])
    layers = [module for module in loaded.modules() if isinstance(module, QuantizedLinear)]
    assert layers and {layer.weight.dtype for layer in layers} == {torch.float32}
