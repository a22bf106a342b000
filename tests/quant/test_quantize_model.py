"""Models packed in place compute what their numbers say, are saved and loaded, and train adapters."""

import contextlib
import copy
import gc
import importlib.util
import weakref

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM

import metalcore
from metalcore.integrations.transformers import MetalcoreConfig
from metalcore.nn import QuantizedEmbedding, QuantizedExperts, QuantizedLinear
from metalcore.quant import _plan, dequantize, quantize, quantize_model

_SIZES = {
    "vocab_size": 96,
    "hidden_size": 256,
    "intermediate_size": 288,  # rows of the FFN's last weights, which 256 does not divide
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def llama(device, **more):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**_SIZES | more)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1 if parameter.dim() > 1 else 1.0)
    return model.to(device)


def tokens(device):
    return torch.arange(24, device=device).view(2, 12) * 7 % 96


def logits(model, device):
    with torch.no_grad():
        return model(tokens(device)).logits


def with_numbers_of(packed, plain):
    """The plain model with the numbers of the packed one's weights."""
    for name, module in packed.named_modules():
        if isinstance(module, (QuantizedLinear, QuantizedEmbedding)):
            of = plain.get_submodule(name)
            numbers = dequantize(module.packed, module.type)
            with torch.no_grad():
                of.weight.copy_(numbers.T if hasattr(of, "nf") else numbers)
        if isinstance(module, QuantizedExperts):
            gate, up, down = (
                dequantize(getattr(module, part), of) for part, of in zip(("gate", "up", "down"), module.types)
            )
            with torch.no_grad():
                plain.get_submodule(name).gate_up_proj.copy_(torch.cat([gate, up], 1))
                plain.get_submodule(name).down_proj.copy_(down)
    return plain


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3 * b.abs().max().item())


@pytest.mark.parametrize("tied", [False, True])
def test_a_packed_model_computes_with_its_numbers(device, tied):
    model, plain = (llama(device, tie_word_embeddings=tied) for _ in range(2))
    report = quantize_model(model, "q4_k_m")
    close(logits(model, device), logits(with_numbers_of(model, plain), device))
    assert [report.types[f"model.layers.{i}.mlp.down_proj"] for i in (0, 1)] == [["Q5_0"], ["Q8_0"]]
    assert report.types["lm_head"] == ["Q6_K"] and len(report.rows) == 16
    assert "16 weights packed" in str(report)
    assert (model.lm_head.packed is model.model.embed_tokens.packed) == tied
    moved = model.to("cpu")
    assert (moved.lm_head.packed is moved.model.embed_tokens.packed) == tied


@pytest.mark.parametrize("family", ["gpt2", "qwen3_moe"])
def test_other_modules(device, family):
    def make():
        torch.manual_seed(0)
        if family == "gpt2":
            return GPT2LMHeadModel(GPT2Config(vocab_size=96, n_embd=256, n_layer=1, n_head=4)).eval().to(device)
        more = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 64}
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**_SIZES | more)).eval().to(device)

    model, plain = make(), make()
    report = quantize_model(model, "q8_0")
    kept = {row.name: row.reason for row in report.rows if not row.types}
    if family == "gpt2":
        assert kept == {"transformer.wpe": "it is no embedding of tokens"}
        assert isinstance(model.transformer.h[0].attn.c_attn, QuantizedLinear)
    else:
        assert set(kept.values()) == {"it chooses experts"} or not kept
        assert isinstance(model.model.layers[0].mlp.experts, QuantizedExperts)
    close(logits(model, device), logits(with_numbers_of(model, plain), device))


def test_skipped_modules_and_given_types(device):
    model = llama(device)
    report = quantize_model(model, "q6_k", skip=[r"layers\.0\.", "lm_head$"], types={"q_proj": "Q8_0"})
    assert isinstance(model.model.layers[0].self_attn.q_proj, torch.nn.Linear)
    assert report.types["model.layers.1.self_attn.q_proj"] == ["Q8_0"]
    assert report.types["model.layers.1.self_attn.k_proj"] == ["Q6_K"]
    assert "lm_head stays as it is: it is to be skipped" in str(report)


