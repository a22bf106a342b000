"""Mixtures give each weight the type that llama-quantize gives it."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from metalcore.quant import quantize_model
from metalcore.quant._mixtures import MIXTURES, Shape, Weight, type_in
from metalcore.quant._plan import plan

# What llama.cpp prints when it loads files of Llama 3 8B: how many weights have which type.
LLAMA_3_8B = {
    "q4_0": {"Q4_0": 225, "Q6_K": 1},
    "q4_1": {"Q4_1": 225, "Q6_K": 1},
    "q5_0": {"Q5_0": 225, "Q6_K": 1},
    "q8_0": {"Q8_0": 226},
    "q2_k": {"Q2_K": 129, "Q3_K": 64, "Q4_K": 32, "Q6_K": 1},
    "q3_k_s": {"Q3_K": 225, "Q6_K": 1},
    "q3_k_m": {"Q3_K": 129, "Q4_K": 92, "Q5_K": 4, "Q6_K": 1},
    "q3_k_l": {"Q3_K": 129, "Q5_K": 96, "Q6_K": 1},
    "q4_k_s": {"Q4_K": 217, "Q5_K": 8, "Q6_K": 1},
    "q4_k_m": {"Q4_K": 193, "Q6_K": 33},
    "q5_k_s": {"Q5_K": 225, "Q6_K": 1},
    "q5_k_m": {"Q5_K": 193, "Q6_K": 33},
    "q6_k": {"Q6_K": 226},
    "iq4_nl": {"IQ4_NL": 189, "Q5_K": 36, "Q6_K": 1},
    "iq4_xs": {"IQ4_XS": 189, "Q5_K": 36, "Q6_K": 1},
}


def without_memory(kind, **sizes):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes))


def counts(plan):
    found = {}
    for types in plan.values():
        for type in types:
            found[type.name] = found.get(type.name, 0) + 1
    return found


@pytest.fixture(scope="module")
def llama_3_8b():
    sizes = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
    return without_memory("llama", hidden_size=4096, intermediate_size=14336, vocab_size=128256, **sizes)


@pytest.mark.parametrize("mixture", LLAMA_3_8B)
def test_llama_3_8b(llama_3_8b, mixture):
    found = plan(llama_3_8b, mixture, (), None)
    assert counts(found) == LLAMA_3_8B[mixture]
    assert found["lm_head"][0].name == ("Q8_0" if mixture == "q8_0" else "Q6_K")


def test_layers_with_more_bits(llama_3_8b):
    found = plan(llama_3_8b, "Q4_K_M", (), None)
    more = [i for i in range(32) if found[f"model.layers.{i}.mlp.down_proj"][0].name == "Q6_K"]
    assert more == [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]
    assert more == [i for i in range(32) if found[f"model.layers.{i}.self_attn.v_proj"][0].name == "Q6_K"]


def test_rows_that_blocks_do_not_divide():
    shape = Shape(layers=8, values=8)
    expected = {
        "q2_k": "Q4_0",
        "q3_k_s": "Q4_0",
        "q4_k_s": "Q5_0",
        "q5_k_s": "Q5_1",
        "q6_k": "Q8_0",
        "iq4_xs": "IQ4_NL",
    }
    for mixture, type in expected.items():
        assert type_in(mixture, Weight("q", 96), shape).name == type
        assert type_in(mixture, Weight("output", 96), shape).name == "Q8_0"
    assert type_in("q4_0", Weight("output", 96), shape).name == "Q8_0"
    assert all(type_in(mixture, Weight("q", 40), shape) is None for mixture in MIXTURES)


def test_experts_and_large_models():
    mixtral = Shape(layers=32, group=4, experts=8, values=32)
    assert type_in("q4_k_m", Weight("k", 4096), mixtral).name == "Q8_0"
    assert type_in("q4_k_m", Weight("v", 4096, 6), mixtral).name == "Q8_0"
    assert type_in("q4_k_m", Weight("attention", 4096), mixtral).name == "Q5_K"
    assert type_in("q5_k_m", Weight("attention", 4096), mixtral).name == "Q5_K"
    assert type_in("q4_k_m", Weight("down", 14336, 6, True), mixtral).name == "Q6_K"
    assert type_in("mxfp4_moe", Weight("down", 14336, 6, True), mixtral).name == "MXFP4"
    assert type_in("mxfp4_moe", Weight("q", 4096), mixtral).name == "Q8_0"
    large = Shape(layers=80, group=8, values=80)
    assert type_in("q4_k_m", Weight("v", 8192, 11), large).name == "Q5_K"
    assert type_in("q3_k_s", Weight("v", 8192, 11), large).name == "Q5_K"
    falcon = Shape(layers=32, group=71, values=32, falcon=True)
    assert type_in("q4_k_m", Weight("output", 4544), falcon).name == "Q8_0"
    assert [type_in("q4_k_m", Weight("down", 4096 * 4, i), falcon).name for i in (1, 2, 5, 6)] == [
        *("Q6_K", "Q5_K", "Q4_K", "Q5_K")
    ]


def test_tied_embeddings_have_the_outputs_type():
    model = without_memory(
        "llama", hidden_size=256, intermediate_size=512, num_hidden_layers=2, tie_word_embeddings=True
    )
    model.tie_weights()
    found = plan(model, "q4_k_m", (), None)
    assert found["model.embed_tokens"][0].name == found["lm_head"][0].name == "Q6_K"
    assert plan(model, "q4_k_m", ["embed"], None)["lm_head"] == "it is to be skipped"
    assert plan(model, "q4_k_m", (), {"embed": "Q8_0"})["lm_head"][0].name == "Q8_0"


def test_what_it_refuses():
    model = torch.nn.Sequential(torch.nn.Linear(64, 8))
    for wrong, message in (
        ({"mixture": "q9_k"}, "no mixture 'q9_k'"),
        ({"types": {"0": "Q9_K"}}, "GGML has no type"),
        ({"types": {"0": "Q4_K"}}, "with rows of 64 cannot have the type Q4_K"),
    ):
        with pytest.raises(ValueError, match=message):
            quantize_model(model, **wrong)
