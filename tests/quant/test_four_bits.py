"""Numbers of 4 and 8 bits in blocks: kernels against PyTorch's ops of metalcore.quant._blockwise, which
tests/integrations/test_bitsandbytes.py compares with bitsandbytes."""

import pytest
import torch
from rows import tuned

import metalcore
from metalcore.quant._blockwise import BLOCK_SIZES, dynamic_code, pack_blocks, unpack_blocks
from metalcore.quant._four_bits import four_bits_sample

ops = torch.ops.metalcore
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CODE = dynamic_code(torch.device("cpu"))
each_type = pytest.mark.parametrize("type", ["nf4", "fp4", "code"])


def code_of(type, device="cpu"):
    return CODE.to(device) if type == "code" else None


def equal(ours, theirs):
    return torch.equal(ours.cpu().float().nan_to_num(nan=-7.25), theirs.float().nan_to_num(nan=-7.25))


@each_type
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_bytes_and_scales(device, type, block_size):
    """Whole blocks and shorter last ones, zeros, ties, infinite numbers and NaN."""
    for count, dtype in ((0, DTYPES[0]), (1, DTYPES[1]), (7, DTYPES[2]), (block_size, DTYPES[1]), (5001, DTYPES[0])):
        x = torch.randn(count).to(dtype)
        if count == 5001:
            table = unpack_blocks(torch.arange(256).to(torch.uint8), torch.ones(8), "code", 32, CODE, (256,))
            x[64:320], x[320], x[400:464] = table, 1.0, 0.0
            x[700], x[4096 + 600], x[-900:] = torch.inf, torch.nan, 0.0
        packed, absmax = ops.quantize_blockwise(x.to(device), type, block_size, code_of(type, device))
        expected, scales = pack_blocks(x, type, block_size, code_of(type))
        assert torch.equal(packed.cpu(), expected) and equal(absmax, scales)
        for result in DTYPES:
            numbers = ops.dequantize_blockwise(
                packed, absmax, None, None, None, type, block_size, code_of(type, device), x.shape, result
            )
            assert numbers.dtype is result
            assert equal(numbers, unpack_blocks(expected, scales, type, block_size, code_of(type), x.shape).to(result))


def test_nearest(device):
    """Every number becomes the nearest of the table times the largest one of its block."""
    x = torch.randn(64, 64)
    for type in ("nf4", "fp4"):
        found = metalcore.dequantize_4bit(*metalcore.quantize_4bit(x.to(device), type)).cpu()
        table = x.abs().amax(1, keepdim=True)[..., None] * torch.tensor(metalcore.quant._blockwise.TABLES[type])
        least = (x[..., None] - table).abs().amin(-1)
        assert ((found - x).abs() <= least + 2e-7 * x.abs().amax(1, keepdim=True)).all()
    found = metalcore.dequantize_8bit(*metalcore.quantize_8bit(x.to(device))).cpu()
    assert ((found - x).abs() <= 0.008 * x.abs().max()).all()  # half of the widest step, 0.0141
    zeros, absmax = metalcore.quantize_8bit(torch.zeros(300, device=device))
    assert metalcore.dequantize_8bit(zeros, absmax).eq(0).all()


@pytest.mark.parametrize("compress", [False, True])
def test_views_storage_and_compression(device, compress):
    """What lies anywhere in memory has the bytes of a copy; packed bytes may have any dtype."""
    x = torch.randn(6, 130, device=device)
    for numbers in (x[:, 1:], x.T, x[::2, :128], x.to(torch.bfloat16)[1:]):
        packed, state = metalcore.quantize_4bit(numbers, "nf4", 32, compress)
        copy = metalcore.quantize_4bit(numbers.contiguous().clone(), "nf4", 32, compress)
        assert torch.equal(packed, copy[0]) and torch.equal(state.absmax, copy[1].absmax)
        assert state.shape == numbers.shape and (state.scales is not None) == compress
        found = metalcore.dequantize_4bit(packed, state)
        assert found.shape == numbers.shape and found.dtype is numbers.dtype
        if packed.numel() % 4 == 0:
            assert torch.equal(found, metalcore.dequantize_4bit(packed.flatten().view(torch.float32), state))
    if compress:
        scales = ops.dequantize_blockwise(
            state.scales, state.absmax, None, None, None, "code", 256, state.scales_code, state.scales.shape, DTYPES[0]
        )
        plain = metalcore.quant.FourBits(scales + state.offset, state.shape, state.dtype, 32, "nf4")
        assert torch.equal(found, metalcore.dequantize_4bit(packed, plain))


