"""Convolutions along time, gated delta rules and state spaces in transformers' models call metalcore's ops."""

import sys

import pytest
import torch
from models import HYBRIDS, decoder, tokens

import metalcore
from metalcore.integrations import transformers as integration

pytest.importorskip("transformers.models.lfm2")

FILES = ("mamba", "mamba2", "qwen3_next", "lfm2", "falcon_h1", "bamba", "granitemoehybrid", "nemotron_h")
DELTA_FILES = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid")
CONVOLUTIONS = ("causal_conv1d", "causal_conv1d_update")
DELTA = ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule", "chunk_kda", "fused_recurrent_kda")
SPACES = ("selective_scan", "selective_state_update", "mamba_chunk_scan_combined")
OVERRIDES = (*CONVOLUTIONS, *DELTA, *SPACES)
STATE_SPACES = (
    "mamba_selective_scan",
    "mamba_selective_state_update",
    "mamba2_chunk_scan",
    "mamba2_selective_state_update",
)


def file_of(name):
    return pytest.importorskip(f"transformers.models.{name}.modeling_{name}")


def ran():
    return {row.what.rpartition(".models.")[2]: row.ran for row in metalcore.report().rows if row.override in OVERRIDES}


@pytest.mark.parametrize("name", FILES)
def test_functions_of_transformers(device, name):
    file = file_of(name)
    originals = file.causal_conv1d_fn, file.causal_conv1d_update
    x, state = torch.randn(2, 3, 6, device=device, requires_grad=True), torch.randn(2, 3, 4, device=device)
    weight, bias = (torch.randn(*shape, device=device, requires_grad=True) for shape in ((3, 4), (3,)))

    def results():
        y = file.causal_conv1d_fn(x, weight, bias, activation="silu", other=1)
        with torch.no_grad():
            after = state.clone()
            step = file.causal_conv1d_update(x[..., :1], after, weight, bias, "silu")
        return [y, step, after, *torch.autograd.grad(y.square().sum(), (x, weight, bias))]

    expected = results()
    with metalcore.enable_pytorch_overrides(*OVERRIDES):
        found = results()
        for member in ("causal_conv1d_fn", "causal_conv1d_update"):
            assert ran()[f"{name}.modeling_{name}.{member}"] == 1
    assert (file.causal_conv1d_fn, file.causal_conv1d_update) == originals
    for ours, theirs in zip(found, expected):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def delta_arguments(device, length=70, heads=2):
    shapes = [(1, length, heads, 8)] * 2 + [(1, length, 4, 6)] + [(1, length, 4)] * 2
    q, k, v, g, beta = (torch.randn(shape) for shape in shapes)
    return [x.to(device).requires_grad_() for x in (q, k, v, -g.abs(), beta.sigmoid())]


@pytest.mark.parametrize("name", DELTA_FILES)
def test_gated_delta_rules_of_transformers(device, name):
    file, inputs = file_of(name), delta_arguments(device)
    members = "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"
    step = [x.detach()[:, :1] for x in inputs]

    def results():
        chunk, recurrent = (getattr(file, member) for member in members)
        options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True, "use_cache": True}
        o, state = chunk(*inputs[:3], g=inputs[3], beta=inputs[4], initial_state=None, **options)
        once, after = recurrent(*step[:3], g=step[3], beta=step[4], initial_state=state.detach(), **options)
        assert chunk(*inputs)[1] is None
        return [o, state, once, after, *torch.autograd.grad(o.square().sum(), inputs)]

    expected = results()
    with metalcore.enable_pytorch_overrides(*DELTA):
        found = results()
        assert [ran()[f"{name}.modeling_{name}.{member}"] for member in members] == [2, 1]
    for ours, theirs in zip(found, expected):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * theirs.abs().max().item())


def test_what_the_gated_delta_rule_does_not_take(device):
    """transformers' function computes heads of more than 256, and a scale of one's own."""
    file = file_of("qwen3_next")
    inputs = [x.detach() for x in delta_arguments(device, length=3)]
    wide = [torch.randn(1, 3, 4, 257, device=device) for _ in range(3)]
    with metalcore.enable_pytorch_overrides(*DELTA):
        file.torch_chunk_gated_delta_rule(*wide, *inputs[3:])
        file.torch_chunk_gated_delta_rule(*inputs, scale=1.0)
        [row] = [row for row in metalcore.report().rows if row.what == f"{file.__name__}.torch_chunk_gated_delta_rule"]
    assert row.ran == 0 and sum(row.left.values()) == 2