def test_a_module_that_is_no_model(device):
    module = torch.nn.Sequential(
        torch.nn.Linear(256, 64), torch.nn.ReLU(), torch.nn.Linear(64, 5), torch.nn.Linear(5, 2)
    )
    report = quantize_model(module.to(device), "q4_k_s")
    assert report.types == {"0": ["Q4_K"], "2": ["Q5_0"]}
    assert str(report).endswith("3 stays as it is: no blocks divide its rows of 5")
    assert module(torch.ones(1, 256, device=device)).shape == (1, 2)


def test_what_it_refuses():
    model = llama("cpu")
    for wrong, message in (
        ({"mixture": None}, "there is no mixture None"),
        ({"skip": "("}, r"quantize_model: '\(' is no regular expression"),
        ({"types": {"(": "Q8_0"}}, r"quantize_model: '\(' is no regular expression"),
    ):
        with pytest.raises(ValueError, match=message):
            quantize_model(model, **wrong)
    with pytest.raises(ValueError, match=r"MetalcoreConfig: '\(' is no regular expression"):
        MetalcoreConfig(skip=["("])
    with pytest.raises(TypeError, match="types must be a mapping of patterns to GGML's types, not list"):
        quantize_model(model, types=["Q8_0"])
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, not int"):
        quantize_model(3)
    with pytest.raises(TypeError, match="nothing holds this Linear"):
        quantize_model(torch.nn.Linear(256, 8))


def test_a_weight_that_is_not_finite_leaves_the_model_as_it_was():
    model = llama("cpu")
    model.model.layers[1].mlp.up_proj.weight.data[3, 3] = float("nan")
    with pytest.raises(ValueError, match=r"quantize_model: model.layers.1.mlp.up_proj.weight has NaN or infinite"):
        quantize_model(model, "q6_k")
    assert not any(isinstance(module, (QuantizedLinear, QuantizedEmbedding)) for module in model.modules())
    assert not hasattr(model.config, "quantization_config")


@pytest.mark.parametrize("tied", [False, True])
def test_packed_in_two_steps_saved_and_loaded(tmp_path, tied):
    model = llama("cpu", tie_word_embeddings=tied)
    quantize_model(model, "q8_0", skip=["self_attn", "embed", "lm_head"])
    quantize_model(model, "q4_k_m")
    assert len(model.config.quantization_config.packed) == 16
    assert quantize_model(model).types == {}
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(loaded, "cpu"), logits(model, "cpu"))


@pytest.mark.parametrize("tied", [False, True])
def test_saved_and_loaded(device, tmp_path, tied):
    model = llama("cpu", tie_word_embeddings=tied)
    model.save_pretrained(tmp_path / "plain")
    on_load = AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain", quantization_config=MetalcoreConfig("q4_k_m", types={"k_proj": "Q8_0"})
    )
    quantize_model(model, "q4_k_m", types={"k_proj": "Q8_0"})
    expected = logits(model.to(device), device)
    for number, saved in enumerate((model.to("cpu"), on_load)):
        saved.save_pretrained(tmp_path / str(number))
        assert (tmp_path / str(number) / "model.safetensors").stat().st_size < 700_000
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / str(number)).to(device)
        assert torch.equal(logits(loaded, device), expected)
        assert (loaded.lm_head.packed is loaded.model.embed_tokens.packed) == tied
        found = metalcore.generate(loaded, tokens(device), max_new_tokens=3)
        assert found.shape == (2, 3)
    assert loaded.config.quantization_config.packed["model.layers.0.self_attn.k_proj"] == ["Q8_0"]
    fresh = llama("cpu", tie_word_embeddings=tied)
    quantize_model(fresh, "q4_k_m", types={"k_proj": "Q8_0"})
    torch.nn.init.zeros_(fresh.model.norm.weight)
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(logits(fresh.to(device), device), expected)


