"""linear() of torchao's weight-only tensors runs metalcore's kernels on their bytes."""

import copy

import pytest
import torch
import torch.nn.functional as F

import metalcore

quantization = pytest.importorskip("torchao.quantization")
pytestmark = pytest.mark.only_on("simulator", "mps")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def configurations():
    from torchao.quantization import granularity

    int8, intx = quantization.Int8WeightOnlyConfig, quantization.IntxWeightOnlyConfig
    off = {"set_inductor_config": False}
    yield "rows", int8(**off), True
    yield "one scale", int8(granularity=granularity.PerTensor(), **off), True
    yield "groups", int8(granularity=granularity.PerGroup(32), **off), True
    yield "small groups", int8(granularity=granularity.PerGroup(16), **off), False
    yield "intx", intx(weight_dtype=torch.int4, granularity=granularity.PerGroup(64)), True
    asymmetric = quantization.MappingType.ASYMMETRIC
    yield "zeros", intx(weight_dtype=torch.int8, granularity=granularity.PerAxis(0), mapping_type=asymmetric), True
    yield "float8", quantization.Float8WeightOnlyConfig(set_inductor_config=False), True


def counted(monkeypatch):
    """The packed weights that our products are called with."""
    from metalcore.integrations import torchao

    calls = []

    def affine_linear(x, packed, *rest):
        calls.append(packed)
        return metalcore.affine_linear(x, packed, *rest)

    def scaled_linear(x, weight, bias):
        calls.append(weight.packed)
        return metalcore.scaled_linear(x, weight, bias)

    monkeypatch.setattr(torchao, "affine_linear", affine_linear)
    monkeypatch.setattr(torchao, "scaled_linear", scaled_linear)
    return calls


@pytest.mark.parametrize("name, config, ours", list(configurations()), ids=lambda x: x if isinstance(x, str) else "")
def test_quantized_layers(device, monkeypatch, name, config, ours):
    """Products and gradients are those with the dequantized weight; bytes stay where torchao has them."""
    calls = counted(monkeypatch)
    for dtype in DTYPES:
        model = torch.nn.Sequential(
            torch.nn.Linear(192, 40, dtype=dtype), torch.nn.Linear(40, 8, bias=False, dtype=dtype)
        )
        quantization.quantize_(model[0], config)
        weight = model[0].weight.dequantize().double()
        moved = copy.deepcopy(model).to(device)
        x = torch.randn(3, 192, dtype=dtype)
        given = x.to(device).requires_grad_()
        calls.clear()
        y = moved[0](given)
        assert len(calls) == ours and (not ours or calls[0].data_ptr() == moved[0].weight.qdata.data_ptr())
        grad = torch.randn_like(y)
        y.backward(grad)
        eps, bias = torch.finfo(dtype).eps, model[0].bias.double()
        for found, left, right, add in ((y, x.double(), weight.T, bias), (given.grad, grad.cpu().double(), weight, 0)):
            # The reference's weights are rounded to the dtype, ours are or are not; sums, products and biases are, too.
            bound = 3 * eps * (left.abs() @ right.abs()) + 3 * eps * (left @ right + add).abs()
            bound += len(right) * 2**-24 * (left.abs() @ right.abs())
            assert ((found.detach().cpu().double() - (left @ right + add)).abs() <= bound).all()
        assert moved[1](y.detach()).shape == (3, 8)


def test_int4(device, monkeypatch):
    """As mslk packs them: the first of two numbers in a byte's lower half, signed, with what 0 stands for."""
    calls = counted(monkeypatch)
    numbers, scale, zero = torch.randint(-8, 8, (24, 128)), torch.rand(2, 24).bfloat16(), torch.randn(2, 24).bfloat16()
    qdata = (numbers[:, ::2] & 15 | (numbers[:, 1::2] & 15) << 4).to(torch.uint8).view(torch.int8)
    weight = quantization.Int4Tensor(qdata, scale, zero, [1, 64], torch.Size((24, 128))).to(device)
    exact = numbers * scale.double().T.repeat_interleave(64, 1) + zero.double().T.repeat_interleave(64, 1)
    for pre in (None, torch.rand(128).bfloat16().to(device)):
        weight.act_pre_scale = pre
        x = torch.randn(2, 5, 128).bfloat16().to(device)
        scaled = (x if pre is None else x * pre).cpu().double()
        found = F.linear(x, weight, bias=None).cpu().double()
        bound = 3 * torch.finfo(torch.bfloat16).eps * (scaled.abs() @ exact.abs().T)
        assert ((found - scaled @ exact.T).abs() <= bound).all()
    assert len(calls) == 2


