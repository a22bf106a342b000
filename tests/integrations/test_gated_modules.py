"""Gated MLPs and experts' gates of any class: they call swiglu or geglu where their numbers are those."""

import functools

import pytest
import torch
import transformers
from models import decoder, tokens

import metalcore
from metalcore.integrations import transformers as integration


def ran(override):
    return {row.what.rpartition(".")[2]: row.ran for row in metalcore.report().rows if row.override == override}


@pytest.mark.parametrize(
    "name, override, calls",
    (
        ("Llama", "swiglu", {"LlamaMLP": 2}),
        ("Phi3", "swiglu", {"Phi3MLP": 2}),
        ("Gemma", "geglu", {"GemmaMLP": 2}),
        ("Qwen2Moe", "swiglu", {"Qwen2MoeMLP": 2, "Qwen2MoeExperts": 2}),
    ),
)
def test_models(device, name, override, calls):
    """Made before the override is on, and after."""
    model, ids = decoder(name, device), tokens(device)
    expected = model(ids, labels=ids)
    expected.loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    with integration.patch(override):
        for patched in (model, decoder(name, device)):
            patched.zero_grad()
            found = patched(ids, labels=ids)
            found.loss.backward()
            torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-5)
            for parameter, gradient in zip(patched.parameters(), gradients):
                torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-5 * gradient.abs().max().item())
        assert ran(override) == {what: 2 * times for what, times in calls.items()}
    assert torch.equal(model(ids).logits, decoder(name, device)(ids).logits), "disabling does not restore the same bits"


class Gated(torch.nn.Module):
    """A gated MLP with two dropouts. A setting makes it something else."""

    def __init__(self, activation, plus=0.0, functional=0.0):
        super().__init__()
        self.wide, self.up = torch.nn.Linear(8, 12), torch.nn.Linear(8, 12, bias=False)
        self.narrow, self.act = torch.nn.Linear(12, 8), activation
        self.inside, self.outside = torch.nn.Dropout(0.25), torch.nn.Dropout(0.5)
        self.plus, self.functional = plus, functional


class GatedMLP(Gated):
    def forward(self, x):
        y = self.inside(self.up(x) * self.act(self.wide(x)) + self.plus)
        return self.outside(self.narrow(torch.nn.functional.dropout(y, self.functional, self.training)))


@pytest.mark.parametrize(
    "activation, override",
    (
        (torch.nn.SiLU(), "swiglu"),
        (torch.nn.GELU(), "geglu"),
        (torch.nn.GELU("tanh"), "geglu"),
        (torch.nn.Sigmoid(), None),
        (transformers.activations.QuickGELUActivation(), None),
    ),
    ids=str,
)
def test_what_a_module_computes_decides(device, activation, override):
    x = torch.randn(3, 5, 8).to(device)
    module, shifted = GatedMLP(activation).to(device), GatedMLP(activation, plus=0.5).to(device)
    dropping = GatedMLP(activation, functional=0.1).to(device)
    expected = [m.eval()(x) for m in (module, shifted, dropping)]
    torch.manual_seed(5)
    trained = module.train()(x)
    with metalcore.enable_pytorch_overrides("swiglu", "geglu"):
        found = [m.eval()(x) for m in (module, shifted, dropping)]
        torch.manual_seed(5)
        torch.testing.assert_close(module.train()(x), trained, rtol=1e-5, atol=1e-5)
        counts = {name: ran(name).get("GatedMLP", 0) for name in ("swiglu", "geglu")}
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert counts == {name: 2 * (name == override) for name in counts}


class GLU(torch.nn.Module):
    """As diffusers has them: the gate is the second half, and the layer after it is another module's."""

    def __init__(self, activation, gate=1):
        super().__init__()
        self.proj, self.activation, self.gate = torch.nn.Linear(8, 24), activation, gate

    def forward(self, x, *arguments):
        both = self.proj(x).chunk(2, dim=-1)
        return both[1 - self.gate] * self.activation(both[self.gate])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gate", [0, 1])
