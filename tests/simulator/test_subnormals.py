"""METALCORE_FTZ=1: kernels take subnormal numbers for zero, in what they read and in what they compute: float32's,
which Apple's GPUs do, and float16's. PyTorch's own operators are not concerned."""

import os

import pytest
import torch
from processes import python

import metalcore
from metalcore import _C
from metalcore._core import accuracy
from metalcore._core.registry import OPS, Sample
from metalcore.quant import type_of
from metalcore.quant._types import packed_sample
from metalcore.quant._unpack import unpack
from metalcore.simulator import checking

SOURCE = """
#include <metal_stdlib>
using namespace metal;
kernel void halve(device float* x, device half* h, uint i [[thread_position_in_grid]]) {
  x[i] *= 0.5f;
  h[i] *= 0.5h;
}
// The kernel has fibers.
kernel void sum(device float* x, device half* h, uint i [[thread_position_in_grid]]) {
  x[i] = simd_sum(x[i]) * 0x1p+20f;
  threadgroup_barrier(mem_flags::mem_device);
  h[i] = simd_max(h[i]) * 0.5h;
}
kernel void widen(device const half* h, device float* x, uint i [[thread_position_in_grid]]) { x[i] = h[i]; }
kernel void narrow(device const float* x, device half* h, uint i [[thread_position_in_grid]]) { h[i] = half(x[i]); }
"""
SMALLEST = 2.0**-126  # normal float32
HALF = 2.0**-16  # subnormal float16


@pytest.fixture(params=[False, True], ids=["kept", "flushed"])
def flushed(request):
    before = _C.simulator_info()["flushing"]
    _C.simulator_set_flushing(request.param)
    assert _C.simulator_info()["flushing"] is request.param
    yield request.param
    _C.simulator_set_flushing(before)


def run(kernel, x, flushed):
    x = torch.full((256,), x, device="mps")
    h = torch.full((256,), HALF, dtype=torch.float16, device="mps")
    getattr(metalcore.compile_shader(SOURCE), kernel)(x, h, threads=256, group_size=64)
    assert (h == (0 if flushed else HALF / 2)).all()
    assert (x == x[0]).all()
    return x[0].item()


@pytest.mark.parametrize("checks", [False, True], ids=["normal", "checking"])
def test_what_a_kernel_computes_and_reads(flushed, thread_count, checks):
    with checking() if checks else torch.no_grad():
        assert run("halve", SMALLEST, flushed) == (0 if flushed else 2.0**-127)
        assert run("sum", 2.0**-140, flushed) == (0 if flushed else 2.0**-115)
        assert run("sum", SMALLEST, flushed) == 2.0**-101


def test_every_float16(flushed):
    """The 2046 subnormal ones become zeros with their sign, where they are read and where they are made."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.float16)
    library, x = metalcore.compile_shader(SOURCE), torch.zeros(2**16, device="mps")
    expected, subnormal = every.float(), (every.abs() < 2.0**-14) & (every != 0)
    assert subnormal.sum() == 2046
    if flushed:
        expected = torch.where(subnormal, torch.zeros(()).copysign(expected), expected)
    library.widen(every.to("mps"), x)
    assert_same(x.cpu(), expected)
    h = torch.zeros(2**16, dtype=torch.float16, device="mps")
    library.narrow(every.float().to("mps"), h)
    assert_same(h.cpu(), expected.half())


def assert_same(actual, expected):
    assert torch.equal(actual.nan_to_num(nan=1.5), expected.nan_to_num(nan=1.5))
    assert torch.equal(actual.signbit()[~expected.isnan()], expected.signbit()[~expected.isnan()])


@pytest.mark.parametrize("checks", [False, True], ids=["normal", "checking"])
@pytest.mark.parametrize("type", ["Q4_0", "Q4_K", "Q6_K", "IQ4_XS", "MXFP4"])
def test_packed_weights_are_decoded_without_them(flushed, type, checks):
    """Their numbers, and scales that are subnormal float16, in another variant of the kernels."""
    packed = packed_sample(type, 4, 256)
    packed[1, :2] = torch.tensor([3, 0])  # for most types the scale of the first block: 3 * 2^-24
    expected = unpack(packed, type_of(type))
    with checking() if checks else torch.no_grad():
        found = metalcore.dequantize(packed.to("mps"), type).cpu()
    tiny = expected.abs() < 2.0**-126 if flushed else torch.zeros_like(expected, dtype=torch.bool)
    assert torch.equal(found[~tiny], expected[~tiny]) and expected[~tiny].count_nonzero() > 700


def test_bounds_of_errors_know_what_becomes_zero(flushed):
    """A softmax of long rows makes float16 below 2^-14."""
    op = OPS["softmax"]
    sample = Sample("very long rows", ((2, 60000),), options={"dim": -1}, terms=60000)
    assert op.compute(sample, sample.make("cpu", torch.float16))[0].median() < 2.0**-14
    assert accuracy.shares(op, sample, "mps", torch.float16)["forward"] <= 1


def test_the_rest_of_the_process_keeps_them(flushed):
    run("sum", 1.0, flushed)
    assert float("1e-320") * 0.5 > 0
    assert (torch.full((9,), 2.0**-126, device="mps") * 0.5 == 2.0**-127).all()


def test_handlers_of_signals_keep_them(flushed):
    """A handler runs in the middle of a dispatch."""
    code = f"""
import signal, torch, metalcore, metalcore.simulator
from metalcore import _C
from metalcore._core import accuracy
from metalcore._core.registry import OPS, Sample
_C.simulator_set_flushing({flushed})
library = metalcore.compile_shader("kernel void spin(device volatile float* x) {{ while (x[0] == 0) x[1] += 1; }}")
x = torch.zeros(2, device="mps")
y = torch.full((9,), 2.0**-1070, dtype=torch.float64)
def handler(*arguments):
    print((y * 0.5).sum().item() == 9 * 2.0**-1071)
    x.fill_(1)
signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.2)
library.spin(x, threads=1)
print((y * 0.5).sum().item() == 9 * 2.0**-1071)
"""
    done = python("-c", code, timeout=120)
    assert done.stdout == "True\nTrue\n", done.stderr


@pytest.mark.parametrize(
    ("setting", "expected"), [("1", True), ("On", True), ("0", False), ("OFF", False), ("", False)]
)
def test_the_environment_switches_it_on(setting, expected):
    code = "from metalcore import _C; print(_C.simulator_info()['flushing'])"
    environment = {**os.environ, "METALCORE_FTZ": setting}
    done = python("-c", code, env=environment)
    assert done.stdout == f"{expected}\n", done.stderr
