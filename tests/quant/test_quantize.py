"""Numbers as packed weights."""

import pytest
import torch

from metalcore import dequantize
from metalcore.quant import quantize, quantize_model, type_of

gguf = pytest.importorskip("gguf")

# The root mean square errors of ggml's quantizers (quantize_q4_K and so on, without weights of importance), as shares
# of the numbers' own: for normal numbers, and for those of heavy() below.
ERRORS = {
    "Q2_K": (0.29709, 0.37173),
    "Q3_K": (0.15042, 0.17976),
    "Q4_K": (0.07154, 0.10046),
    "Q5_K": (0.03598, 0.05229),
    "Q6_K": (0.01769, 0.02882),
    "IQ4_NL": (0.07601, 0.10609),
    "IQ4_XS": (0.07661, 0.10736),
}


@pytest.mark.parametrize("type", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4", "TQ1_0", "TQ2_0"])
def test_bytes_of_gguf(device, type):
    x = torch.randn(5, 512)
    expected = gguf.quants.quantize(x.numpy(), gguf.GGMLQuantizationType(type_of(type).number))
    assert torch.equal(quantize(x.to(device), type).cpu(), torch.from_numpy(expected))


@pytest.mark.parametrize("type", ERRORS)
def test_error(device, type):
    for numbers, bound in zip((torch.randn, heavy), ERRORS[type]):
        torch.manual_seed(0)
        x = numbers(64, 1024)
        packed = quantize(x.to(device), type)
        assert packed.shape == (64, 1024 // type_of(type).block * type_of(type).nbytes) and packed.dtype == torch.uint8
        error = (dequantize(packed, type).cpu() - x).square().mean().sqrt() / x.square().mean().sqrt()
        assert error <= bound


def heavy(*shape):
    """Numbers of which a few are large."""
    return torch.randn(shape) * torch.randn(shape).exp()


@pytest.mark.parametrize("type", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "Q4_0", "Q8_0"])
def test_constants(device, type):
    """Blocks of one number, of zeros, and of only positive or only negative ones."""
    x = torch.stack([torch.zeros(256), torch.full((256,), 3.0), torch.full((256,), -0.5), torch.rand(256) + 1])
    found = dequantize(quantize(x.to(device), type), type).cpu()
    assert found.isfinite().all() and torch.equal(found[0], x[0])
    assert (found - x).abs().max() <= 0.45  # Q2_K has steps of 0.7 there


def test_shapes_and_dtypes(device):
    x = torch.randn(2, 3, 256, device=device)
    assert quantize(x, "Q4_K").shape == (2, 3, 144) and quantize(x[:0], "Q4_K").shape == (0, 3, 144)
    half = x.to(torch.float16)
    assert torch.equal(quantize(half, "Q6_K"), quantize(half.float(), "Q6_K"))
    assert torch.equal(dequantize(quantize(x, "F32"), "F32"), x)
    assert torch.equal(dequantize(quantize(x, "BF16"), "BF16"), x.to(torch.bfloat16).float())


def test_errors():
    with pytest.raises(ValueError, match=r"Q4_K's blocks of 256 do not divide rows of shape \(2, 100\)"):
        quantize(torch.randn(2, 100), "Q4_K")
    with pytest.raises(ValueError, match="cannot make weights of type IQ2_XXS"):
        quantize(torch.randn(2, 256), "IQ2_XXS")
    with pytest.raises(TypeError, match="quantize: tensor must be a tensor, not list"):
        quantize([1.0], "Q8_0")
    with pytest.raises(TypeError, match="quantize: tensor must be floating-point numbers, not torch.int64"):
        quantize(torch.arange(32), "Q8_0")


@pytest.mark.parametrize("type", [*ERRORS, "Q8_0", "MXFP4"])
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite(device, type, number):
    """Some types would say 0 for the whole block."""
    x = torch.randn(2, 256, device=device)
    x[1, 3] = number
    with pytest.raises(ValueError, match=f"has NaN or infinite numbers, which blocks of {type} cannot hold"):
        quantize(x, type)
    assert torch.equal(dequantize(quantize(x, "F16"), "F16").isfinite(), x.isfinite())


@pytest.mark.parametrize("type", ["Q4_0", "Q5_1", "Q8_0", "Q4_K", "Q6_K", "IQ4_XS"])
def test_numbers_beyond_what_scales_hold(device, type):
    """A scale of infinity would make infinity or 0 of a block."""
    numbers = torch.zeros(2, 256, device=device)
    numbers[1, 3] = -65504
    assert dequantize(quantize(numbers, type), type)[1, 3].item() == pytest.approx(-65504, rel=0.01)
    numbers[1, 3] = -70000
    with pytest.raises(ValueError, match=f"has numbers up to 70000, beyond 65504, which blocks of {type} cannot hold"):
        quantize(numbers, type)
    assert dequantize(quantize(numbers, "MXFP4"), "MXFP4").isfinite().all()
    model = torch.nn.Sequential(torch.nn.Linear(256, 2), torch.nn.Linear(256, 2))
    with torch.no_grad():
        model[1].weight.copy_(numbers)
    with pytest.raises(ValueError, match="1.weight has numbers up to 70000, beyond 65504, which blocks of .* cannot"):
        quantize_model(model, types={"": type})
    assert all(isinstance(module, torch.nn.Linear) for module in model)