def test_what_the_state_space_does_not_take(device):
    """transformers' function computes with B and C of another dtype."""
    file = file_of("mamba2")
    x, dt, a, b = (torch.randn(shape, device=device) for shape in ((1, 5, 4, 3), (1, 5, 4), (4,), (1, 5, 2, 4)))
    with metalcore.enable_pytorch_overrides(*SPACES):
        file.mamba2_chunk_scan(x, dt.abs(), -a.abs(), b.half(), b.half(), 4)
        [row] = [row for row in metalcore.report().rows if row.what == f"{file.__name__}.mamba2_chunk_scan"]
    assert row.ran == 0 and sum(row.left.values()) == 1


@pytest.mark.parametrize("name", HYBRIDS)
def test_models(device, name):
    """Losses, gradients and generated tokens are those of the model without patches, which the report tells."""
    model, ids = decoder(name, device), tokens(device)

    def results():
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
        generated = model.generate(input_ids=ids, max_new_tokens=3, do_sample=False, pad_token_id=0)
        return [loss, *(g for g in gradients if g is not None)], generated

    expected, expected_tokens = results()
    with integration.patch():
        found, generated = results()
        counts, file = ran(), type(model).__module__.rpartition(".models.")[2]
        gated = [row for row in metalcore.report().rows if "NormGated" in row.what]
    members = ["causal_conv1d_fn", "causal_conv1d_update"]
    if "linear_num_key_heads" in HYBRIDS[name]:
        members += ["torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"]
    if name == "KimiLinear":
        members += ["chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"]
    if name == "KimiLinear" or "linear_num_key_heads" in HYBRIDS[name]:
        assert gated and sum(row.ran for row in gated) > 0 and not any(row.left for row in gated)
    own = vars(sys.modules[type(model).__module__])
    members += [member for member in STATE_SPACES if member in own]
    assert all(counts[f"{file}.{member}"] for member in members)
    assert torch.equal(generated, expected_tokens)
    for ours, theirs in zip(found, expected):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_compiled(device):
    file = file_of("mamba")
    x, weight = torch.randn(2, 3, 6, device=device), torch.randn(3, 4, device=device)
    with metalcore.enable_pytorch_overrides(*OVERRIDES):
        called = torch.compile(lambda x: file.causal_conv1d_fn(x, weight, other=1), fullgraph=True, backend="aot_eager")
        found = called(x)
    torch.testing.assert_close(found, metalcore.causal_conv1d(x, weight))


def test_packed_sequences(device):
    """transformers' own function refuses them without the package."""
    file = file_of("mamba2")
    x, weight = torch.randn(1, 3, 6, device=device), torch.randn(3, 4, device=device)
    numbers = torch.tensor([[0, 0, 0, 1, 1, 1]], dtype=torch.int32, device=device)
    with metalcore.enable_pytorch_overrides(*OVERRIDES):
        y = file.causal_conv1d_fn(x, weight, activation="silu", seq_idx=numbers)
    assert torch.equal(y, metalcore.causal_conv1d(x, weight, None, numbers, activation="silu"))


@pytest.mark.parametrize("name", ["Qwen3Next", "OlmoHybrid"])
def test_packed_models(device, name):
    """Two texts in one row have the logits that they have apart. Without the patch transformers refuses them."""
    model, texts = decoder(name, device, attn_implementation="metalcore").eval(), tokens(device, 1, 12)
    ends = torch.tensor([0, 5, 12], dtype=torch.int32, device=device)
    places = torch.cat([torch.arange(5), torch.arange(7)])[None].to(device)
    packed = {"position_ids": places, "cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "use_cache": False}
    packed |= {"max_length_q": 7, "max_length_k": 7}
    with torch.no_grad():
        expected = torch.cat([model(part, use_cache=False).logits for part in (texts[:, :5], texts[:, 5:])], 1)
        with integration.patch():
            found = model(texts, **packed).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_other_functions_stay(device, monkeypatch):
    file = file_of("mamba")

    def causal_conv1d_fn(x, weight, bias=None, activation=None, **kwargs):
        return x * weight.sum()

    monkeypatch.setattr(file, "causal_conv1d_fn", causal_conv1d_fn)
    with metalcore.enable_pytorch_overrides(*OVERRIDES):
        assert file.causal_conv1d_fn is causal_conv1d_fn
