"""Under overrides an op saves nothing for its derivative that PyTorch's op does not: what a program may change in
place after PyTorch's forward pass, it may change after ours. Activations in place, as modules with inplace=True call
them, run metalcore's kernels in both directions."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from cases import Call, changed

import metalcore
from metalcore._core.registry import OPS, Override, Sample

DTYPES = (torch.float32, torch.bfloat16)  # what an op saves hardly depends on which of the two of 16 bits it has


def overridden():
    """The ops with a derivative whose namesake in PyTorch has kernels of metalcore under overrides."""
    for name, op in OPS.items():
        if op.backward and op.namesake and isinstance(op.override, tuple) and isinstance(op.override[0], Override):
            yield name


def forms(name):
    """An op's samples, and forms of the call that they leave out."""
    yield from OPS[name].samples()
    if name == "cross_entropy":
        for form, options in ENTROPIES.items():
            yield _losses(form, **options)
    if name == "kl_div":
        for reduction in ("batchmean", "mean", "sum"):
            yield from (_divergences(reduction, log_target) for log_target in (False, True))


ENTROPIES = {
    "smoothing": {"label_smoothing": 0.2},
    "weights": {"weight": True},
    "probabilities and smoothing": {"label_smoothing": 0.2, "probabilities": True},
    "probabilities and weights": {"weight": True, "probabilities": True, "reduction": "sum"},
    "rows": {"reduction": "none", "weight": True},
    "large": {"rows": 1100, "classes": 4096},
}


def _losses(name, weight=False, probabilities=False, rows=6, classes=40, **options):
    def arguments(x):
        target = torch.arange(rows, device=x.device) % classes
        if probabilities:
            target = torch.linspace(0, 1, x.numel(), device=x.device).view(x.shape).softmax(-1).to(x.dtype)
        return x, target, torch.linspace(0.5, 2, classes, dtype=x.dtype, device=x.device) if weight else None

    return Sample(name, ((rows, classes),), options, arguments=arguments)


def _divergences(reduction, log_target):
    def arguments(x):
        target = torch.linspace(0, 3, x.numel(), device=x.device).view(x.shape).log_softmax(-1)
        return x, (target if log_target else target.exp()).to(x.dtype)

    options = {"reduction": reduction, "log_target": log_target}
    return Sample(f"{reduction}, {log_target}", ((6, 40),), options, arguments=arguments)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", overridden())
def test_what_may_be_changed(device, name, dtype):
    op = OPS[name]
    tried = 0
    for sample in forms(name):

        def make(where, sample=sample):
            return Call(op, sample, where, dtype, op.pytorch)

        count, where = None, ""
        for where in (device, "cpu"):  # PyTorch has some ops of linear algebra on the CPU alone
            with contextlib.suppress(TypeError, RuntimeError):  # an option or a dtype that PyTorch's op does not have
                plain = make(where)
                plain.gradients()
                count = len(plain.tensors())
                break
        if count is None:
            continue
        tried += 1
        with metalcore.enable_pytorch_overrides(name):
            try:
                expected = make(device).gradients()
            except RuntimeError as error:  # the override leaves it to PyTorch, which has no kernel on the device either
                if where == device and not isinstance(error, NotImplementedError):
                    raise
                continue
            ours = [changed(lambda: make(device), which) for which in range(count)]
        for which, found in enumerate(ours):
            if changed(lambda: make(where), which) is None:
                continue
            assert found is not None, f"{sample.name}: tensor {which} is saved, and PyTorch does not save it"
            for value, wanted in zip(found, expected, strict=True):
                same = torch.equal(value.nan_to_num(), wanted.nan_to_num())  # PyTorch's are NaN for some dtypes
                assert same, f"{sample.name}: tensor {which} is read backward"
    assert tried or dtype is not torch.float32


class LibrarysNorm(torch.nn.Module):
    """As libraries write an RMSNorm out. In 16 bits it saves a copy of its input."""

    def __init__(self, size=40, eps=1e-5):
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.ones(size)), eps

    def forward(self, x):
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
def test_a_sum_in_place_behind_a_librarys_norm(device, dtype):
    """As in `x += layer(norm(x))`."""
    norm = LibrarysNorm().to(device, dtype)
    x = torch.randn(5, 40, device=device).to(dtype).requires_grad_()

    def gradients():
        y = x * 1
        y += norm(y)
        return torch.autograd.grad(y.sum(), (x, norm.weight))

    expected = gradients()
    with metalcore.enable_pytorch_overrides("rms_norm"):
        found = gradients()
    assert any("LibrarysNorm" in row.what and row.ran for row in metalcore.report().rows)
    eps = torch.finfo(dtype).eps
    for value, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(value, wanted, rtol=8 * eps, atol=8 * eps * wanted.abs().max().item())


ACTIVATIONS = {
    "relu": torch.relu_,
    "silu": lambda x: F.silu(x, inplace=True),
    "gelu": torch.ops.aten.gelu_,
    "gelu, tanh": lambda x: torch.ops.aten.gelu_(x, approximate="tanh"),
}
LAYOUTS = {
    "contiguous": lambda x: x,
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(0, 2),
    "not aligned": lambda x: x.reshape(-1)[1:],
    "empty": lambda x: x[:0],
}


def ran(name, device):
    return {row.what: row.ran for row in metalcore.report().rows}[f"aten::{name.partition(',')[0]}_ on {device}"]


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16), ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_values_and_gradients(device, name, layout, dtype):
    leaf = torch.randn(2, 5, 3, 7, device=device).to(dtype).requires_grad_()
    grad = torch.randn(LAYOUTS[layout](leaf).shape, device=device).to(dtype)

    def both():
        x = LAYOUTS[layout](leaf * 1)
        y = ACTIVATIONS[name](x)
        assert y is x and y.data_ptr() == x.data_ptr()
        return y.detach(), torch.autograd.grad(y, leaf, grad)[0]

    expected = both()
    with metalcore.enable_pytorch_overrides():
        found = both()
    assert ran(name, device) == 1
    eps = torch.finfo(dtype).eps  # of each result's rounding, by PyTorch's kernels and by ours
    for value, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(value, wanted, rtol=4 * eps, atol=4 * eps)


def test_tensors_with_gaps_and_errors_are_pytorchs(device):
    x = torch.randn(4, 6, device=device)
    with metalcore.enable_pytorch_overrides("relu"):
        wide = x.clone()
        assert torch.relu_(wide[:, ::2]).equal(x[:, ::2].clamp(min=0))
        assert torch.equal(wide[:, 1::2], x[:, 1::2])
        with pytest.raises(RuntimeError, match="single memory location"):
            torch.relu_(x[:1].expand(4, 6))
        leaf = torch.ones(3, device=device, requires_grad=True)
        with pytest.raises(RuntimeError, match="leaf"):
            torch.relu_(leaf)
    assert ran("relu", device) == 0


def test_what_was_saved_before_is_an_error(device):
    """The version counter counts our writes, too."""
    with metalcore.enable_pytorch_overrides("silu"):
        x = torch.randn(5, device=device, requires_grad=True)
        y = x * 1
        z = y.square()
        F.silu(y, inplace=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z.sum().backward()


def test_a_model(device):
    layers = [layer for _ in range(3) for layer in (torch.nn.Conv2d(4, 4, 3), torch.nn.ReLU(inplace=True))]
    model = torch.nn.Sequential(*layers).to(device)
    x = torch.randn(2, 4, 12, 12, device=device)
    model(x).sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    with metalcore.enable_pytorch_overrides("relu"):
        model(x).sum().backward()
    assert ran("relu", device) == 3
    for parameter, wanted in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, wanted)