def bytes_of_numbers():
    """Of all floating-point tensors that are alive and not frozen."""
    storages = {}
    for value in gc.get_objects():
        if type(value) in (torch.Tensor, torch.nn.Parameter) and value.is_floating_point() and not value.is_meta:
            storage = value.untyped_storage()
            with contextlib.suppress(RuntimeError):  # those of traced programs have no memory
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@pytest.mark.parametrize("family", ["tied llama", "gpt2", "qwen3_moe"])
def test_each_weight_is_packed_when_it_has_been_read(tmp_path, monkeypatch, family):
    if family == "gpt2":
        model = GPT2LMHeadModel(GPT2Config(vocab_size=96, n_embd=256, n_layer=2, n_head=4))
    elif family == "qwen3_moe":
        more = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "head_dim": 64}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**_SIZES | more))
    else:
        model = llama("cpu", tie_word_embeddings=True)
    model = model.to(torch.bfloat16).eval()
    model.save_pretrained(tmp_path)
    sizes = [parameter.numel() for parameter in model.parameters()]
    whole, largest = 2 * sum(sizes), 2 * max(sizes)
    quantize_model(model, "q8_0")
    rest = sum(parameter.nbytes for parameter in model.parameters())
    alive = []

    def counted(numbers, type):
        alive.append(bytes_of_numbers())
        return quantize(numbers, type)

    monkeypatch.setattr(_plan, "quantize", counted)
    gc.freeze()  # a walk over what the process has beside the model takes seconds
    try:
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=MetalcoreConfig("q8_0"))
    finally:
        gc.unfreeze()
    ours, expected = loaded.state_dict(), model.state_dict()
    assert ours.keys() == expected.keys() and all(torch.equal(ours[name], expected[name]) for name in ours)
    assert torch.isfinite(logits(loaded, "cpu")).all() and logits(loaded, "cpu").dtype == torch.bfloat16
    assert loaded.config.quantization_config.packed == model.config.quantization_config.packed
    assert len(alive) > 8 and max(alive) <= rest + largest + 4096 < whole / 2


def test_what_the_checkpoint_lacks_is_packed_too(tmp_path):
    model = llama("cpu")
    model.model.save_pretrained(tmp_path)  # without lm_head
    loaded = LlamaForCausalLM.from_pretrained(tmp_path, quantization_config=MetalcoreConfig("q4_k_m"))
    assert isinstance(loaded.lm_head, QuantizedLinear) and loaded.lm_head.packed.any()
    quantize_model(model.model, "q4_k_m")
    assert torch.equal(loaded.model.embed_tokens.packed, model.model.embed_tokens.packed)


