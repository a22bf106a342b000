"""Overrides of modules that write an RMSNorm or a GELU out. They replace a module that computes the same as metalcore,
whatever its class is called, and it gives the same numbers. They leave other modules alone."""

import importlib
import inspect

import pytest
import torch

import metalcore

TRANSFORMERS = {
    "Llama": ("llama.modeling_llama", "LlamaRMSNorm"),
    "T5": ("t5.modeling_t5", "T5LayerNorm"),
    "Gemma": ("gemma.modeling_gemma", "GemmaRMSNorm"),
    "Gemma3n": ("gemma3n.modeling_gemma3n", "Gemma3nRMSNorm"),
    "GptOss": ("gpt_oss.modeling_gpt_oss", "GptOssRMSNorm"),
    "Qwen3Next": ("qwen3_next.modeling_qwen3_next", "Qwen3NextRMSNorm"),
    "Qwen3Next gated": ("qwen3_next.modeling_qwen3_next", "Qwen3NextRMSNormGated"),
    "Mamba2 gated": ("mamba2.modeling_mamba2", "MambaRMSNormGated"),
    "Bamba gated": ("bamba.modeling_bamba", "BambaRMSNormGated"),
    "FalconH1 gated": ("falcon_h1.modeling_falcon_h1", "FalconH1RMSNormGated"),
    "Llama4 without a weight": ("llama4.modeling_llama4", "Llama4TextL2Norm"),
}
ARGUMENTS = {
    "Mamba2 gated": {"group_size": 8},
    "Bamba gated": {"group_size": 32},
    "FalconH1 gated": {"n_groups": 2, "norm_before_gate": False},
}
SIZE = 32


def made(name):
    folder, cls = TRANSFORMERS[name]
    cls = getattr(importlib.import_module(f"transformers.models.{folder}"), cls)
    known = inspect.signature(cls).parameters  # they differ between releases
    options = {option: value for option, value in ARGUMENTS.get(name, {}).items() if option in known}
    module = cls() if name.startswith("Llama4") else cls(SIZE, eps=1e-3, **options)
    if list(module.parameters()):
        torch.nn.init.normal_(module.weight)
    return torch.nn.Sequential(module)  # every module of a model has a parent


def rows():
    """{class name: row} of the modules in the report."""
    return {row.what.rpartition(".")[2]: row for row in metalcore.report().rows if "aten::" not in row.what}


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("wide_weight", (False, True), ids=("", "float32 weight"))
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_norms_of_transformers(device, name, dtype, wide_weight):
    # With a float32 weight, T5 and others have results of the weight's dtype.
    module = made(name).to(device).to(torch.float32 if wide_weight else dtype)[0]
    x = torch.randn(2, 5, SIZE, device=device).to(dtype).requires_grad_()
    direction = torch.randn(2, 5, SIZE, device=device)
    gated = "gated" in name
    gate = torch.randn(2, 5, SIZE, device=device).to(dtype) if gated else None

    def both():
        y = module(x, gate) if gated else module(x)
        grads = torch.autograd.grad((y.float() * direction).sum(), [x, *module.parameters()])
        return [y.detach(), *grads]

    expected = both()
    with metalcore.enable_pytorch_overrides("rms_norm"):
        made(name)
        found = both()
        assert rows()[type(module).__name__].ran == 1
    # The module rounds to this dtype up to three times, and metalcore twice. Gradients are sums over the rows and have
    # twice as many steps.
    eps = torch.finfo(dtype).eps
    for ours, theirs in zip(found, expected):
        assert ours.dtype == theirs.dtype
        scale = theirs.float().abs().max().item()
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=5 * eps, atol=8 * eps * scale)
    assert all(torch.equal(a, b) for a, b in zip(both(), expected)), "disabling does not restore the same bits"


class WeightFirstNorm(torch.nn.Module):
    """RMSNorm of x * weight."""

    def __init__(self, size, eps=1e-6):
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.ones(size)), eps

    def forward(self, x):
        x = x * self.weight
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


class EpsOutsideNorm(WeightFirstNorm):
    def forward(self, x):
        return self.weight * x / (x.square().mean(-1, keepdim=True).sqrt() + self.eps)


class CenteredNorm(WeightFirstNorm):
    def forward(self, x):
        return self.weight * (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True) + self.eps)


class NarrowNorm(WeightFirstNorm):
    """Computes in the input's dtype, so that metalcore takes float32 only, where the two are the same."""

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


class OptionNorm(NarrowNorm):
    """A setting changes the formula."""

    def __init__(self, size, eps=1e-6, centered=False):
        super().__init__(size, eps)
        self.centered = centered

    def forward(self, x):
        x = x - x.mean(-1, keepdim=True) if self.centered else x
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