@pytest.mark.parametrize("type", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
def test_linear(device, type, nested):
    """Products and gradients, on both sides of the plans' boundaries, against float64."""
    for rows, length, family in (
        (1, 64, None),
        (3, 2080, "baseline"),
        (3, 160, "apple7"),
        (9, 96, None),
        (2, 50, None),
        (2, 160, "hopper"),
        (8, 2080, "hopper"),
        (9, 96, "hopper"),
        (17, 64, "hopper"),
    ):
        packed, state = four_bits_sample(type, 21, length, device, 32, nested)
        weights = metalcore.dequantize_4bit(packed, state, torch.float32).cpu().double()
        for dtype in DTYPES:
            x = torch.randn(2, rows, length, device=device).to(dtype)[1].requires_grad_()
            bias = torch.randn(21, device=device).to(dtype)
            with tuned(family or "baseline"):
                y = metalcore.linear_4bit(x, packed, state, bias)
            grad = torch.randn_like(y)
            y.backward(grad)
            eps = torch.finfo(dtype).eps
            for ours, left, right, add in (
                (y, x.detach().cpu().double(), weights.T, bias.cpu().double()),
                (x.grad, grad.cpu().double(), weights, 0),
            ):
                # Terms are rounded to x's dtype, each sum is float32's, and the result is rounded twice.
                bound = (left.abs() @ right.abs()) * (eps + len(right) * 2**-23) + 2 * eps * (left @ right + add).abs()
                assert ((ours.detach().cpu().double() - (left @ right + add)).abs() <= bound).all()


def test_empty_and_batches(device):
    packed, state = four_bits_sample("nf4", 8, 64, device)
    assert metalcore.linear_4bit(torch.ones(0, 64, device=device), packed, state).shape == (0, 8)
    x = torch.randn(2, 3, 64, device=device)
    batched = metalcore.linear_4bit(x, packed, state)
    assert torch.equal(batched.view(6, 8), metalcore.linear_4bit(x.view(6, 64), packed, state))
    assert torch.allclose(batched[0, 0], metalcore.linear_4bit(x[0, 0], packed, state), rtol=1e-5, atol=1e-5)
    empty, state = metalcore.quantize_4bit(torch.empty(0, 64, device=device), compress=True)
    assert metalcore.linear_4bit(x, empty, state).shape == (2, 3, 0)


def test_errors(device):
    x = torch.ones(4, 64, device=device)
    packed, state = metalcore.quantize_4bit(x)
    with pytest.raises(ValueError, match='quantize_4bit: type must be "nf4" or "fp4", not \'nf5\''):
        metalcore.quantize_4bit(x, "nf5")
    with pytest.raises(ValueError, match="quantize_4bit: block_size must be one of 32, .* not 48"):
        metalcore.quantize_4bit(x, block_size=48)
    with pytest.raises(TypeError, match="quantize_4bit: tensor must be float32, float16 or bfloat16, not torch.int64"):
        metalcore.quantize_4bit(x.long())
    with pytest.raises(TypeError, match="dequantize_4bit: dtype must be"):
        metalcore.dequantize_4bit(packed, state, torch.int8)
    with pytest.raises(RuntimeError, match="x of shape .* does not go with 4 rows of 64 weights"):
        metalcore.linear_4bit(x[:, :32], packed, state)
    with pytest.raises(RuntimeError, match="256 numbers of 4 bits have 128 bytes, and packed has 127"):
        metalcore.dequantize_4bit(packed[1:], state)
    state.absmax = state.absmax[1:]
    with pytest.raises(RuntimeError, match="absmax must have 4 elements, not 3"):
        metalcore.dequantize_4bit(packed, state)


def test_compiled(device):
    packed, state = four_bits_sample("nf4", 8, 64, device, nested=True)
    x = torch.randn(2, 64, device=device)
    compiled = torch.compile(metalcore.linear_4bit, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x, packed, state), metalcore.linear_4bit(x, packed, state))
    for call, inputs in (
        (ops.blockwise_matmul, (x.requires_grad_(), packed.flatten(), *state.operands(), 8, 64, False)),
        (ops.quantize_blockwise, (x.detach(), "fp4", 64, None)),
        (ops.dequantize_blockwise, (packed.flatten(), *state.operands(), None, [8, 64], torch.bfloat16)),
    ):
        torch.library.opcheck(call.default, inputs, test_utils=("test_schema", "test_faketensor"))
