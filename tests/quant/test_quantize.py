"""Numbers as packed weights."""

import pytest
import torch

from metalcore import dequantize
from metalcore.quant import quantize, quantize_model, type_of
from metalcore.quant._pack import MADE

each_made = pytest.mark.parametrize("type", sorted(MADE))

# Root mean square errors as shares of the numbers' own, for normal numbers and for those of heavy() below: of a search
# over 38 scales with minima, or 74 without, whose results are rounded to the block's integers and not tried there. Each
# is below that of ggml's quantizer (quantize_q4_K and so on, without weights of importance).
ERRORS = {
    "Q2_K": (0.270216, 0.288099),
    "Q3_K": (0.143209, 0.175287),
    "Q4_K": (0.071295, 0.099951),
    "Q5_K": (0.035770, 0.051617),
    "Q6_K": (0.016884, 0.028261),
    "IQ4_NL": (0.075527, 0.103711),
    "IQ4_XS": (0.076074, 0.105107),
}


@pytest.mark.parametrize("place", ["device", "cpu"])
@pytest.mark.parametrize("type", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4", "TQ1_0", "TQ2_0"])
def test_bytes_of_gguf(device, type, place):
    gguf = pytest.importorskip("gguf")
    x = torch.cat([torch.randn(5, 512), torch.randn(3, 512).exp() * 100, 1e-6 * torch.randn(1, 512)])
    x[0, :32], x[1, 40], x[1, 50] = 0.0, 9.0, -9.0  # the first of two largest numbers decides about the sign
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        numbers = x.to(dtype)
        expected = gguf.quants.quantize(numbers.float().numpy(), gguf.GGMLQuantizationType(type_of(type).number))
        assert torch.equal(
            quantize(numbers.to(place if place == "cpu" else device), type).cpu(), torch.from_numpy(expected)
        )


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


@each_made
def test_views_and_dtypes(device, type):
    """What lies anywhere in memory becomes the bytes of a copy, and CPU tensors those of the device."""
    x = torch.randn(3, 2, 513, device=device)
    columns = torch.randn(512, 3, device=device).T
    for numbers in (x[..., 1:], x.to(torch.bfloat16)[:, 1, 1:], x.transpose(0, 1)[1:, :, :256], columns):
        copy = numbers.contiguous().clone()
        packed = quantize(numbers, type)
        assert packed.shape == (*numbers.shape[:-1], numbers.shape[-1] // type_of(type).block * type_of(type).nbytes)
        assert torch.equal(packed, quantize(copy, type))
        assert torch.equal(packed, quantize(copy.float(), type)) and torch.equal(
            packed, quantize(copy.cpu().double(), type).to(device)
        )
    assert quantize(x[:0, :, :256], type).shape == (0, 2, 256 // type_of(type).block * type_of(type).nbytes)
    assert (
        torch.ops.metalcore.quantize(x[..., 1:].to("meta"), type_of(type).number)[0].shape
        == quantize(x[..., 1:], type).shape
    )


def test_plain_types(device):
    x = torch.randn(2, 3, 256, device=device)
    assert torch.equal(dequantize(quantize(x, "F32"), "F32"), x)
    assert torch.equal(dequantize(quantize(x, "BF16"), "BF16"), x.to(torch.bfloat16).float())


@pytest.mark.parametrize("type", ["Q8_0", "Q5_K"])
def test_more_numbers_than_at_once(type):
    """Scales are searched for 2**24 numbers at a time."""
    x = torch.randn(1, 4096, dtype=torch.bfloat16)
    packed = quantize(x.expand(4098, -1), type)
    assert torch.equal(packed, quantize(x, type).expand(4098, -1))


def test_direct_calls(device):
    call = torch.ops.metalcore.quantize
    for where in (device, "cpu"):
        x = torch.randn(2, 256, device=where)
        with pytest.raises(RuntimeError, match="metalcore::quantize: there are no kernels for GGML's type 16"):
            call(x, 16)
        with pytest.raises(RuntimeError, match="metalcore::quantize: numbers must be float32, float16 or bfloat16"):
            call(x.long(), 12)
        with pytest.raises(RuntimeError, match=r"blocks of 256 do not divide rows of shape \[2, 100\] as Q4_K"):
            call(x[:, :100], 12)
    torch.library.opcheck(call.default, (torch.randn(2, 256, device=device), 12))


def test_errors():
    with pytest.raises(ValueError, match=r"Q4_K's blocks of 256 do not divide rows of shape \(2, 100\)"):
        quantize(torch.randn(2, 100), "Q4_K")
    with pytest.raises(ValueError, match="cannot make weights of type IQ2_XXS"):
        quantize(torch.randn(2, 256), "IQ2_XXS")
    with pytest.raises(TypeError, match="quantize: tensor must be a tensor, not list"):
        quantize([1.0], "Q8_0")
    with pytest.raises(TypeError, match="quantize: tensor must be floating-point numbers, not torch.int64"):
        quantize(torch.arange(32), "Q8_0")


@each_made
def test_numbers_that_are_not_finite(device, type):
    """Some types would say 0 for the whole block. The error does not depend on where the number is."""
    for number, place in ((torch.nan, 0), (torch.nan, 255), (torch.inf, 100), (-torch.inf, 3)):
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(2, 256, dtype=dtype)
            x[1, place] = number
            for numbers in (x, x.to(device)):
                with pytest.raises(ValueError, match=f"has NaN or infinite numbers, which blocks of {type} cannot"):
                    quantize(numbers, type)
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
