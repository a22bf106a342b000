"""Floating-point numbers of 8 and 4 bits with scales: kernels against the formats' definitions."""

import pytest
import torch
from rows import tuned

import metalcore
from metalcore.quant import ScaledWeight
from metalcore.quant._scaled_weight import FORMATS, scaled_sample

ops = torch.ops.metalcore
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
each_format = pytest.mark.parametrize("format", list(FORMATS))
# Bits of exponent and of mantissa, and the exponent's bias, as the specifications of OCP have them.
FIELDS = {
    torch.float8_e4m3fn: (4, 3, 7),
    torch.float8_e5m2: (5, 2, 15),
    torch.float8_e8m0fnu: (8, 0, 127),
    None: (2, 1, 1),  # E2M1
}


def table(dtype):
    """What every code stands for, in float64, by the specification's words."""
    exponents, mantissas, bias = FIELDS[dtype]
    has_sign = dtype is not torch.float8_e8m0fnu
    code = torch.arange(2 ** (exponents + mantissas + has_sign))
    exponent, mantissa = code >> mantissas & (1 << exponents) - 1, (code & (1 << mantissas) - 1) / 2**mantissas
    normal = torch.exp2(exponent.double() - bias) * (1 + mantissa.double())
    value = torch.where(exponent > 0, normal, 2.0 ** (1 - bias) * mantissa.double()) if has_sign else normal
    if dtype is torch.float8_e5m2:
        value[exponent == 31] = torch.where(mantissa == 0, torch.inf, torch.nan)[exponent == 31].double()
    elif dtype is not None:
        value[(code & 0x7F) == 0x7F if has_sign else code == 255] = torch.nan
    return torch.where(code >> (exponents + mantissas) > 0, -value, value) if has_sign else value


def values(codes, dtype):
    return table(dtype)[codes.cpu().long()]


@pytest.mark.parametrize("dtype", [dtype for dtype in FIELDS if dtype])
def test_definitions_are_those_of_pytorch(dtype):
    codes = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(values(codes, dtype).nan_to_num(7), codes.view(dtype).double().nan_to_num(7))


def nibbles(packed):
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


def block_of(weight):
    of = FORMATS[weight.format]
    return (1, of.of_scale) if of.of_scale else weight.block


def scale_grid(weight, shape):
    """A scale for each number, in float64."""
    of = FORMATS[weight.format]
    scales = weight.scales.cpu()
    scales = scales.double() if of.scales is torch.float32 else values(scales, of.scales)
    if weight.factor is not None:
        scales = (scales * weight.factor.cpu().double()).float().double()  # rounded once
    for dim, side in enumerate(block_of(weight)):
        scales = scales.repeat_interleave(side or shape[dim], dim).narrow(dim, 0, shape[dim])
    return scales


def formula(weight):
    """Numbers times scales, in float64."""
    of = FORMATS[weight.format]
    packed = weight.packed.cpu()
    numbers = values(packed if of.numbers else nibbles(packed), of.numbers)
    return numbers * scale_grid(weight, numbers.shape)


def same_bits(a, b):
    assert a.dtype == b.dtype and a.shape == b.shape
    equal = a.cpu().view(torch.uint8) == b.cpu().view(torch.uint8)
    return bool((equal.view(*a.shape, -1).all(-1) | (a.isnan() & b.isnan()).cpu()).all())


def moved(weight, where):
    return ScaledWeight(*(each.to(where) if isinstance(each, torch.Tensor) else each for each in weight))


@each_format
def test_every_code_and_scale(device, format):
    """All codes, and all scales of 8 bits, are the formats' numbers, -0 and NaN included."""
    of = FORMATS[format]
    codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    length = 256 * 8 // of.bits
    if of.of_scale:
        scales, block = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, length // of.of_scale), ()
    else:
        scales, block = torch.logspace(-30, 30, 256)[:, None], (1, 0)
    factor = torch.tensor([0.3]) if format == "nvfp4" else None
    weight = ScaledWeight(codes, scales, format, block, factor)
    expected = formula(weight)
    for dtype in DTYPES:
        for where in (device, "cpu"):
            found = metalcore.dequantize_scaled(moved(weight, where), dtype)
            assert same_bits(found.cpu(), expected.float().to(dtype)), (dtype, where)
    rows = torch.tensor([[200, 3]], device=device)
    found = metalcore.scaled_embedding(rows, moved(weight, device))
    assert same_bits(found.cpu(), expected.float()[rows.cpu()])


