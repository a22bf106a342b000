"""Operands that lie across, which threadgroups read in tiles, and operands that several rows of a thread share."""

import pytest
import torch
from traced import built, placed

import metalcore
from metalcore.programs.pointwise import blocks
from metalcore.programs.pointwise.blocks import blocked
from metalcore.programs.pointwise.layout import layout
from metalcore.recording import record


@pytest.fixture(params=["small tiles", "large tiles"])
def small(request, monkeypatch):
    """Small tensors are computed as large ones are."""
    monkeypatch.setattr(blocks, "LEAST_IN_TILES", 1)
    monkeypatch.setattr(blocks, "LEAST_THREADS", 1)
    if request.param == "large tiles":
        monkeypatch.setattr(blocks, "LEAST_IN_LARGE_TILES", 1)


def check(function, variant, *tensors):
    """Asserts that one kernel of a variant gives what PyTorch gives. Returns why it is of that variant."""
    run = built(function, *tensors)
    made, recording = record(run, *tensors)
    expected = function(*[tensor.cpu() for tensor in tensors])
    for a, b in zip(made, expected if isinstance(expected, tuple) else (expected,), strict=True):
        assert a.stride() == b.stride() and torch.equal(a.cpu(), b)
    (plan,) = recording.plans
    assert plan.variant == variant, plan
    return plan.why


def random(shape, dtype, device):
    return (torch.randn(shape) * 10).to(dtype).to(device)


@pytest.mark.parametrize(
    "shape, dtype",
    [(shape, torch.float32) for shape in [(128, 64), (129, 65), (127, 100), (100, 130), (33, 36), (32, 32)]]
    + [(shape, dtype) for shape in [(128, 64), (129, 65)] for dtype in (torch.bfloat16, torch.int64, torch.int8)],
)
def test_sizes_and_dtypes(device, small, shape, dtype):
    torch.manual_seed(0)
    x, a, y = (random(size, dtype, device) for size in (shape, shape[:1], (shape[1], shape[0])))
    check(lambda x, a, y: x * a + y, "tiles", x.t(), a, y)


def test_orders_of_dimensions(device, small):
    torch.manual_seed(0)
    x, y = torch.randn(2, 10, 5, 36, device=device), torch.randn(2, 36, 10, 5, device=device)
    check(lambda x, y: x * 2 + y, "tiles", x.permute(0, 3, 1, 2), y)
    check(lambda x, y: x * 2 + y, "tiles", y.permute(0, 2, 3, 1), x)
    check(
        lambda x, y: x + y,
        "tiles",
        torch.randn(2, 40, 3, 36, device=device).permute(0, 2, 3, 1),
        torch.ones(2, 3, 36, 40, device=device),
    )
    check(lambda x: x.contiguous() + 1, "vector", torch.randn(2, 40, 3, 8, device=device).permute(0, 2, 1, 3))


def test_orders_in_the_middle_of_a_chain(device, small):
    """An operand that a chain reads in two orders is two operands; one that is read at computed places is none."""
    torch.manual_seed(0)
    x, y = torch.randn(36, 36, device=device), torch.randn(3, 36, 40, device=device)
    check(lambda x: (x * 2).t() + x, "tiles", x)
    check(lambda x, y: (x[0, :, None] * y).transpose(0, 1), "vector", x, y)
    check(lambda x, y: (x[1, :, None] * y).transpose(0, 1), "indexed", x, y)
    check(lambda y: (y * 2).permute(0, 2, 1).contiguous() - y.permute(0, 2, 1), "tiles", y)
    check(lambda y: (y * 2).transpose(0, 1).contiguous(), "vector", y)
    check(lambda y: (y * 2).permute(2, 0, 1).flip(0) + 1, "indexed", y)
    run = built(lambda x: (x * 2).t() + x, x)
    with pytest.raises(RuntimeError, match="output 0 overlaps an input"):
        run.into([x], x)


def test_several_operands_and_results(device, small):
    torch.manual_seed(0)
    x, h, y = torch.randn(40, 65), torch.randn(40, 65).half(), torch.randn(65, 40)
    x, h, y = (placed(tensor, device) for tensor in (x.t(), h.t(), y))
    check(lambda y, x, h: (x + h - y, x > y, h + 1.0 - y), "tiles", y, x, h)
    check(lambda y, x: y + x, "tiles", torch.randn(3, 65, 40, device=device), x)
    check(lambda y, x, c: y + x * c, "tiles", y, x, torch.randn(65, 1, device=device))