def test_weights_are_packed_on_one_device(tmp_path):
    llama("cpu").save_pretrained(tmp_path)
    places = {"model.embed_tokens": "cpu", "model.layers": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    with pytest.raises(ValueError, match="packs weights on one device"):
        AutoModelForCausalLM.from_pretrained(
            tmp_path, quantization_config=MetalcoreConfig("q4_k_m"), device_map={**places, "lm_head": "disk"}
        )


def test_configs():
    assert MetalcoreConfig("Q4_K_M", types={"a": "q8_0"}).to_dict() == {
        "quant_method": "metalcore",
        "mixture": "q4_k_m",
        "skip": [],
        "types": {"a": "Q8_0"},
        "packed": {},
        "layers": {},
    }
    for wrong, error in (
        ({"mixture": "q9"}, ValueError),
        ({"mixture": None}, ValueError),
        ({"types": {"a": "Q9"}}, ValueError),
        ({"bits": 4}, TypeError),
    ):
        with pytest.raises(error):
            MetalcoreConfig(**wrong)


class Adapted(torch.nn.Module):
    """base(x) + x A B"""

    def __init__(self, base):
        super().__init__()
        self.base = base
        device = next((t.device for t in (*base.buffers(), *base.parameters())), None)
        generator = torch.Generator().manual_seed(0)
        self.a = torch.nn.Parameter(0.1 * torch.randn(base.in_features, 4, generator=generator).to(device))
        self.b = torch.nn.Parameter(torch.zeros(4, base.out_features, device=device))

    def forward(self, x):
        return self.base(x) + x @ self.a @ self.b


def losses(model, device):
    """Of some steps that train adapters alone."""
    model.requires_grad_(False)
    for name, module in list(model.named_modules()):
        if name.endswith(("q_proj", "v_proj", "down_proj")):
            model.set_submodule(name, Adapted(module))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=0.01)
    found = []
    for _ in range(6):
        loss = model(tokens(device), labels=tokens(device)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_adapters_train_as_on_the_dequantized_model(device):
    model = llama(device)
    quantize_model(model, "q4_k_m")
    plain = with_numbers_of(model, llama(device))
    packed, expected = losses(model, device), losses(plain, device)
    assert packed[-1] < 0.8 * packed[0]
    torch.testing.assert_close(torch.tensor(packed), torch.tensor(expected), rtol=2e-3, atol=1e-4)


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs peft")
def test_peft(device):
    from peft import LoraConfig, get_peft_model

    model = llama(device)
    quantize_model(model, "q4_k_m")
    before = logits(model, device)
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]))
    assert torch.equal(logits(model, device), before)
    assert (
        metalcore.generate(model, tokens(device), max_new_tokens=1).flatten().tolist()
        == before[:, -1].argmax(-1).tolist()
    )
    attention = model.get_base_model().model.layers[0].self_attn
    assert attention.q_proj.base_layer.joined is attention.k_proj.joined is not None
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert len(trained) == 12 and all(parameter.device.type == device for parameter in trained)
    optimizer = torch.optim.Adam(trained, lr=0.01)
    found = []
    for _ in range(6):
        loss = model(input_ids=tokens(device), labels=tokens(device)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    assert found[-1] < 0.8 * found[0]


class Tied(torch.nn.Module):
    """An embedding, a layer at two places, and an output that has the embedding's weight."""

    def __init__(self, output=True):
        super().__init__()
        self.tokens, self.head = torch.nn.Embedding(40, 256), torch.nn.Linear(256, 40, bias=False)
        self.head.weight = self.tokens.weight
        self.first = self.second = torch.nn.Linear(256, 256)
        self.inner = torch.nn.Sequential(torch.nn.ReLU(), self.first)
        if output:
            self.get_output_embeddings = lambda: self.head

    def get_input_embeddings(self):
        return self.tokens

    def forward(self, tokens):
        return self.head(self.inner(self.second(self.first(self.tokens(tokens)))))


def test_a_module_at_several_places_is_packed_at_all_of_them(device):
    torch.manual_seed(0)
    model = Tied().to(device)
    plain = copy.deepcopy(model)
    report = quantize_model(model, "q8_0")
    assert [row.name for row in report.rows] == ["tokens", "head", "first"]
    assert isinstance(model.first, QuantizedLinear)
    assert model.first is model.second is model.inner[1]
    with torch.no_grad():
        found = model(tokens(device) % 40)
        for name in ("tokens", "first"):
            module = model.get_submodule(name)
            plain.get_submodule(name).weight.copy_(dequantize(module.packed, module.type))
        close(found, plain(tokens(device) % 40))
    fresh = Tied().to(device)
    quantize_model(fresh, "q8_0")
    fresh.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(fresh(tokens(device) % 40), found)


def test_a_name_of_any_place_chooses():
    report = quantize_model(Tied(), "q4_k_m", skip=["head", r"inner\.1"])
    assert "first" not in report.types
    assert quantize_model(Tied(), "q4_k_m", types={r"inner\.1": "Q8_0"}).types["first"] == ["Q8_0"]


@pytest.mark.parametrize("output", [False, True])
def test_one_weight_has_one_type(output):
    for types, expected in (({"head": "Q8_0"}, "Q8_0"), ({"tokens": "Q5_0"}, "Q5_0"), ({}, None)):
        model = Tied(output)
        packed = quantize_model(model, "q4_k_m", types=types).types
        assert packed["head"] == packed["tokens"] == [expected or packed["tokens"][0]]
        assert model.head.packed is model.tokens.packed and model.head.type.name == packed["head"][0]
    model = Tied(output)
    with pytest.raises(ValueError, match="tokens and head are one weight, and cannot have the types Q5_0 and Q8_0"):
        quantize_model(model, types={"head": "Q8_0", "tokens": "Q5_0"})
    assert isinstance(model.head, torch.nn.Linear)


def test_weights_are_freed_one_after_the_other(device, monkeypatch):
    """When a module's weights are packed, those of the modules before it are gone."""
    model = llama(device)
    kinds = (torch.nn.Linear, torch.nn.Embedding)
    gone = [weakref.ref(module.weight) for module in model.modules() if isinstance(module, kinds)]
    alive = []

    def packed(numbers, type):
        alive.append(sum(weight() is not None for weight in gone))
        return quantize(numbers, type)

    monkeypatch.setattr(_plan, "quantize", packed)
    quantize_model(model, "q8_0")
    assert alive == list(range(len(gone), 0, -1)) and not any(weight() is not None for weight in gone)
