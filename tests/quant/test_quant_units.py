"""Products of packed weights by units that multiply tensors, against float64 products of the unpacked weights."""

import pytest
import torch
from references import wide

import metalcore
from metalcore import _C
from metalcore.quant._types import KERNELS, packed_sample
from metalcore.recording import record

pytestmark = pytest.mark.only_on("simulator", "cuda")
NAMES = {torch.float16: "half", torch.bfloat16: "bfloat"}


@pytest.fixture(autouse=True)
def units(device):
    _C.use_measured(device, _C.gpu_family(device), [("quant", "unit_rows", [20])])
    yield
    _C.use_measured(device, _C.gpu_family(device), [])


def check(device, type, dtype, rows, weights, length, kernel=None):
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, length, generator=generator).to(device, dtype)
    packed = packed_sample(type, weights, length, device=device)
    result, recording = record(metalcore.quantized_linear, x, packed, type)
    assert recording.kernels[-1:] == (kernel or f"quant_unit_{type}_{NAMES[dtype]}",)
    # Weights and results are rounded to x's dtype, and sums are float32.
    numbers = wide(metalcore.dequantize(packed, type)).to(dtype).double()
    exact, terms = wide(x) @ numbers.T, wide(x).abs() @ numbers.abs().T
    rounding = torch.finfo(dtype).eps / 2
    limit = 2 * rounding * exact.abs() + length * 2**-24 * terms
    assert ((wide(result) - exact).abs() <= limit).all()


@pytest.mark.parametrize("type", sorted(KERNELS))
def test_every_type(device, type):
    """Rows and weights lie beside the sizes of tiles."""
    check(device, type, torch.bfloat16 if type < "Q4" else torch.float16, 21, 130, 512)


@pytest.mark.parametrize("rows, weights, length", [(20, 3, 32), (128, 128, 96), (129, 127, 64), (300, 40, 160)])
def test_sizes(device, rows, weights, length):
    """Tiles, and steps of 64 terms, of which the last may have half as many."""
    check(device, "Q8_0", torch.bfloat16, rows, weights, length)
    check(device, "Q4_0", torch.float16, rows, weights, length)


def test_fewer_rows_and_floats_take_other_kernels(device):
    packed = packed_sample("Q4_K", 40, 256, device=device)
    for rows, dtype in ((19, torch.bfloat16), (20, torch.float32)):
        x = torch.randn(rows, 256).to(device, dtype)
        assert "quant_unit" not in str(record(metalcore.quantized_linear, x, packed, "Q4_K")[1].kernels)