class QuickerGELU(torch.nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(1.7 * x)


def test_other_formulas_are_left_alone(device):
    forwards = {cls: cls.forward for cls in (WeightFirstNorm, EpsOutsideNorm, CenteredNorm, QuickerGELU)}
    with metalcore.enable_pytorch_overrides():
        assert all(cls.forward is forward for cls, forward in forwards.items())
        found = {row.what.rpartition(".")[2]: row for row in metalcore.report().rows if not row.replaced}
        assert {"EpsOutsideNorm", "CenteredNorm", "QuickerGELU", "WeightFirstNorm"} <= found.keys()
        assert "numbers are not those" in str(metalcore.report())


def test_a_module_that_computes_in_16_bits(device):
    module, x = NarrowNorm(8).to(device), torch.randn(3, 8, device=device)
    with metalcore.enable_pytorch_overrides("rms_norm"):
        module(x)
        expected = NarrowNorm.forward.__wrapped__(module.half(), x.half())
        assert torch.equal(module(x.half()), expected)
        row = rows()["NarrowNorm"]
        assert (row.ran, sum(row.left.values())) == (1, 1)


def test_settings_of_a_module(device):
    modules = [OptionNorm(8).to(device), OptionNorm(8, centered=True).to(device), OptionNorm(16, 1e-2).to(device)]
    inputs = [torch.randn(3, len(module.weight), device=device) for module in modules]
    expected = [module(x) for module, x in zip(modules, inputs)]
    with metalcore.enable_pytorch_overrides("rms_norm"):
        found = [module(x) for module, x in zip(modules, inputs)]
        assert rows()["OptionNorm"].ran == 2
    torch.testing.assert_close(found, expected)


def test_classes_that_are_met_later(device):
    """A class with a parameter is met when the parameter is registered, one without when its module gets a parent."""
    x = torch.randn(2, 8, device=device)
    with metalcore.enable_pytorch_overrides("rms_norm"):

        class LaterNorm(NarrowNorm):
            def forward(self, x):
                return NarrowNorm.forward(self, x)

        class LaterNormOfAConfig(torch.nn.Module):
            def __init__(self, config):
                super().__init__()
                self.epsilon = config["eps"]

            def forward(self, x):
                return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.epsilon)

        LaterNorm(8).to(device)(x)
        torch.nn.Sequential(LaterNormOfAConfig({"eps": 1e-5}))(x)
        assert [row.ran for what, row in rows().items() if "Later" in what] == [1, 1]


def test_compiled_and_random_numbers_are_as_before(device):
    module = NarrowNorm(8).to(device)
    x = torch.randn(3, 8, device=device)
    expected = module(x)
    torch.manual_seed(3)
    following = torch.rand(3)
    torch.manual_seed(3)
    with metalcore.enable_pytorch_overrides("rms_norm"):
        assert torch.equal(torch.rand(3), following)
        compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            torch.testing.assert_close(compiled(x), expected)
        assert any(event.key == "metalcore::rms_norm" for event in profile.key_averages())
        counts = []
        for _ in range(3):
            with torch.compiler.set_stance("fail_on_recompile"):
                compiled(x)
            counts.append(rows()["NarrowNorm"].ran)
        assert counts == [0, 0, 0]


def test_a_forward_that_was_kept_is_pytorchs_again(device):
    """Libraries that hook a module's forward keep it in this way."""
    module, x = NarrowNorm(8).to(device), torch.randn(3, 8, device=device)
    with metalcore.enable_pytorch_overrides("rms_norm"):
        kept = module.forward
        kept(x)
        assert rows()["NarrowNorm"].ran == 1
    kept(x)
    assert rows()["NarrowNorm"].ran == 1


def test_gelu_by_a_sigmoid(device):
    from transformers.activations import ACT2FN

    module, x = ACT2FN["quick_gelu"], torch.linspace(-6, 6, 100, device=device)
    expected = module(x)
    with metalcore.enable_pytorch_overrides("gelu"):
        module(x)
        assert "QuickGELUActivation" not in rows()
    with metalcore.enable_pytorch_overrides("quick_gelu"):
        torch.testing.assert_close(module(x), expected, rtol=1e-5, atol=1e-6)
        assert rows()["QuickGELUActivation"].ran == 1


def test_gelu_written_out(device):
    from transformers.activations import ACT2FN, NewGELUActivation

    x = torch.linspace(-6, 6, 100, device=device)
    for name in ("gelu_new", "gelu_fast", "gelu_accurate", "gelu_python"):
        module = ACT2FN[name]
        expected = module(x)
        with metalcore.enable_pytorch_overrides("gelu"):
            torch.testing.assert_close(module(x), expected, rtol=1e-5, atol=1e-6)
            assert rows()[type(module).__name__].ran == 1
    assert "metalcore" not in NewGELUActivation.forward.__code__.co_filename


def test_classes_whose_constructors_take_other_things_are_not_made():
    """A number for a path is the descriptor of an open file, which open() would take over and close."""
    made = []

    class StatisticsNorm(torch.nn.Module):
        def __init__(self, path):
            super().__init__()
            made.append(path)

        def forward(self, x):
            return x

    class DefaultNorm(StatisticsNorm):
        def __init__(self, path="statistics.json"):
            super().__init__(path)

    metalcore.enable_pytorch_overrides()
    assert not made
    torch.nn.Sequential(DefaultNorm())
    assert made == ["statistics.json"]
