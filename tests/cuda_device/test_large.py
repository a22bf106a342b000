"""Tensors of more than 2^31 elements, where 32-bit signed indices end, and grids larger than CUDA allows in y."""

import fcntl
import tempfile
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import metalcore


@pytest.fixture(autouse=True)
def memory():
    """Keeps 24 GiB of device memory for one test at a time, whichever of pytest's processes runs it."""
    with open(Path(tempfile.gettempdir()) / "metalcore-tests-of-large-tensors", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if torch.cuda.mem_get_info()[0] < 24 * 2**30:
            pytest.skip("takes 24 GB of free device memory")
        yield
        torch.cuda.empty_cache()


def assert_ends_right(x, y, function):
    """Checks y = function(x) at the beginning, around element 2^31, and at the end; x and y are flat or have rows."""
    middle = 2**31 // (x.numel() // len(x))
    for start in (0, middle - 16, len(x) - 32):
        expected = function(x[start : start + 32].float())
        torch.testing.assert_close(y[start : start + 32].float(), expected, rtol=torch.finfo(x.dtype).eps, atol=1e-6)


@pytest.mark.parametrize("offset", [0, 1], ids=["four at a time", "one at a time"])
def test_elementwise(offset):
    x = torch.empty(2**31 + 40 + offset, device="cuda", dtype=torch.bfloat16)[offset:].normal_()
    assert_ends_right(x, metalcore.silu(x), F.silu)


def test_strided():
    x = torch.empty(2**30 + 20, 3, device="cuda", dtype=torch.float16).normal_()[:, :2]
    y = metalcore.gelu(x, "tanh")
    assert_ends_right(x, y, lambda x: F.gelu(x, approximate="tanh"))


@pytest.mark.parametrize("length", [16, 1024, 32768])
def test_rows(length):
    rows = 2**31 // length + 40
    x = torch.empty(rows, length, device="cuda", dtype=torch.bfloat16).normal_()
    assert_ends_right(x, metalcore.softmax(x, -1), lambda x: torch.softmax(x, -1))


def test_rows_of_a_norm_and_its_gradient():
    x = torch.empty(2**21 + 40, 1024, device="cuda", dtype=torch.bfloat16).normal_().requires_grad_()
    y = metalcore.rms_norm(x, (1024,), eps=1e-5)
    with torch.no_grad():
        assert_ends_right(x, y, lambda x: F.rms_norm(x, (1024,), eps=1e-5))
    del y
    weight = torch.rand(1024, device="cuda").add_(0.5).bfloat16().requires_grad_()
    direction = x.detach().flip(-1)
    found, found_weight = torch.autograd.grad(metalcore.rms_norm(x, (1024,), weight, 1e-5), (x, weight), direction)
    expected_weight = torch.zeros(1024, device="cuda", dtype=torch.float64)
    for start in range(0, len(x), 2**18):
        part = x.detach()[start : start + 2**18].float().requires_grad_()
        w = weight.detach().float().requires_grad_()
        upstream = direction[start : start + 2**18].float()
        expected, part_weight = torch.autograd.grad(F.rms_norm(part, (1024,), w, 1e-5), (part, w), upstream)
        expected_weight += part_weight
        eps = torch.finfo(x.dtype).eps
        torch.testing.assert_close(found[start : start + 2**18].float(), expected, rtol=eps, atol=eps * 1e-2)
    scale = expected_weight.abs().max().item()
    torch.testing.assert_close(found_weight.double(), expected_weight, rtol=torch.finfo(x.dtype).eps, atol=1e-5 * scale)


def test_columns_longer_than_a_grids_side():
    """A CUDA grid has at most 65,535 blocks in y."""
    x = torch.randn(66000, 3, 1021, device="cuda").bfloat16()
    y = metalcore.softmax(x, 1)
    for rows in (slice(0, 40), slice(65530, 65540), slice(-40, None)):
        expected = torch.softmax(x[rows].float(), 1)
        torch.testing.assert_close(y[rows].float(), expected, rtol=torch.finfo(x.dtype).eps, atol=0)


def test_a_hundred_thousand_matrices():
    A = torch.randn(100_001, 8, 8, device="cuda")
    Q, R = metalcore.qr(A)
    for part in (slice(0, 100), slice(-100, None)):
        torch.testing.assert_close(Q[part] @ R[part], A[part], rtol=0, atol=1e-5)
