"""peft's adapters on packed models: each learns what it learns on the same numbers, and is saved, loaded and merged."""

import copy
import os
import sys
from importlib import import_module
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from metalcore._core.environment import after_import
from metalcore.integrations import peft as ours
from metalcore.nn import QuantizedEmbedding, QuantizedExperts, QuantizedLinear
from metalcore.quant import dequantize, quantize, quantize_model
from metalcore.quant._layers import PackedModule
from metalcore.quant._peft import _without_parameters, teach

peft = pytest.importorskip("peft")
pytest.importorskip("gguf")

pytestmark = pytest.mark.filterwarnings("ignore")  # of peft's, and that merged weights are packed again
TARGETS = ["q_proj", "v_proj", "down_proj"]


@pytest.fixture(autouse=True)
def environment():
    """BOFT leaves CC and CXX at gcc where its extension does not compile."""
    with mock.patch.dict(os.environ):
        yield


def lora(**options):
    return peft.LoraConfig(**{"r": 4, "target_modules": TARGETS, **options})


def prompts(kind, **options):
    return getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=4, **options)


# The rows of the table in docs/quantization.md. The values are of the trained parameters of one layer.
KINDS = {
    "lora": lambda: lora(),
    "all-linear": lambda: lora(target_modules="all-linear", use_rslora=True),
    "dora": lambda: lora(use_dora=True),
    "pissa": lambda: lora(init_lora_weights="pissa"),
    "pissa_niter_4": lambda: lora(init_lora_weights="pissa_niter_4"),
    "olora": lambda: lora(init_lora_weights="olora"),
    "orthogonal": lambda: lora(init_lora_weights="orthogonal"),
    "embedding": lambda: lora(target_modules=["embed_tokens", "lm_head"]),
    "tokens": lambda: lora(trainable_token_indices=[3, 9]),
    "saved": lambda: lora(modules_to_save=["lm_head", "embed_tokens"]),
    "adalora": lambda: peft.AdaLoraConfig(
        target_modules=TARGETS, init_r=4, target_r=2, tinit=1, tfinal=2, total_step=9
    ),
    "ia3": lambda: peft.IA3Config(target_modules=TARGETS, feedforward_modules=["down_proj"]),
    "vera": lambda: peft.VeraConfig(r=4, target_modules=["q_proj"]),
    "loha": lambda: peft.LoHaConfig(r=4, target_modules=TARGETS),
    "lokr": lambda: peft.LoKrConfig(r=4, target_modules=TARGETS),
    "oft": lambda: peft.OFTConfig(target_modules=TARGETS),
    "boft": lambda: peft.BOFTConfig(target_modules=["q_proj"], boft_block_size=4),
    "hra": lambda: peft.HRAConfig(r=4, target_modules=TARGETS),
    "fourierft": lambda: peft.FourierFTConfig(n_frequency=10, target_modules=TARGETS),
    "vblora": lambda: peft.VBLoRAConfig(target_modules=TARGETS, num_vectors=16, vector_length=8, r=2, topk=2),
    "miss": lambda: peft.MissConfig(r=4, target_modules=TARGETS),
    "layer norms": lambda: peft.LNTuningConfig(target_modules=["input_layernorm"]),
    "trainable tokens": lambda: peft.TrainableTokensConfig(token_indices=[3, 9], target_modules=["embed_tokens"]),
    "prompt tuning": lambda: prompts("PromptTuningConfig"),
    "prefix tuning": lambda: prompts("PrefixTuningConfig", prefix_projection=True, encoder_hidden_size=32),
    "p-tuning": lambda: prompts("PromptEncoderConfig", encoder_hidden_size=32),
    "llama-adapter": lambda: peft.AdaptionPromptConfig(task_type="CAUSAL_LM", adapter_len=4, adapter_layers=1),
}
ROW = 512  # of the longest product
TOKENS = 16


def llama(tied=False):
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 256, "intermediate_size": ROW, "num_hidden_layers": 1}
    return LlamaForCausalLM(
        LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=tied, pad_token_id=0)
    ).eval()


@pytest.fixture(scope="module")
def models():
    made = {}
    for tied in (False, True):
        made[tied] = llama(tied)
        quantize_model(made[tied], "q4_k_m")
    return made


@pytest.fixture
def packed(models, device):
    return lambda tied=False: copy.deepcopy(models[tied]).to(device)


def ids(device):
    return torch.arange(TOKENS, device=device)[None] * 3 % 64


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=ids(model.device)).logits


def with_numbers(model):
    """The model with layers that have the numbers of the packed ones as parameters."""
    model = copy.deepcopy(model)
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if isinstance(module, PackedModule):
            dense = module.to_embedding() if isinstance(module, QuantizedEmbedding) else module.to_linear()
            model.set_submodule(name, dense.requires_grad_(False))
    return model


def perturb(model):
    """Adapters begin with zeros, which have no gradient."""
    generator = torch.Generator().manual_seed(1)
    for parameter in trained(model).values():
        parameter.data += (torch.randn(parameter.shape, generator=generator) / 50).to(parameter)


