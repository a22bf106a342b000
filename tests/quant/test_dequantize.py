"""Packed weights as numbers."""

import pytest
import torch
from formats import assert_bits, by_gguf, each_type, unusual
from references import DTYPES, as_device_has, check_operator, flushes_subnormals

import metalcore
from metalcore.quant import type_of
from metalcore.quant._types import packed_sample
from metalcore.quant._unpack import unpack

gguf = pytest.importorskip("gguf")


@each_type
@pytest.mark.parametrize("make", [packed_sample, unusual])
def test_bits_of_gguf(device, type, make):
    packed = make(type, 7, 768)
    expected = by_gguf(packed, type)
    assert torch.equal(unpack(packed, type_of(type)).nan_to_num(), expected.nan_to_num())
    found = metalcore.dequantize(packed.to(device), type)
    if flushes_subnormals():  # scales of MXFP4 go down to 2^-128
        tiny = expected.abs() < 2.0**-120
        assert (found.cpu().abs() <= expected.abs())[tiny].all()
        found, expected = found.cpu().masked_fill(tiny, 0), expected.masked_fill(tiny, 0)
    assert_bits(found, expected)


@each_type
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_dtypes(device, type, dtype):
    packed = packed_sample(type, 3, 256)
    found = metalcore.dequantize(packed.to(device), type, dtype=dtype)
    assert torch.equal(found.cpu(), as_device_has(by_gguf(packed, type).to(dtype)))


@pytest.mark.parametrize("type", ["IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "TQ1_0", "TQ2_0"])
def test_types_without_kernels(device, type):
    known = type_of(type)
    packed = torch.randint(60, (4, 2 * known.nbytes), dtype=torch.uint8)
    assert_bits(metalcore.dequantize(packed.to(device), type), by_gguf(packed, type))


@pytest.mark.parametrize("type", ["F32", "F16", "BF16"])
def test_plain_types(device, type):
    numbers = torch.randn(4, 8).to(torch.bfloat16)
    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[type]
    packed = numbers.to(dtype).view(torch.uint8)
    assert torch.equal(metalcore.dequantize(packed.to(device), type).cpu(), numbers.float())


@pytest.mark.parametrize("type", ["Q4_K", "Q6_K", "MXFP4"])
def test_places_in_memory(device, type):
    """Rows that begin anywhere, whose bytes are no whole words, and rows that lie apart."""
    packed = packed_sample(type, 5, 256)
    expected = by_gguf(packed, type)
    behind = torch.cat([torch.zeros(3, dtype=torch.uint8), packed.flatten()]).to(device)[3:].view(packed.shape)
    assert_bits(metalcore.dequantize(behind, type), expected)
    assert_bits(metalcore.dequantize(packed.to(device)[1::2], type), expected[1::2])
    assert_bits(metalcore.dequantize(packed.to(device)[4:], type), expected[4:])


def test_shapes(device):
    packed = packed_sample("Q4_K", 6, 512)
    expected = by_gguf(packed, "Q4_K")
    on_device = packed.to(device)
    for type in ("q4_k", 12, gguf.GGMLQuantizationType.Q4_K, type_of("Q4_K")):
        assert_bits(metalcore.dequantize(on_device, type), expected)
    assert_bits(metalcore.dequantize(on_device.flatten(), "Q4_K", (2, 3, 512)), expected.view(2, 3, 512))
    assert_bits(metalcore.dequantize(on_device.view(2, 3, -1), "Q4_K"), expected.view(2, 3, 512))
    assert metalcore.dequantize(on_device[:0], "Q4_K").shape == (0, 512)
    assert metalcore.dequantize(on_device[:, :0], "Q4_K").shape == (6, 0)


def test_errors(device):
    packed = packed_sample("Q4_K", 6, 512).to(device)
    with pytest.raises(ValueError, match="GGML has no type 'Q4_X'"):
        metalcore.dequantize(packed, "Q4_X")
    with pytest.raises(ValueError, match="are not rows of Q6_K's blocks of 210"):
        metalcore.dequantize(packed, "Q6_K")
    with pytest.raises(ValueError, match=r"1728 bytes of Q4_K are not weights of shape \(6, 256\)"):
        metalcore.dequantize(packed, "Q4_K", (6, 256))
    with pytest.raises(ValueError, match="packed weights are uint8"):
        metalcore.dequantize(packed.float(), "Q4_K")


@each_type
def test_embedding(device, type):
    packed = packed_sample(type, 9, 256)
    expected = by_gguf(packed, type)
    indices = torch.tensor([[8, 0, 3], [3, 3, 7]])
    for dtype in (torch.int64, torch.int32):
        found = metalcore.quantized_embedding(indices.to(dtype).to(device), packed.to(device), type)
        assert_bits(found, expected[indices])
    assert metalcore.quantized_embedding(indices[:0].to(device), packed.to(device), type).shape == (0, 3, 256)


@each_type
def test_no_rows_on_the_cpu(type):
    packed = packed_sample(type, 9, 256)
    assert metalcore.dequantize(packed[:0], type).shape == (0, 256)
    assert metalcore.quantized_embedding(torch.zeros(2, 0, dtype=torch.int64), packed, type).shape == (2, 0, 256)


def test_errors_of_embedding(device):
    for where in ("cpu", device):
        packed, indices = packed_sample("Q4_K", 6, 256).to(where), torch.zeros(2, dtype=torch.int64, device=where)
        with pytest.raises(TypeError, match="indices must be integers, not torch.float32"):
            metalcore.quantized_embedding(indices.float(), packed, "Q4_K")
        with pytest.raises(TypeError, match="dtype must be a floating-point one, not torch.int32"):
            metalcore.quantized_embedding(indices, packed, "Q4_K", torch.int32)
        with pytest.raises(RuntimeError, match="packed must have 2 dimensions, not 3"):
            metalcore.quantized_embedding(indices, packed[None], "Q4_K")
    with pytest.raises(IndexError):  # as in PyTorch: no row is counted from the end
        metalcore.quantized_embedding(torch.tensor([-1]), packed_sample("Q4_K", 6, 256), "Q4_K")


def test_an_embedding_without_rows(device):
    packed = torch.empty(0, 18, dtype=torch.uint8, device=device)
    with pytest.raises(RuntimeError, match="packed has no rows"):
        metalcore.quantized_embedding(torch.tensor([0, 1], device=device), packed, "Q4_0")
    none = torch.empty(2, 0, dtype=torch.int64, device=device)
    assert metalcore.quantized_embedding(none, packed, "Q4_0").shape == (2, 0, 32)


def test_operator(device):
    packed = packed_sample("Q4_K", 5, 256).to(device)
    check_operator(torch.ops.metalcore.quant_rows, packed, None, 12, torch.float16)
    check_operator(torch.ops.metalcore.quant_rows, packed, torch.tensor([4, 1], device=device), 12, torch.float32)