def test_tile_packed(device, monkeypatch):
    """As `_convert_weight_to_int4pack` packs them on CUDA, whose rows and columns are padded: each word of a lane has
    eight numbers of two tiles of 16 columns."""
    calls = counted(monkeypatch)
    rows, length, padded = 44, 192, (48, 256)
    numbers = torch.randint(0, 16, padded)
    scale_and_zero = torch.randn(padded[1] // 64, padded[0], 2).bfloat16()
    qdata = torch.zeros(padded[0] // 8, padded[1] // 128, 32, 4, dtype=torch.int64)
    for shift, offset in enumerate((0, 8, 16, 24, 1, 9, 17, 25)):
        lanes, pairs, tiles = torch.arange(32), torch.arange(4), torch.arange(qdata.shape[1])
        columns = tiles[:, None, None] * 128 + pairs * 32 + lanes[:, None] % 4 * 2 + offset
        for eight in range(len(qdata)):
            qdata[eight] |= numbers[eight * 8 + lanes[:, None] // 4, columns] << 4 * shift
    qdata = torch.where(qdata >= 2**31, qdata - 2**32, qdata).int()
    shape = torch.Size((rows, length))
    weight = quantization.Int4TilePackedTo4dTensor(qdata, scale_and_zero, [1, 64], shape).to(device)
    scale, zero = scale_and_zero.double().repeat_interleave(64, 0).unbind(2)
    exact = ((numbers - 8) * scale.T + zero.T)[:rows, :length]
    x, bias = torch.randn(2, 5, length).bfloat16(), torch.randn(rows).bfloat16()
    for _ in range(2):
        found = F.linear(x.to(device), weight, bias.to(device)).cpu().double()
        expected = x.double() @ exact.T + bias.double()
        bound = 3 * torch.finfo(torch.bfloat16).eps * (x.double().abs() @ exact.abs().T + bias.double().abs())
        assert ((found - expected).abs() <= bound).all()
    assert calls[0] is calls[1]  # the rows are made once
    weight.qdata = weight.qdata[:-1]
    with pytest.raises(ValueError, match=r"qdata \[5, 2, 32, 4\] and scale_and_zero .* do not have 44 rows of 192"):
        F.linear(x.to(device), weight)


@pytest.mark.parametrize("sides", [(0, 0), (1, 0), (32, 64), (48, 64)])
def test_blocks_of_float8(device, monkeypatch, sides):
    """One scale for all, for each row, or for each block, and blocks that our kernels do not take."""
    calls = counted(monkeypatch)
    weight = torch.randn(96, 128)
    block = [side or size for side, size in zip(sides, weight.shape)]
    packed = quantization.Float8Tensor.from_hp(
        weight, granularity=quantization.granularity.PerRow() if sides[0] == 1 else quantization.granularity.PerTensor()
    )
    scale = torch.rand(*(size // side for size, side in zip(weight.shape, block)))
    packed = quantization.Float8Tensor(packed.qdata, scale, block_size=block, dtype=weight.dtype)
    exact = packed.qdata.double() * scale.double().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    x = torch.randn(3, 128)
    found = F.linear(x.to(device), packed.to(device))
    assert len(calls) == (sides[0] != 48)
    # Products of numbers that two roundings made, and 128 sums.
    assert ((found.cpu() - x.double() @ exact.T).abs() <= 130 * 2**-24 * (x.double().abs() @ exact.abs().T)).all()


def test_float8_training(device):
    """Scales are torchao's on the CPU, bit for bit, and so layers compute the same but for the order of sums."""
    float8 = pytest.importorskip("torchao.float8")
    amax = torch.cat([torch.tensor([0.0, 1e-13, 1e-12, 1.1e-12, torch.inf, torch.nan]), torch.rand(1000) * 100])
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        for power in (False, True):
            ours, theirs = (float8.float8_utils.amax_to_scale(each, dtype, power) for each in (amax.to(device), amax))
            assert torch.equal(ours.cpu().nan_to_num(-1), theirs.nan_to_num(-1))
    model = torch.nn.Sequential(torch.nn.Linear(64, 32))
    float8.convert_to_float8_training(model)
    moved, x = copy.deepcopy(model).to(device), torch.randn(16, 64)
    expected, grad = model(x), torch.randn(16, 32)
    expected.backward(grad)
    with metalcore.enable_pytorch_overrides("scaled_mm"):
        y = moved(x.to(device))
        y.backward(grad.to(device))
    for found, reference in ((y, expected), (moved[0].weight.grad, model[0].weight.grad)):
        # 64 sums in other orders, each of which is at most some times the largest result.
        assert torch.allclose(found.cpu(), reference, rtol=0, atol=64 * 2**-22 * reference.abs().max().item())


def test_scales_that_change(device):
    """What was made of a weight's scales is made again after they are written or replaced."""
    layer = torch.nn.Linear(64, 8, bias=False)
    quantization.quantize_(layer, quantization.Int8WeightOnlyConfig(set_inductor_config=False))
    layer, x = layer.to(device), torch.randn(1, 64, device=device)
    first = layer(x)
    layer.weight.scale.mul_(2)
    assert torch.equal(layer(x), 2 * first)
    layer.weight.scale = layer.weight.scale * 2
    assert torch.equal(layer(x), 4 * first)


def test_other_devices():
    layer = torch.nn.Linear(64, 8)
    quantization.quantize_(layer, quantization.Int8WeightOnlyConfig(set_inductor_config=False))
    x = torch.randn(2, 64)
    assert torch.allclose(layer(x), F.linear(x, layer.weight.dequantize(), layer.bias), atol=1e-5)