@pytest.mark.parametrize("block", [(0, 0), (1, 0), (1, 128), (128, 128), (4, 32), (0, 64)])
def test_grids(device, block):
    weight = scaled_sample("e4m3", 133, 288, device, block)
    assert same_bits(metalcore.dequantize_scaled(weight).cpu(), formula(weight).float())
    assert same_bits(metalcore.dequantize_scaled(moved(weight, "cpu")), formula(weight).float())


def numbers(format):
    """Numbers of all sizes around the format's, ties, zeros, blocks of zeros, and numbers beyond the largest."""
    of = FORMATS[format]
    codes = torch.arange(256, dtype=torch.uint8)
    exact = values(codes if of.numbers else nibbles(codes), of.numbers).float().nan_to_num(0, 0, 0).sort().values
    ties = (exact[1:] + exact[:-1]) / 2
    some = torch.cat([exact, ties, torch.zeros(70), torch.randn(3000), torch.randn(2000).mul(12).exp2()])
    return some[: len(some) // 64 * 64].view(-1, 64)


def rounded(quotients, of):
    """The nearest codes, of two equally near ones the even one, of numbers that are not beyond the largest."""
    exact = table(of.numbers)
    exact = exact[: len(exact) // 2]
    exact = exact[exact <= of.largest]
    size = quotients.double().abs().clamp(max=of.largest)
    upper = torch.searchsorted(exact, size).clamp(min=1)
    below, above = size - exact[upper - 1], exact[upper] - size
    codes = torch.where((below < above) | (below == above) & (upper % 2 == 1), upper - 1, upper)
    codes = (codes | quotients.signbit().long() << of.bits - 1).to(torch.uint8)
    return codes if of.numbers else codes[..., ::2] | codes[..., 1::2] << 4


@pytest.mark.parametrize("format", ["mxfp8", "mxfp8_e5m2", "mxfp4"])
@pytest.mark.parametrize("rounding", ["floor", "ceil", "even"])
def test_microscaling(device, format, rounding):
    """Scales and numbers are those of the Microscaling specification (floor), or of the rule's words."""
    of, x = FORMATS[format], numbers(format)
    for dtype in DTYPES:
        given = x.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)
        blocks = given.double().unflatten(1, (-1, 32))
        largest = blocks.abs().amax(-1)
        if rounding == "even":  # to the precision that the format has
            step = torch.exp2(largest.log2().floor() - {"mxfp8": 3, "mxfp8_e5m2": 2, "mxfp4": 1}[format])
            raised = (largest / step + 0.5).floor() * step  # halves up: a tie has the power of the larger
            largest = raised.nan_to_num()  # 0 / 0
        top = torch.tensor(of.largest).double()
        power = (largest / top).log2().ceil() if rounding == "ceil" else largest.log2().floor() - top.log2().floor()
        power = power.clamp(min=-127)
        divided = (blocks / torch.exp2(power)[..., None]).float().flatten(1)
        for where in (device, "cpu"):
            made = metalcore.quantize_scaled(given.to(where), format, rounding=rounding)
            assert torch.equal(made.scales.cpu(), (power + 127).to(torch.uint8))
            assert torch.equal(made.packed.cpu(), rounded(divided, of)), (dtype, where)


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
@pytest.mark.parametrize("block", [(0, 0), (1, 0), (1, 32), (32, 64)])
def test_eight_bits(device, format, block):
    of, x = FORMATS[format], numbers(format)
    for where in (device, "cpu"):
        made = metalcore.quantize_scaled(x.to(where), format, block)
        quotients = x / scale_grid(made, x.shape).float()
        assert quotients.abs().max() <= of.largest * (1 + 2**-23)  # one rounding
        assert torch.equal(made.packed.cpu(), rounded(quotients, of))


def test_nvfp4(device):
    x = numbers("nvfp4")
    for where in (device, "cpu"):
        made = metalcore.quantize_scaled(x.to(where), "nvfp4")
        factor = x.abs().max() / (448.0 * 6.0)
        assert made.factor.cpu().view(()) == factor
        blocks = x.unflatten(1, (-1, 16))
        scales = (blocks.abs().amax(-1) / 6.0 / factor).clamp(max=448).to(torch.float8_e4m3fn)
        assert torch.equal(made.scales.cpu(), scales.view(torch.uint8))
        divided = blocks / (scales.float() * factor)[..., None]
        divided = torch.where(scales.float()[..., None] > 0, divided, 0.0)
        assert torch.equal(made.packed.cpu(), rounded(divided.flatten(1), FORMATS["nvfp4"]))


def test_numbers_that_no_format_holds(device):
    """Infinite numbers and NaN make the block NaN in the Microscaling formats, and the least are zeros."""
    x = torch.ones(1, 128)
    x[0, 3], x[0, 40], x[0, 64:96] = float("nan"), float("-inf"), 1e-45
    for format in ("mxfp8", "mxfp4"):
        for where in (device, "cpu"):
            made = metalcore.quantize_scaled(x.to(where), format)
            back = metalcore.dequantize_scaled(made)[0].cpu()
            assert back[:64].isnan().all() and back[64:96].eq(0).all() and back[96:].eq(1).all()
    with_nan = metalcore.quantize_scaled(x[:, :32].to(device), "e4m3", (1, 0))
    assert metalcore.dequantize_scaled(with_nan).isnan().all()


def bound_and_result(weight, left, transposed, dtype, add=0):
    """The products in float64, and how far results may be: weights are rounded to x's dtype, each sum is float32's, and
    the result is rounded twice."""
    right = formula(weight) if transposed else formula(weight).T
    eps, result = torch.finfo(dtype).eps, left @ right
    bound = (left.abs() @ right.abs()) * (eps + (len(right) + 4) * 2**-24) + 3 * eps * result.abs()
    return bound + 2 * eps * (result + add).abs(), result + add


@each_format
def test_linear(device, format):
    """Products and gradients, on both sides of the plans' boundaries, against float64."""
    for rows, length, family in (
        (1, 64, None),
        (3, 2080, "baseline"),
        (3, 160, "apple7"),
        (9, 96, None),
        (2, 160, "hopper"),
        (8, 2080, "hopper"),
        (9, 96, "hopper"),
        (17, 64, "hopper"),
    ):
        weight = scaled_sample(format, 21, length, device, (16, 32))
        for dtype in DTYPES:
            x = torch.randn(2, rows, length, device=device).to(dtype)[1].requires_grad_()
            bias = torch.randn(21, device=device).to(dtype)
            with tuned(family or "baseline"):
                y = metalcore.scaled_linear(x, weight, bias)
            grad = torch.randn_like(y)
            y.backward(grad)
            for ours, left, transposed, add in (
                (y, x, False, bias.cpu().double()),
                (x.grad, grad, True, 0),
            ):
                bound, expected = bound_and_result(weight, left.detach().cpu().double(), transposed, dtype, add)
                assert ((ours.detach().cpu().double() - expected).abs() <= bound).all()


@pytest.mark.parametrize(("format", "code"), [("e4m3", 0x7F), ("e4m3", 0xFF), ("e5m2", 0x7E), ("e5m2", 0xFC)])
def test_products_with_nan_and_infinity(device, format, code):
    """They reach their own row of the result, and no other."""
    weight = scaled_sample(format, 21, 96, device)
    weight.packed[5, 70] = code
    for dtype, family in ((torch.float32, "baseline"), (torch.bfloat16, "hopper")):
        x = torch.ones(2, 96, device=device, dtype=dtype)
        expected = x @ metalcore.dequantize_scaled(weight, dtype).T
        with tuned(family):
            found = metalcore.scaled_linear(x, weight)
        assert torch.equal(found.isfinite(), expected.isfinite()) and found.isfinite().logical_not().sum() == 2
        assert torch.equal(found[:, 5].isnan(), expected[:, 5].isnan())


@pytest.mark.parametrize("format", ["e4m3", "nvfp4"])
def test_experts(device, format):
    """Few and many tokens, with x of tokens and of each expert, and the gradient; experts that do not exist are NaN."""
    weight = scaled_sample(format, 21, 96, device, (16, 32), 3)
    alone = [
        ScaledWeight(
            weight.packed[e], weight.scales[e], format, weight.block, None if format == "e4m3" else weight.factor[e]
        )
        for e in range(3)
    ]
    for tokens, own in ((2, False), (2, True), (30, False), (30, True)):
        x = torch.randn(tokens, *([2] if own else []), 96, device=device, requires_grad=True)
        experts = torch.randint(3, (tokens, 2), device=device)
        y = metalcore.scaled_linear_experts(x, weight, experts)
        grad = torch.randn_like(y)
        y.backward(grad)
        wanted_grad = torch.zeros(x.shape, dtype=torch.float64)
        with torch.no_grad():
            again = metalcore.scaled_linear_experts(x, weight, experts)
        for token in range(tokens):
            for place in range(2):
                of = alone[int(experts[token, place])]
                left = (x[token, place] if own else x[token]).detach().cpu().double()[None]
                bound, expected = bound_and_result(of, left, False, torch.float32)
                for found in (y, again):
                    assert ((found[token, place].detach().cpu().double() - expected[0]).abs() <= bound[0]).all()
                at = (token, place) if own else (token,)
                wanted_grad[at] += grad[token, place].cpu().double() @ formula(of)
        scale = grad.abs().sum().item() * 16
        assert (x.grad.cpu().double() - wanted_grad).abs().max() <= scale * 2**-23 * 42
    with torch.no_grad():
        wrong = metalcore.scaled_linear_experts(x[:1], weight, torch.tensor([[3, -1]], device=device))
    assert wrong.isnan().all()


def test_modules(device):
    """Modules compute what the functions do, keep the scales in other dtypes, and load their states."""
    weight = scaled_sample("nvfp4", 8, 64, "cpu")
    bias = torch.nn.Parameter(torch.randn(8))
    linear = metalcore.nn.ScaledLinear(weight, bias).to(device)
    x = torch.randn(3, 64, device=device)
    assert torch.equal(linear(x), metalcore.scaled_linear(x, moved(weight, device), bias.to(device)))
    assert torch.equal(linear.weight, metalcore.dequantize_scaled(moved(weight, device)))
    other = metalcore.nn.ScaledLinear(scaled_sample("nvfp4", 8, 64, device), bias).half()
    other.load_state_dict(linear.state_dict())
    assert other.factor.dtype is torch.float32 and other.weight.dtype is torch.float16
    assert torch.equal(other.float().weight, linear.weight)
    table = metalcore.nn.ScaledEmbedding(weight, torch.bfloat16, 1.5).to(device)
    rows = torch.tensor([5, 0], device=device)
    assert torch.equal(table(rows), linear.weight[rows].bfloat16() * 1.5)

    gate, up = (scaled_sample("e4m3", 96, 64, "cpu", (32, 32), 3) for _ in range(2))
    down = scaled_sample("mxfp8", 64, 96, "cpu", (), 3)
    experts = metalcore.nn.ScaledExperts(gate, up, down).to(device).to(torch.float16)
    assert experts.gate_scales.dtype is torch.float32 and "formats=e4m3, mxfp8" in repr(experts)
    chosen, shares = torch.tensor([[2, 0], [1, 2]], device=device), torch.rand(2, 2, device=device)
    parts = [moved(each, device) for each in (gate, up, down)]
    middle = [metalcore.scaled_linear_experts(x[:2] / 64, part, chosen) for part in parts[:2]]
    wanted = metalcore.scaled_linear_experts(metalcore.swiglu(*middle), parts[2], chosen) * shares[..., None]
    assert torch.equal(experts(x[:2] / 64, chosen, shares), wanted.sum(1))
    with pytest.raises(RuntimeError, match="gate, up and down do not go together"):
        metalcore.nn.ScaledExperts(gate, up, gate)


def test_empty_views_and_batches(device):
    weight = scaled_sample("mxfp8", 8, 64, device)
    assert metalcore.scaled_linear(torch.ones(0, 64, device=device), weight).shape == (0, 8)
    x = torch.randn(2, 3, 64, device=device)
    batched = metalcore.scaled_linear(x, weight)
    assert torch.equal(batched.view(6, 8), metalcore.scaled_linear(x.view(6, 64), weight))
    packed, scales = (torch.stack([each, each], 1)[:, 1] for each in weight[:2])
    views = weight._replace(packed=packed, scales=scales)
    odd = torch.randn(3, 65, device=device)[:, 1:]
    assert torch.equal(metalcore.scaled_linear(odd, views), metalcore.scaled_linear(odd.contiguous(), weight))
    for where in (device, "cpu"):
        here = moved(weight, where)
        none = here._replace(packed=here.packed[:0], scales=here.scales[:0])
        assert metalcore.scaled_linear(x.to(where), none).shape == (2, 3, 0)
        short = here._replace(packed=here.packed[:, :0], scales=here.scales[:, :0])
        assert metalcore.scaled_linear(x[..., :0].to(where), short).eq(0).all()
        for format in FORMATS:
            for shape in ((0, 64), (3, 0)):
                made = metalcore.quantize_scaled(torch.ones(shape, device=where), format)
                assert metalcore.dequantize_scaled(made).shape == shape


@pytest.mark.parametrize("where", ["device", "cpu"])
def test_errors(device, where):
    where = device if where == "device" else where
    x = torch.ones(4, 64, device=where)
    weight = scaled_sample("e4m3", 8, 64, where, (1, 32))
    with pytest.raises(RuntimeError, match="e4m3, e5m2, mxfp8, mxfp8_e5m2, mxfp4"):
        metalcore.scaled_linear(x, weight._replace(format="e3m4"))
    with pytest.raises(RuntimeError, match="x of shape .* does not go with 8 rows of 64 weights"):
        metalcore.scaled_linear(x[:, :32], weight)
    with pytest.raises(RuntimeError, match="no multiples of 32"):
        metalcore.dequantize_scaled(weight._replace(packed=weight.packed[:, 1:]))
    with pytest.raises(RuntimeError, match="scales must be"):
        metalcore.dequantize_scaled(weight._replace(scales=weight.scales[1:]))
    with pytest.raises(RuntimeError, match="sides of 0 .all. or powers of 2, at least 32 in a row"):
        metalcore.dequantize_scaled(weight._replace(block=(1, 48)))
    with pytest.raises(RuntimeError, match="factor must"):
        metalcore.dequantize_scaled(weight._replace(factor=torch.ones(2, device=where)))
    with pytest.raises(RuntimeError, match="rounding must be floor, ceil or even"):
        metalcore.quantize_scaled(x, "mxfp8", rounding="up")
    with pytest.raises(TypeError, match="dequantize_scaled: dtype must be"):
        metalcore.dequantize_scaled(weight, torch.int8)
    with pytest.raises(TypeError, match="scaled_linear: weight must be a metalcore.quant.ScaledWeight"):
        metalcore.scaled_linear(x, weight.packed)
    with pytest.raises(TypeError, match="quantize_scaled: tensor must be"):
        metalcore.quantize_scaled(weight.packed, "e4m3")


def test_compiled(device):
    weight = scaled_sample("nvfp4", 8, 64, device)
    x = torch.randn(2, 64, device=device)
    compiled = torch.compile(metalcore.scaled_linear, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x, weight), metalcore.scaled_linear(x, weight))
    packed, scales, format, block, factor = weight
    experts = torch.zeros(2, 1, dtype=torch.int32, device=device)
    stacked = packed[None], scales[None], factor
    for call, inputs in (
        (ops.scaled_matmul, (x.requires_grad_(), packed, scales, factor, format, block, False)),
        (ops.scaled_rows, (packed, scales, factor, None, format, block, torch.bfloat16)),
        (ops.scaled_matmul_experts, (x.detach(), *stacked, experts, format, block)),
        (ops.scaled_quantize, (x.detach(), None, factor, format, block, "floor")),
    ):
        torch.library.opcheck(call.default, inputs, test_utils=("test_schema", "test_faketensor"))