def trained(model):
    """AdaLoRA's counts of ranks are trained on any device except the CPU, and not saved: a fault of peft."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad and "ranknum" not in name}


def gradients(model):
    model.train()
    loss = model(input_ids=ids(model.device), labels=ids(model.device)).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in trained(model).items()}


@pytest.mark.parametrize("kind", KINDS)
def test_adapters(packed, kind, tmp_path):
    """Gradients pass 16 products of up to 512 terms forward and backward, whose order may differ."""
    torch.manual_seed(2)  # PiSSA by iterations begins with random numbers, also where it is loaded
    model = peft.get_peft_model(packed(), KINDS[kind]())
    perturb(model)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    dense = with_numbers(model)
    (loss, found), (expected_loss, expected) = gradients(model), gradients(dense)
    bound = 16 * ROW * torch.finfo(torch.float32).eps
    assert abs(loss - expected_loss) <= bound * expected_loss
    assert found.keys() == expected.keys() and found
    for name, gradient in found.items():
        assert gradient is not None, name
        assert gradient.norm() > 0, name
        assert (gradient - expected[name]).norm() <= bound * expected[name].norm(), name
    size = sum(gradient.square().sum() for gradient in found.values())
    torch.optim.SGD(trained(model).values(), 0.01 * (loss / size).item()).step()
    with torch.no_grad():
        assert model(input_ids=ids(model.device), labels=ids(model.device)).loss < loss

    after = logits(model)
    model.save_pretrained(tmp_path)
    torch.manual_seed(2)
    loaded = peft.PeftModel.from_pretrained(packed(), tmp_path)
    torch.testing.assert_close(logits(loaded), after, rtol=bound, atol=bound)
    if isinstance(model.base_model, peft.tuners.tuners_utils.BaseTuner):
        merge(model, after, bound)


def merge(model, before, bound):
    """Merged weights are those that peft merges as numbers, packed. What was packed is there again afterwards."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, PackedModule)}
    kept = {name: layer.packed for name, layer in layers.items()}
    errors = {name: layer.packing_error for name, layer in layers.items()}
    dense = with_numbers(model)
    model.merge_adapter()
    dense.merge_adapter()
    changed = [name for name, layer in layers.items() if layer.packed is not kept[name]]
    for name in changed:
        layer, weight = layers[name], dense.get_submodule(name).weight
        assert layer.packing_error not in (None, errors[name])
        expected = dequantize(quantize(weight, layer.type), layer.type)
        # The sums before packing differ by their order, and of two scales with almost the same error the other may win.
        assert (layer.weight - weight).norm() <= 1.01 * (expected - weight).norm() + bound * weight.norm()
    model.unmerge_adapter()
    assert all(layer.packed is kept[name] for name, layer in layers.items())
    assert {name: layer.packing_error for name, layer in layers.items()} == errors
    assert torch.equal(logits(model), before)
    model.merge_adapter()
    merged = logits(model)
    unloaded = model.merge_and_unload()
    assert torch.equal(logits(unloaded), merged)
    names = {
        name.removeprefix("base_model.model.").replace(".token_adapter", "").removesuffix(".base_layer")
        for name in changed
    }
    assert set(ours.packing_errors(unloaded)) >= names


def test_several_adapters_are_packed_once(packed, device):
    model = peft.get_peft_model(packed(), lora())
    model.add_adapter("other", lora(target_modules=["q_proj"]))
    for name in ("other", "default"):
        model.set_adapter(name)
        perturb(model)
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    numbers = dequantize(layer.base_layer.packed, "Q4_K")
    both = numbers + layer.get_delta_weight("default") + layer.get_delta_weight("other")
    model.base_model.merge_adapter(["default"])
    model.base_model.merge_adapter(["other"])
    assert layer.merged_adapters == ["default", "other"]
    error = (layer.base_layer.weight - both).norm()
    expected = (dequantize(quantize(both, "Q4_K"), "Q4_K") - both).norm()
    assert abs(error - expected) <= 0.01 * expected
    found = ours.packing_errors(model)["base_model.model.model.layers.0.self_attn.q_proj.base_layer"]
    assert found.of_weight == pytest.approx((error / both.norm()).item(), rel=1e-3)
    assert found.of_change == pytest.approx((error / (both - numbers).norm()).item(), rel=1e-3)
    with model.disable_adapter():
        logits(model)
    assert torch.equal(dequantize(layer.base_layer.packed, "Q4_K"), numbers)


