"""Reductions and the operations before and after them, against PyTorch on the CPU."""

import pytest
import torch
from traced import built, placed, results

import metalcore
from metalcore.programs.pointwise.reduction import walk


def check(pairs, tolerance=2e-6):
    for k, (made, expected) in enumerate(pairs):
        assert (made.dtype, made.shape, made.stride()) == (expected.dtype, expected.shape, expected.stride()), k
        if expected.dtype.is_floating_point:
            size = expected[expected.isfinite()].abs().max().item() if expected.isfinite().any() else 1
            torch.testing.assert_close(made.cpu(), expected, rtol=tolerance, atol=tolerance * size, equal_nan=True)
        else:
            assert torch.equal(made.cpu(), expected), k


def test_reductions_of_rows_columns_and_everything(device):
    torch.manual_seed(0)
    x = torch.randn(7, 40, 6, device=device)

    def function(x):
        sums = x.sum(), x.sum(-1), x.sum((0, 2), keepdim=True), x.mean(1), x.prod(2)
        places = x.argmax(), x.argmin(1), x.argmax(0, keepdim=True)
        return *sums, *places, x.amax((0, 1)), x.amin(), (x > 2).any(1), (x > -3).all()

    check(results(function, x))


def test_operations_before_and_after(device):
    """A reduction's kernel computes what it reduces; what follows is another kernel."""
    torch.manual_seed(0)
    x, w = torch.randn(12, 96, device=device), torch.randn(96, device=device)

    def function(x, w):
        y = x * w + 1
        e = torch.exp(y - y.amax(-1, keepdim=True))
        variance, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
        return e / e.sum(-1, keepdim=True), (x - mean) * torch.rsqrt(variance + 1e-5), x.std(0)

    check(results(function, x, w), 5e-6)
    assert [type(part).__name__ for part in built(function, x, w).parts] == ["Reduction"] * 4 + ["Elementwise"]


def test_long_rows_are_reduced_in_chunks(device):
    """Sums stay as exact as PyTorch's where they are long, and are the same every time."""
    torch.manual_seed(0)
    x = torch.rand(2, 300_003) + 1
    y = placed(x, device)
    run = built(lambda x: (x.sum(1), x.sum(0).amax(), x.argmin(), torch.var_mean(x)[0]), y)
    made = [result.cpu() for result in run(y)]
    exact = x.double()
    expected = exact.sum(1), exact.sum(0).amax(), x.argmin(), exact.var()
    for a, b in zip(made, expected):
        torch.testing.assert_close(a.double(), b.double(), rtol=2e-6, atol=0)
    assert all(torch.equal(a, b.cpu()) for a, b in zip(made, run(y)))


def test_dtypes(device):
    torch.manual_seed(0)
    h, i, m = torch.randn(9, 64).bfloat16(), torch.randint(-50, 50, (9, 64)), torch.rand(9, 64) > 0.5

    def function(h, i, m):
        of_h = h.sum(1, dtype=torch.float32), h.amax(1), (h * 2).argmax(1), h.mean(0)
        return *of_h, i.sum(), i.prod(0), i.amin(1), m.sum(1), m.amax(1), i.any(0)

    check(results(function, *[tensor.to(device) for tensor in (h, i, m)]), 1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [5, 1000, 5003])
def test_elements_of_16_bits(device, dtype, size):
    """What is reduced is rounded as PyTorch rounds it, in whole vectors and behind the last one."""
    torch.manual_seed(0)
    x, y = (torch.randn(size).to(dtype) for _ in range(2))

    def function(x, y):
        z = (x * y + 1) * 0.75
        return z.float().sum(), z.amax(), (z > x).sum(), torch.var_mean(z.float())[0]

    check(results(function, placed(x, device), placed(y, device)), 1e-5)


def test_nan_wins_and_the_first_of_equals_is_found(device):
    x = torch.tensor([[1.0, 3.0, 3.0, 2.0], [1.0, float("nan"), 5.0, float("nan")]], device=device)
    check(results(lambda x: (x.amax(1), x.amin(1), x.argmax(1), x.argmin(1), x.argmax()), x))


def test_strides_and_no_elements(device):
    torch.manual_seed(0)
    x = placed(torch.randn(4, 6, 5).permute(2, 0, 1), device)
    check(results(lambda x: (x.sum(0), x.argmax(), x.mean((1, 2))), x))
    empty = torch.empty(0, 3, device=device)
    check(results(lambda x: (x.sum(0), x.prod(), x.mean(), x.any(0), x.sum(1)), empty))


@pytest.mark.only_on("simulator")
def test_checking_mode(device):
    torch.manual_seed(0)
    x = torch.randn(3, 700)
    with metalcore.simulator.checking():
        check(results(lambda x: (x.sum(1), x.amax(0)), x.to(device)))


def test_walks():
    dense = (1024, 1), 4, 0
    rows = walk((64, 1024), (1,), [dense], [(1,)])
    assert (rows.threads, rows.chunks, rows.reduced.vector) == (256, 1, 4)
    columns = walk((64, 1024), (0,), [dense], [(1,)])
    assert (columns.threads, columns.reduced.vector) == (1, 1)
    everything = walk((4096, 1024), (0, 1), [dense], [()])
    assert everything.chunks > 100 and everything.per_chunk * everything.chunks >= 4096 * 1024
    assert walk((64, 1024), (1,), [((1024, 1), 4, 4)], [(1,)]).reduced.vector == 1
