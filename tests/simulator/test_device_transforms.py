"""torch.compile, export, functional transforms and custom operators on the simulated device."""

from typing import ClassVar

import pytest
import torch
from torch import nn


def close(actual, expected):
    torch.testing.assert_close(actual.detach(), expected.detach())


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile(backend):
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2)).to("mps")
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    x = torch.randn(3, 8, device="mps")
    close(compiled(x), model(x))
    compiled(x).sum().backward()
    assert model[0].weight.grad.is_mps


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile_attention(backend):
    torch._dynamo.reset()
    attend = lambda q: nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)  # noqa: E731
    compiled = torch.compile(attend, backend=backend, fullgraph=True)
    query = torch.randn(1, 2, 5, 8, device="mps")
    with torch.no_grad():
        close(compiled(query), attend(query))
    compiled(query.requires_grad_()).sum().backward()
    assert query.grad.is_mps


def test_compile_with_dynamic_shapes():
    torch._dynamo.reset()

    @torch.compile(backend="aot_eager", dynamic=True)
    def f(x):
        return x.sin() + x.new_zeros(x.shape[0], 1) + torch.arange(x.shape[1], device="mps")

    for rows in (2, 3, 5):
        x = torch.randn(rows, 4, device="mps")
        close(f(x), x.sin() + torch.arange(4, device="mps"))


def test_export():
    model = nn.Linear(4, 4).to("mps")
    x = torch.ones(2, 4, device="mps")
    close(torch.export.export(model, (x,)).module()(x), model(x))


def test_fake_tensors():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.randn(1, 2, 5, 8, device="mps")
        assert nn.functional.scaled_dot_product_attention(x, x, x).device.type == "mps"


def test_functional_transforms():
    from torch.func import grad, jacrev, vmap

    x, w = torch.randn(3, 4, device="mps"), torch.randn(4, 4, device="mps")
    close(vmap(grad(lambda t: (t.sin() * t).sum()))(x), x.cos() * x + x.sin())
    close(jacrev(torch.sin)(x[0]), torch.diag(x[0].cos()))
    close(vmap(lambda t: w @ t)(x), x @ w.t())


def test_double_backward():
    x = torch.randn(4, device="mps", requires_grad=True)
    (gradient,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(gradient.sum(), x)
    close(second, 6 * x)


def test_inference_mode():
    with torch.inference_mode():
        x = torch.ones(3, device="mps")
        x[1:].add_(1)
        y = (x * 2).view(3, 1)
        y.mul_(2)
    assert y.flatten().tolist() == [4, 8, 8]


class Logged(torch.Tensor):
    """A subclass that lists the operators it sees."""

    seen: ClassVar[list[str]] = []

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        cls.seen.append(str(function))
        return super().__torch_dispatch__(function, types, args, kwargs or {})


def test_tensor_subclasses():
    x = torch.Tensor._make_subclass(Logged, torch.ones(3, device="mps"))
    assert (x + 1).is_mps and x.exp().is_mps
    assert Logged.seen == ["aten.add.Tensor", "aten.exp.default"]


def test_custom_operators_see_device_tensors():
    @torch.library.custom_op("metalcore_tests::scale", mutates_args=(), device_types="mps")
    def scale(x: torch.Tensor, factor: float) -> torch.Tensor:
        assert x.is_mps
        return x * factor

    @scale.register_fake
    def _(x, factor):
        return torch.empty_like(x)

    scale.register_autograd(
        lambda ctx, gradient: (gradient * ctx.factor, None),
        setup_context=lambda ctx, inputs, output: setattr(ctx, "factor", inputs[1]),
    )
    x = torch.randn(3, device="mps", requires_grad=True)
    scale(x, 3.0).sum().backward()
    assert x.grad.tolist() == [3, 3, 3]
    compiled = torch.compile(lambda t: scale(t, 2.0) + 1, backend="aot_eager", fullgraph=True)
    close(compiled(x.detach()), x * 2 + 1)
    with pytest.raises(NotImplementedError):
        scale(torch.ones(2), 1.0)
    torch.library.opcheck(
        scale, (x.detach(), 2.0), test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    )


def test_attention_under_vmap():
    q = torch.randn(3, 1, 2, 4, 8, device="mps")
    attend = torch.nn.functional.scaled_dot_product_attention
    for mask in (None, torch.ones(4, 4, dtype=torch.bool, device="mps").tril()):
        close(torch.vmap(lambda t: attend(t, t, t, mask))(q), attend(q, q, q, mask))