@pytest.mark.parametrize("tied", [False, True])
def test_merged_models_are_saved(packed, tied, tmp_path, device):
    """Into packed layers, and into layers with numbers: the output layer as well, which is the embedding's where it is
    tied."""
    options = {} if tied else {"modules_to_save": ["embed_tokens"]}
    config = ours.packed_layers(lora(target_modules=["q_proj", "lm_head"], **options), merged="dense")
    model = peft.get_peft_model(packed(tied), config)
    perturb(model)
    before = logits(model)
    unloaded = model.merge_and_unload()
    bound = 16 * ROW * torch.finfo(torch.float32).eps
    assert (logits(unloaded) - before).norm() <= bound * before.norm()
    attention = unloaded.model.layers[0].self_attn
    assert type(attention.q_proj) is type(unloaded.lm_head) is torch.nn.Linear
    assert type(attention.k_proj) is QuantizedLinear
    assert type(unloaded.model.embed_tokens) is (QuantizedEmbedding if tied else torch.nn.Embedding)
    unloaded.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).to(device)
    assert torch.equal(logits(loaded), logits(unloaded))

    model = peft.get_peft_model(packed(tied), lora(target_modules=["q_proj"]))
    perturb(model)
    unloaded = model.merge_and_unload()
    unloaded.save_pretrained(tmp_path / "packed")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "packed").to(device)
    assert type(loaded.model.layers[0].self_attn.q_proj) is QuantizedLinear
    assert torch.equal(logits(loaded), logits(unloaded))


def test_a_merge_may_choose_a_type(packed, tmp_path, device):
    """Q4_K loses a change of this size, as the warning says, and Q8_0 a part of it."""
    errors = {}
    for merged in ("packed", "q8_0"):
        model = peft.get_peft_model(
            packed(), ours.packed_layers(lora(target_modules=["q_proj", "embed_tokens"]), merged)
        )
        perturb(model)
        for layer in model.modules():
            if isinstance(layer, peft.tuners.lora.LoraLayer):
                layer.scaling["default"] = 0.3
        before = logits(model)
        with pytest.warns(UserWarning, match="rounding to Q[468]_.* changed them") as warned:
            model.merge_adapter()
        lost = "rounding to Q4_K changed them at least half as much as what was written did"
        assert any(lost in str(warning.message) for warning in warned) == (merged == "packed")
        errors[merged] = ours.packing_errors(model)["base_model.model.model.layers.0.self_attn.q_proj.base_layer"]
        model.unmerge_adapter()
        assert torch.equal(logits(model), before)
    assert errors["packed"].of_change > 0.5 > 0.25 > errors["q8_0"].of_change
    unloaded = model.merge_and_unload()
    assert unloaded.model.embed_tokens.type.name == unloaded.model.layers[0].self_attn.q_proj.type.name == "Q8_0"
    unloaded.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).to(device)
    assert torch.equal(logits(loaded), logits(unloaded))


def test_a_failed_merge_changes_nothing(packed):
    model = peft.get_peft_model(packed(True), lora(target_modules=["q_proj", "lm_head"]))
    perturb(model)
    with pytest.raises(RuntimeError, match="the weight of this layer is the embedding's"):
        model.base_model.model.lm_head.merge()
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    layer.lora_B["default"].weight.data[0, 0] = torch.nan
    with pytest.raises(ValueError, match="NaNs detected"):
        layer.merge(safe_merge=True)
    assert not layer.merged and not model.base_model.model.lm_head.merged
    assert isinstance(layer.base_layer, QuantizedLinear)


def test_a_saved_output_layer_is_trained_apart_from_the_embedding(packed):
    model = peft.get_peft_model(packed(True), lora(modules_to_save=["lm_head"]))
    assert {name for name in trained(model) if "lora_" not in name} == {
        "base_model.model.lm_head.modules_to_save.default.weight"
    }
    head, embedding = model.base_model.model.lm_head, model.get_input_embeddings()
    assert isinstance(embedding, QuantizedEmbedding) and type(head.modules_to_save["default"]) is torch.nn.Linear
    assert torch.equal(head.weight, embedding.weight)


def test_what_is_refused(packed):
    config = lora()
    config.init_lora_weights = "loftq"  # peft wants scipy before that
    with pytest.raises(ValueError, match=r'"loftq" starts from weights that are not packed.*init_lora_weights=True'):
        peft.get_peft_model(packed(), config)
    with pytest.raises(
        ValueError, match=r"has 'q_proj\.weight', and the weights of model\.layers\.0\.self_attn\.q_proj are"
    ):
        peft.get_peft_model(packed(), lora(target_parameters=["q_proj.weight"]))
    experts = torch.nn.ModuleDict({"experts": QuantizedExperts(2, 64, 32, ["Q8_0"] * 3)})
    assert _without_parameters(experts, "experts.gate_up_proj") == "experts"
    assert _without_parameters(experts, "experts.weight") is None
    with pytest.raises(ValueError, match="not a plain torch"):
        peft.get_peft_model(packed(), peft.GloraConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match=r'merged must be "packed", "dense" or one of IQ4_NL, .*Q8_0, not \'both\''):
        ours.packed_layers(lora(), merged="both")


def test_peft_is_taught_when_it_is_imported_later(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "peft"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    after_import("peft", teach)
    again = import_module("peft")
    assert again is not peft
    assert again.tuners.tuners_utils.BaseTuner.inject_adapter.__wrapped__
    assert again.tuners.tuners_utils.BaseTuner.inject_adapter is not peft.tuners.tuners_utils.BaseTuner.inject_adapter