def test_memory_that_is_an_input(device, small):
    """An output may be an operand that lies as it does, also beside another one that lies across."""
    x, y = torch.randn(40, 70, device=device), torch.randn(70, 40, device=device)
    run = built(lambda y, x: y * 2 + x, y, x.t())
    expected = y.cpu() * 2 + x.t().cpu()
    run.into([y], y, x.t())
    assert torch.equal(y.cpu(), expected)


@pytest.mark.only_on("simulator")
def test_checking_mode(device, small):
    torch.manual_seed(0)
    with metalcore.simulator.checking():
        for dtype, shape in [(torch.float32, (70, 101)), (torch.bfloat16, (72, 96)), (torch.bool, (65, 64))]:
            x, y = random(shape, dtype, device), random(shape[::-1], dtype, device)
            check(lambda x, y: (x != y, x == y), "tiles", x.t(), y)
        check(lambda x, a: x + a, "vector", random((67, 24), torch.float32, device), random(24, torch.float32, device))


def test_rows_that_share_an_operand(device, small):
    torch.manual_seed(0)
    x, a, c = (torch.randn(size, device=device) for size in ((3, 67, 24), (24,), (67, 1)))
    assert "4 in 2 rows a thread" in check(lambda x, a, c: x * a + c, "vector", x, a, c)
    assert "4 a thread" in check(lambda x, a, y: x * a + y, "vector", x, a, x + 1)


def found(shape, *tensors):
    made = blocked(layout(shape, tensors), tensors, 1)
    return made.tile and (made.tile.side, made.tile.tensors, made.tile.vector), made.vector, made.rows


def pair(rows, columns, size=4, across=1):
    """Geometry of a result and of operands that lie across."""
    return (rows, columns), ((columns, 1), size, 0), *[((1, rows), size, 0)] * across


def test_tiles_pay_in_large_and_wide_tensors():
    assert found(*pair(256, 256)) == ((32, (1,), 4), 4, 1)
    assert found(*pair(256, 252)) == (None, 1, 1)
    assert found(*pair(16, 4096)) == found(*pair(4096, 16)) == ((32, (1,), 4), 4, 1)
    assert found(*pair(15, 8192)) == found(*pair(8192, 15)) == (None, 1, 1)


def test_large_tiles_pay_in_larger_tensors():
    assert found(*pair(2048, 1024)) == ((64, (1,), 4), 4, 4)
    assert found(*pair(2048, 1020)) == ((32, (1,), 4), 4, 1)
    assert found(*pair(36, 1 << 16)) == ((64, (1,), 4), 4, 4) and found(*pair(32, 1 << 16)) == ((32, (1,), 4), 4, 1)
    assert found(*pair(2048, 1025)) == ((64, (1,), 4), 1, 16)  # the result has no vectors
    assert found(*pair(2049, 1024)) == ((32, (1,), 1), 4, 1)  # nor has the operand


def test_tiles_fit_into_a_threadgroups_memory():
    assert found(*pair(2048, 2048, 2, across=3)) == ((64, (1, 2, 3), 8), 8, 2)
    assert found(*pair(2048, 2048, 2, across=4)) == ((32, (1, 2, 3, 4), 4), 4, 1)
    assert found(*pair(2048, 2048, 4, across=2)) == ((32, (1, 2), 4), 4, 1)
    assert found(*pair(2048, 2048, 8)) == ((32, (1,), 4), 4, 1)
    assert found(*pair(2048, 2048, 4, across=7)) == ((32, tuple(range(1, 8)), 4), 4, 1)
    assert found(*pair(2048, 2048, 4, across=8)) == ((32, tuple(range(1, 8)), 4), 1, 4)  # the last stays as it is


def test_rows_pay_where_one_operand_has_its_own():
    def rows(rows, columns, *others, size=4):
        return found((rows, columns), ((columns, 1), size, 0), *[(strides, size, 0) for strides in others])[1:]

    own, shared = (1024, 1), (0, 1)
    assert rows(16384, 2048, (2048, 1), shared, size=2) == (8, 4)
    assert rows(16383, 2048, (2048, 1), shared, size=2) == (8, 2)
    assert rows(16384, 2048, (2048, 1), (2048, 1), shared, size=2) == (8, 2)
    assert rows(8192, 1025, (1025, 1), shared) == (1, 8) and rows(8192, 1025, (1025, 1), (1025, 1), shared) == (1, 4)
    assert rows(8192, 1025, (1025, 2), shared) == (1, 1)
    assert rows(8192, 1024, own, shared) == (4, 2) and rows(8191, 1024, own, shared) == (4, 1)
    assert rows(8192, 1024, own, shared, shared, (1, 0)) == (4, 2)
    assert rows(8192, 1024, own, own, shared) == (4, 1) and rows(8192, 1024, shared) == (4, 1)
