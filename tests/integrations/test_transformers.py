"""metalcore.integrations.transformers: models give the same numbers with metalcore's kernels, and can be restored."""

import subprocess
import sys

import pytest
import torch
import transformers

import metalcore
from metalcore.integrations import transformers as integration

SIZES = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=88,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    attn_implementation="eager",
)
LLAMA = {"rms_norm", "gated", "softmax", "rope", "embedding"}  # forward, with eager attention
TRAINING = {*LLAMA, "rms_norm_backward", "gated_backward", "softmax_backward", "fused_linear_cross_entropy", "adamw_"}


@pytest.fixture(autouse=True)
def unpatched():
    yield
    integration.unpatch()


def operators(function):
    with torch.autograd.profiler.profile(use_kineto=False) as profile:
        function()
    prefix = "metalcore::"
    return {event.key.removeprefix(prefix) for event in profile.key_averages() if event.key.startswith(prefix)}


def llama(device, **options):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**SIZES, **options})
    return transformers.LlamaForCausalLM(config).to(device)


def tokens(device):
    torch.manual_seed(1)
    return torch.randint(0, 64, (2, 16)).to(device)


def train(model, steps=4):
    ids = tokens(model.device)
    mask = torch.ones_like(ids)
    mask[1, 12:] = 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    model.train()
    for _ in range(steps):
        loss = model(input_ids=ids, attention_mask=mask, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_llama_trains_to_the_same_losses(device):
    expected = train(llama(device))
    with integration.patch():
        model = llama(device)
        found = train(model)
        ran = operators(lambda: train(model, 1))
    assert found == pytest.approx(expected, rel=1e-5)
    assert expected[-1] < expected[0]
    assert TRAINING.issubset(ran)
    assert train(llama(device)) == expected, "unpatching does not restore the same bits"
    assert operators(lambda: train(llama(device), 1)) == set()


def test_a_model_made_before_is_patched_too(device):
    model = llama(device)
    assert operators(lambda: model(tokens(device))) == set()
    with integration.patch():
        assert LLAMA.issubset(operators(lambda: model(tokens(device))))
    assert operators(lambda: model(tokens(device))) == set()


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_half_precision(device, dtype):
    model = llama(device).to(dtype).eval()
    with torch.no_grad():
        expected = model(tokens(device)).logits
        with integration.patch():
            found = model(tokens(device)).logits
            assert LLAMA.issubset(operators(lambda: model(tokens(device))))
    # Each of the two layers has some ten operations, which round and do not amplify errors.
    bound = 20 * torch.finfo(dtype).eps * expected.float().abs().max().item()
    torch.testing.assert_close(found.float(), expected.float(), rtol=0, atol=bound)


def test_other_models_of_the_family(device):
    ids = tokens(device)
    for name in ("Mistral", "Qwen2", "Qwen3"):
        torch.manual_seed(0)
        config = getattr(transformers, f"{name}Config")(**SIZES, head_dim=8)
        with integration.patch():  # it finds the classes when a model is made
            model = getattr(transformers, f"{name}ForCausalLM")(config).to(device).eval()
            assert LLAMA.issubset(operators(lambda: model(ids)))
            found = model(ids).logits
        torch.testing.assert_close(found, model(ids).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_an_rms_norm_keeps_its_dtype_under_autocast(device, dtype):
    norm = transformers.models.llama.modeling_llama.LlamaRMSNorm(8).to(device, dtype)
    x = torch.randn(2, 8).to(device, dtype)
    with torch.autocast(device, dtype=torch.bfloat16):
        expected = norm(x)
        with integration.patch():
            assert "rms_norm" in operators(lambda: norm(x))
            assert norm(x).dtype == expected.dtype


def test_gelu_written_in_python(device):
    config = transformers.GPT2Config(
        vocab_size=64,
        n_embd=32,
        n_layer=1,
        n_head=4,
        n_positions=32,
        activation_function="gelu_new",
        attn_implementation="eager",
    )
    model = transformers.GPT2LMHeadModel(config).to(device).eval()
    expected = model(tokens(device)).logits
    with integration.patch("gelu"):
        assert operators(lambda: model(tokens(device))) == {"gelu"}
        torch.testing.assert_close(model(tokens(device)).logits, expected, rtol=1e-4, atol=1e-5)


def test_generate(device):
    model = llama(device).eval()

    def generate():
        return model.generate(tokens(device), max_new_tokens=6, do_sample=False, pad_token_id=0)

    expected = generate()
    with integration.patch():
        assert torch.equal(generate(), expected)
        assert "rms_norm" in operators(generate)


def test_gradient_checkpointing(device):
    model = llama(device)
    expected = train(model)
    model = llama(device)
    model.gradient_checkpointing_enable()
    with integration.patch():
        assert train(model) == pytest.approx(expected, rel=1e-5)


def test_compiled_model(device):
    model = llama(device, num_hidden_layers=1).eval()
    ids = tokens(device)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        with integration.patch():
            compiled = torch.compile(llama(device, num_hidden_layers=1).eval(), backend="aot_eager")
            found = compiled(ids, use_cache=False).logits
            assert LLAMA.issubset(operators(lambda: compiled(ids, use_cache=False)))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("optim", ("adamw_torch", "adamw_torch_fused"))
def test_trainer(device, tmp_path, optim):
    def fit():
        model = llama(device, num_hidden_layers=1)
        generator = torch.Generator().manual_seed(3)
        rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 64, (8, 12), generator=generator)]
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=3,
            per_device_train_batch_size=2,
            optim=optim,
            learning_rate=1e-3,
            report_to=[],
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
            dataloader_pin_memory=False,
            seed=0,
        )
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows)
        trainer.train()
        assert trainer.model.device.type == device
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        return type(optimizer), [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    kind, expected = fit()
    assert kind is torch.optim.AdamW
    with integration.patch():
        kind, found = fit()
        steps = {row.what: row.ran for row in metalcore.report().rows}["torch.optim.AdamW"]
    assert kind is torch.optim.AdamW and steps == 3 * 2  # groups with weight decay and without
    assert len(found) == 3
    assert found == pytest.approx(expected, rel=1e-5)


def test_everything_is_given_back(device):
    from torch.nn.modules import module as registration
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    def state():
        return (
            LlamaRMSNorm.forward,
            transformers.activations.NewGELUActivation.forward,
            torch.optim.AdamW.step,
            dict(registration._global_module_registration_hooks),
            dict(registration._global_parameter_registration_hooks),
            metalcore.active_overrides(),
        )

    before = state()
    for _ in range(2):
        integration.patch()
    assert all(a != b for a, b in zip(state(), before))
    integration.unpatch()
    assert state() == before
    integration.unpatch()
    assert state() == before


def test_selection():
    assert integration.active_patches() == ()
    with integration.patch("rms_norm"):
        assert metalcore.active_overrides() == ("rms_norm",)
        with integration.patch(exclude="adamw"):
            active = set(metalcore.active_overrides())
            assert {"silu", "gelu", "softmax", "rms_norm", "swiglu", "geglu", "fused_linear_cross_entropy"} <= active
            assert not {"adamw", "qr"} & active
        assert integration.active_patches() == ("rms_norm",)
    assert integration.active_patches() == ()
    with pytest.raises(ValueError, match="patch: 'attention' is not one of relu, "):
        integration.patch("attention")


def test_transformers_that_is_too_old(monkeypatch):
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.3.0")
    for function in (integration.patch, integration.register_attention, integration.register_quantization):
        with pytest.raises(ImportError, match="needs transformers 5.4 or newer, and this is 5.3.0"):
            function()
    assert not integration.active_patches()


@pytest.mark.only_on("simulator")
def test_patch_before_models_are_imported():
    """Overrides wait for transformers' models, which the first call of patch() imports."""
    code = """
import metalcore.simulator
metalcore.enable_pytorch_overrides()
from metalcore.integrations import transformers
assert transformers.patch() and "rope" in transformers.active_patches()
from transformers import AttentionInterface
assert "metalcore" in AttentionInterface()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_overrides_enabled_by_others_stay(device):
    metalcore.enable_pytorch_overrides("silu")
    with integration.patch():
        pass
    assert metalcore.active_overrides() == ("silu",)


def test_state_dict_is_unchanged(device):
    model = llama(device)
    names = list(model.state_dict())
    with integration.patch():
        assert list(model.state_dict()) == names
        assert list(llama(device).state_dict()) == names