@pytest.mark.parametrize("activation, override", [(torch.nn.SiLU(), "swiglu"), (torch.nn.GELU(), "geglu")], ids=str)
def test_a_gate_without_the_layer_after_it(device, activation, override, gate, dtype):
    module, x = GLU(activation, gate).to(device, dtype), torch.randn(3, 5, 8).to(device, dtype)
    expected = module(x)
    expected.sum().backward()
    gradient, module.proj.weight.grad = module.proj.weight.grad, None
    with metalcore.enable_pytorch_overrides("swiglu", "geglu"):
        found = module(x)
        found.sum().backward()
        assert ran(override) == {"GLU": 1}
    # Eager PyTorch rounds the activation, its product and their gradients to the dtype, each by half an eps.
    bound = dict(rtol=4 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)
    torch.testing.assert_close(found, expected, **bound)
    torch.testing.assert_close(module.proj.weight.grad, gradient, rtol=bound["rtol"] * 15, atol=bound["atol"] * 15)


def test_one_of_the_two_overrides(device):
    module = GatedMLP(torch.nn.SiLU()).to(device).eval()
    x = torch.randn(3, 8).to(device)
    with metalcore.enable_pytorch_overrides("geglu"):
        module(x)
        with metalcore.enable_pytorch_overrides("swiglu"):
            module(x)
            assert (ran("swiglu"), ran("geglu")) == ({"GatedMLP": 1}, {})
        module(x)
        assert ran("swiglu") == {"GatedMLP": 1}


def test_layers_of_two_dtypes_are_left_alone(device):
    """T5 keeps the last layer in float32 where the others have 16 bits, and converts between them."""
    config = transformers.T5Config(d_model=8, d_ff=12, feed_forward_proj="gated-gelu")
    module = transformers.models.t5.modeling_t5.T5DenseGatedActDense(config).to(device, torch.bfloat16).eval()
    x = torch.randn(3, 8).to(device, torch.bfloat16)
    with metalcore.enable_pytorch_overrides("geglu"):
        module(x)
        assert ran("geglu") == {"T5DenseGatedActDense": 1}
        module.wo.float()
        assert module(x).dtype == torch.float32
        assert ran("geglu") == {"T5DenseGatedActDense": 1}


def test_compiled(device):
    module = GatedMLP(torch.nn.SiLU()).to(device).eval()
    x = torch.randn(3, 8).to(device)
    expected = module(x)
    with metalcore.enable_pytorch_overrides("swiglu"):
        module(x)
        compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), expected)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            compiled(x)
        assert any(event.key == "metalcore::gated" for event in profile.key_averages())


class Chosen(torch.nn.Module):
    """An activation that a setting chooses."""

    def __init__(self, name):
        super().__init__()
        self.name = name

    def forward(self, x):
        return getattr(torch.nn.functional, self.name)(x)


class Config:
    def __init__(self, name):
        self.name = name


class ConfiguredMLP(Gated):
    """It reads its configuration at each call."""

    def forward(self, x):
        gate = getattr(torch.nn.functional, self.act.name)(self.wide(x))
        return self.narrow(self.up(x) * gate)


@pytest.mark.parametrize(
    "cls, make",
    (
        (GatedMLP, lambda name: getattr(torch.nn.functional, name)),
        (GatedMLP, lambda name: functools.partial(getattr(torch.nn.functional, name), inplace=False)),
        (GatedMLP, Chosen),
        (GatedMLP, lambda name: torch.nn.Sequential(Chosen(name))),
        (ConfiguredMLP, Config),
    ),
    ids=("function", "partial", "setting of a child", "setting in a child", "configuration"),
)
@pytest.mark.parametrize("names", (("silu", "relu"), ("relu", "silu")), ids=str)
def test_activations_that_are_no_modules(device, cls, make, names):
    """Modules of one class differ in their activation, and one of them gets another one later."""
    modules = [cls(make(name)).to(device).eval() for name in names]
    x = torch.randn(3, 8).to(device)
    expected = [module(x) for module in modules]
    with metalcore.enable_pytorch_overrides("swiglu"):
        found = [module(x) for module in modules]
        ours = sum(ran("swiglu").values())
        modules[0].act, modules[1].act = modules[1].act, modules[0].act
        swapped = [module(x) for module in modules]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(swapped, [module(x) for module in modules], rtol=1e-5, atol=1e-5)
    assert ours == (0 if cls is ConfiguredMLP else 1), "a trial does not know which configuration another module has"


def test_settings_that_are_hashable_in_one_module_only(device):
    modules = [GatedMLP(torch.nn.SiLU(), plus).to(device).eval() for plus in (0.0, torch.ones(12).to(device))]
    x = torch.randn(3, 8).to(device)
    expected = [module(x) for module in modules]
    with metalcore.enable_pytorch_overrides("swiglu"):
        found = [module(x) for module in modules]
        modules[0].plus = []
        with pytest.raises(TypeError, match="unsupported operand"):
            modules[0](x)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
