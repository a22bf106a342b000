"""add and cast, against PyTorch's ops."""

import itertools

import pytest
import torch
from references import DTYPES, assert_near, check_operator, layouts, tensor, wide

import metalcore

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@each_dtype
def test_add(device, dtype):
    made = layouts(lambda *shape: tensor(*shape, dtype=dtype, device=device))
    for x, y in itertools.product(list(made.values())[:6], made.values()):
        assert_near(metalcore.add(x, y, alpha=-0.5), wide(x) - 0.5 * wide(y))
    for a, b in (((5, 1, 7), (3, 1)), ((), (4,)), ((0, 3), (3,)), ((1027,), (1027,)), ((3,), ())):
        x, y = tensor(*a, dtype=dtype, device=device), tensor(*b, dtype=dtype, device=device)
        assert_near(metalcore.add(x, y), wide(x) + wide(y))


def test_add_rounds_once(device):
    x, y = torch.tensor([1.0], device=device), torch.tensor([1.0 + 2**-12], device=device)
    assert metalcore.add(-x, y, alpha=1.0 + 2**-12).item() == 2**-11 + 2**-24


def test_gradients(device):
    x, y = (tensor(*shape, device=device).requires_grad_() for shape in ((4, 5), (5,)))
    z = metalcore.cast(metalcore.add(x, y, alpha=3), torch.float16)
    first = torch.autograd.grad(z.float().square().sum(), (x, y), create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), (x, y))
    whole = 2 * z.detach().float().cpu()
    torch.testing.assert_close(first[0].cpu(), whole, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(first[1].cpu(), 3 * whole.sum(0), rtol=5e-3, atol=5e-3)
    assert all(g.shape == x.shape for g, x in zip(second, (x, y)))


@pytest.mark.parametrize("dtypes", list(itertools.permutations(DTYPES, 2)), ids=str)
def test_cast(device, dtypes):
    """All layouts, and numbers between two of the narrower dtype, too large for it, subnormal, and not finite."""
    source, target = dtypes
    for x in layouts(lambda *shape: tensor(*shape, dtype=source, device=device)).values():
        y = metalcore.cast(x, target)
        assert torch.equal(y.cpu(), x.cpu().to(target)) and y.is_contiguous()
    steps = 1 + torch.arange(-40, 41) * 2.0**-12
    special = torch.tensor(
        [torch.inf, -torch.inf, torch.nan, 65504, 65519, 65520, 3e38, -3.3953e38, 1e-6, 2**-25, -0.0]
    )
    x = torch.cat((steps, -steps, special)).to(source)
    torch.testing.assert_close(metalcore.cast(x.to(device), target).cpu(), x.to(target), rtol=0, atol=0, equal_nan=True)


def test_cast_to_the_same_and_to_others(device):
    x = tensor(3, device=device)
    assert metalcore.cast(x, torch.float32) is x
    assert metalcore.cast(x, torch.int32).dtype == torch.int32
    assert metalcore.cast(tensor(0, 3, device=device), torch.float16).shape == (0, 3)
    with pytest.raises(TypeError, match="cast: dtype must be a torch.dtype, not str"):
        metalcore.cast(x, "float16")
    with pytest.raises(RuntimeError, match="dtype must be another one of"):
        torch.ops.metalcore.cast(x, torch.float32)


def test_operators(device):
    x = tensor(3, 4, device=device).requires_grad_()
    check_operator(torch.ops.metalcore.add, x, tensor(3, 4, device=device), 2.0)
    check_operator(torch.ops.metalcore.cast, x, torch.float16)
