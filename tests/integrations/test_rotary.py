"""Functions that rotate queries and keys: those of transformers' models call rope, others are left alone."""

import importlib

import pytest
import torch
from models import decoder, tokens

import metalcore
from metalcore.integrations import transformers as integration


def ran():
    return {row.what.rpartition(".models.")[2]: row.ran for row in metalcore.report().rows if row.override == "rope"}


FILES = {
    "llama": "apply_rotary_pos_emb",
    "gpt_neox": "apply_rotary_pos_emb",  # a part of the head
    "glm": "apply_rotary_pos_emb",  # neighbours, a part of the head
    "cohere": "apply_rotary_pos_emb",  # neighbours, whose angles stand side by side
    "modernbert": "apply_rotary_pos_emb",
    "gpt_oss": "apply_rotary_pos_emb",  # each angle once
    "qwen2_vl": "apply_rotary_pos_emb_vision",  # without a batch
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_functions_of_transformers(device, name, dtype):
    file = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    original = getattr(file, FILES[name])
    rotary = 8 if name in ("gpt_neox", "glm") else 16
    flat = name == "qwen2_vl"
    q, k = (torch.randn(*((5, h) if flat else (2, h, 5)), 16).to(device, dtype).requires_grad_() for h in (4, 2))
    angles = torch.randn(*(() if flat else (1,)), 5, rotary // 2)
    if name != "gpt_oss":
        angles = angles.repeat_interleave(2, -1) if name == "cohere" else torch.cat([angles, angles], -1)
    cos, sin = angles.cos().to(device, dtype), angles.sin().to(device, dtype)

    def both():
        found = getattr(file, FILES[name])(q, k, cos, sin)
        return [*found, *torch.autograd.grad([x.float().square().sum() for x in found], (q, k))]

    expected = both()
    with metalcore.enable_pytorch_overrides("rope"):
        found = both()
        assert ran()[f"{name}.modeling_{name}.{FILES[name]}"] == 1
    eps = 4 * torch.finfo(dtype).eps
    for ours, theirs in zip(found, expected):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=eps, atol=eps * theirs.abs().max().item())
    assert getattr(file, FILES[name]) is original


def test_a_model(device):
    model, ids = decoder("Qwen3", device).eval(), tokens(device)
    expected = model(ids).logits
    with integration.patch("rope"):
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-5)
        assert ran()["qwen3.modeling_qwen3.apply_rotary_pos_emb"] == 2


def test_other_functions_are_left_alone(device):
    from transformers.models.deepseek_v3 import modeling_deepseek_v3
    from transformers.models.dinov3_vit import modeling_dinov3_vit

    originals = [
        (modeling_dinov3_vit, "apply_rotary_pos_emb"),  # leaves the first tokens as they are
        (modeling_deepseek_v3, "apply_rotary_pos_emb_interleave"),  # puts neighbours into halves
    ]
    before = [getattr(file, name) for file, name in originals]
    with metalcore.enable_pytorch_overrides("rope"):
        assert [getattr(file, name) for file, name in originals] == before
        assert "apply_rotary_pos_emb_interleave" in str(metalcore.report())


def test_tables_of_another_dtype_keep_the_results_dtype(device):
    """Under autocast queries have 16 bits and tables do not. Llama's function gives float32 then, Cohere's 16 bits."""
    from transformers.models.cohere import modeling_cohere
    from transformers.models.llama import modeling_llama

    q, angles = torch.randn(1, 2, 3, 8).to(device, torch.bfloat16), torch.randn(1, 3, 4)
    for file, expected in ((modeling_llama, torch.float32), (modeling_cohere, torch.bfloat16)):
        table = angles.repeat_interleave(2, -1) if file is modeling_cohere else torch.cat([angles, angles], -1)
        cos, sin = table.cos().to(device), table.sin().to(device)
        theirs = file.apply_rotary_pos_emb(q, q, cos, sin)[0]
        with metalcore.enable_pytorch_overrides("rope"):
            ours = file.apply_rotary_pos_emb(q, q, cos, sin)[0]
            assert ran()[f"{file.__name__.split('.models.')[1]}.apply_rotary_pos_emb"] == 1
        assert ours.dtype == theirs.dtype == expected
        eps = torch.finfo(expected).eps
        torch.testing.assert_close(ours, theirs, rtol=4 * eps, atol=4 * eps)


def test_queries_alone(device):
    """The file of Qwen4-Exp also rotates queries without keys: its own code does that."""
    file = pytest.importorskip("transformers.models.qwen4_exp.modeling_qwen4_exp")
    q, angles = torch.randn(1, 2, 3, 8, device=device), torch.randn(1, 3, 8, device=device)
    expected = file.apply_rotary_pos_emb(q, cos=angles.cos(), sin=angles.sin())
    with metalcore.enable_pytorch_overrides("rope"):
        assert torch.equal(file.apply_rotary_pos_emb(q, cos=angles.cos(), sin=angles.sin()), expected)
        assert "qwen4_exp.modeling_qwen4_exp.apply_rotary_pos_emb" in ran()
