"""Weights of 2 to 8 bits in groups: kernels against the formats' formulas in float64."""

import numpy
import pytest
import torch
from rows import tuned

import metalcore
from metalcore.quant._affine import affine_sample, integers, packed_integers

ops = torch.ops.metalcore
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
each_bits = pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])


def formula(packed, scales, offsets, bits):
    """scale * q + offset, or scale * (q - zero), in float64; q's lowest bit comes first in a row of bits."""
    as_bytes = packed.cpu().view(torch.uint8).numpy()
    ones = numpy.unpackbits(as_bytes, axis=1, bitorder="little").reshape(len(packed), -1, bits)
    values = 1 << numpy.arange(bits)
    if packed.dtype == torch.int8:
        values[-1] *= -1
    q = torch.from_numpy((ones * values).sum(-1)).double()
    size = q.shape[1] // scales.shape[1]
    scale, offset = (each.cpu().double().repeat_interleave(size, 1) for each in (scales, offsets))
    return scale * q + offset if offsets.is_floating_point() else scale * (q - offset)


def signed(packed, scales, offsets):
    """The same bits as signed integers, and signed zero points."""
    return packed.view(torch.int8), scales, offsets if offsets.is_floating_point() else offsets.view(torch.int8) - 2


each_kind = pytest.mark.parametrize(
    "bits, is_signed", [*((b, False) for b in (2, 3, 4, 5, 6, 8)), (2, True), (4, True), (8, True)]
)


@each_kind
@pytest.mark.parametrize("zeros", [False, True])
def test_numbers(device, bits, is_signed, zeros):
    """Each is the formula's, rounded to float32 and to the result's dtype, on the device and on the CPU."""
    for dtype, group, length in ((DTYPES[0], 32, 96), (DTYPES[1], 64, 640), (DTYPES[2], 256, 1280)):
        packed, scales, offsets = affine_sample(bits, 5, length, device, group, zeros, dtype)
        if not (zeros or is_signed):  # there scale * zero is rounded, too
            scales = scales * 0.7  # products have digits that float32 lacks
        weights = signed(packed, scales, offsets) if is_signed else (packed, scales, offsets)
        expected = formula(*weights, bits)
        rows = torch.tensor([[4, 0, 2]], device=device)
        for result in DTYPES:
            rounded = expected.float().to(result)
            for where in (device, "cpu"):
                moved = [each.to(where) for each in weights]
                numbers = metalcore.dequantize_affine(*moved, bits, result)
                assert numbers.dtype is result and torch.equal(numbers.cpu(), rounded)
                found = metalcore.affine_embedding(rows.to(where), *moved, bits, result)
                assert torch.equal(found.cpu(), rounded[rows.cpu()])
        assert metalcore.dequantize_affine(*weights, bits).dtype is dtype


@each_bits
def test_integers_of_bytes(bits):
    numbers = torch.randint(2**bits, (3, 64))
    packed = packed_integers(numbers, bits)
    assert packed.shape == (3, 8 * bits) and torch.equal(integers(packed, bits).long(), numbers)


@each_kind
@pytest.mark.parametrize("zeros", [False, True])
def test_linear(device, bits, is_signed, zeros):
    """Products and gradients, on both sides of the plans' boundaries, against float64."""
    for rows, length, family in ((1, 64, None), (3, 2080, "baseline"), (3, 160, "apple7"), (9, 96, None)):
        packed, scales, offsets = affine_sample(bits, 21, length, device, 32, zeros, torch.float16)
        if is_signed:
            packed, scales, offsets = signed(packed, scales, offsets)
        weights = formula(packed, scales, offsets, bits)
        # Scales times integers and offsets are summed apart, and each sum has the roundings of its own terms.
        # Signed integers are taken for unsigned ones, which are larger.
        apart = formula(packed.view(torch.uint8), scales.abs(), torch.zeros_like(offsets), bits)
        shift = (offsets * scales if zeros else offsets).abs() + is_signed * 2 ** (bits - 1) * scales
        apart += shift.cpu().double().repeat_interleave(32, 1)
        for dtype in DTYPES:
            x = torch.randn(2, rows, length, device=device).to(dtype)[1].requires_grad_()
            bias = torch.randn(21, device=device).to(dtype)
            with tuned(family or "baseline"):
                y = metalcore.affine_linear(x, packed, scales, offsets, bits, bias)
            grad = torch.randn_like(y)
            y.backward(grad)
            eps = torch.finfo(dtype).eps
            for ours, left, right, size, add in (
                (y, x.detach().cpu().double(), weights.T, apart.T, bias.cpu().double()),
                (x.grad, grad.cpu().double(), weights, apart, 0),
            ):
                # Weights are rounded to x's dtype, each sum is float32's, and the result is rounded twice.
                bound = (left.abs() @ right.abs()) * eps + (left.abs() @ size) * (len(right) + 4) * 2**-24
                bound += 2 * eps * (left @ right + add).abs() + eps * (left @ right).abs()
                assert ((ours.detach().cpu().double() - (left @ right + add)).abs() <= bound).all()


def test_empty_views_and_batches(device):
    weights = affine_sample(4, 8, 64, device)
    assert metalcore.affine_linear(torch.ones(0, 64, device=device), *weights, 4).shape == (0, 8)
    x = torch.randn(2, 3, 64, device=device)
    batched = metalcore.affine_linear(x, *weights, 4)
    assert torch.equal(batched.view(6, 8), metalcore.affine_linear(x.view(6, 64), *weights, 4))
    views = [torch.stack([each, each], 1)[:, 1] for each in weights]
    odd = torch.randn(3, 65, device=device)[:, 1:]
    assert torch.equal(metalcore.affine_linear(odd, *views, 4), metalcore.affine_linear(odd.contiguous(), *weights, 4))
    for where in (device, "cpu"):
        none = [each[:0].to(where) for each in weights]
        assert metalcore.affine_linear(x.to(where), *none, 4).shape == (2, 3, 0)
        short = [each[:, :0].to(where) for each in weights]
        assert metalcore.affine_linear(x[..., :0].to(where), *short, 4).eq(0).all()
        indices = torch.zeros(2, 0, dtype=torch.int64, device=where)
        assert metalcore.affine_embedding(indices, *[each.to(where) for each in weights], 4).shape == (2, 0, 64)


@pytest.mark.parametrize("where", ["device", "cpu"])
def test_errors(device, where):
    where = device if where == "device" else where
    x = torch.ones(4, 64, device=where)
    packed, scales, offsets = affine_sample(4, 8, 64, where, 32)
    with pytest.raises(RuntimeError, match="2, 3, 4, 5, 6 or 8, not 7|2, 3, 4, 5, 6 or 8 bits, not 7"):
        metalcore.affine_linear(x, packed, scales, offsets, 7)
    with pytest.raises(RuntimeError, match="x of shape .* does not go with 8 rows of 64 weights"):
        metalcore.affine_linear(x[:, :32], packed, scales, offsets, 4)
    with pytest.raises(RuntimeError, match="32 weights of 4 bits"):
        metalcore.dequantize_affine(packed[:, 1:], scales, offsets, 4)
    with pytest.raises(RuntimeError, match=r"scales and offsets must have shape \(8, groups\)"):
        metalcore.dequantize_affine(packed, scales, offsets[1:], 4)
    with pytest.raises(RuntimeError, match="groups of 64 weights must be of 32 weights, or of 64"):
        metalcore.dequantize_affine(packed, scales.repeat(1, 2), offsets.repeat(1, 2), 4)
    with pytest.raises(RuntimeError, match="uint8"):
        metalcore.dequantize_affine(packed, scales, offsets.half(), 4)
    with pytest.raises(RuntimeError, match="signed weights must have 2, 4 or 8 bits, not 3"):
        metalcore.dequantize_affine(*signed(*affine_sample(3, 8, 64, where, 32)), 3)
    with pytest.raises(TypeError, match="dequantize_affine: dtype must be"):
        metalcore.dequantize_affine(packed, scales, offsets, 4, torch.int8)
    with pytest.raises(TypeError, match="affine_embedding: indices must be"):
        metalcore.affine_embedding(x, packed, scales, offsets, 4)


def test_compiled(device):
    weights = affine_sample(3, 8, 64, device)
    x = torch.randn(2, 64, device=device)
    compiled = torch.compile(metalcore.affine_linear, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x, *weights, 3), metalcore.affine_linear(x, *weights, 3))
    for call, inputs in (
        (ops.affine_matmul, (x.requires_grad_(), *weights, 3, False)),
        (ops.affine_rows, (*weights, None, 3, torch.bfloat16)),
    ):
        torch.library.opcheck(call.default, inputs, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("bits, is_signed, zeros", [(3, False, False), (4, True, True), (8, False, True)])
def test_experts(device, bits, is_signed, zeros):
    """Few and many tokens, with x of tokens and of each expert, and the gradient; experts that do not exist are NaN."""
    weights = affine_sample(bits, 63, 96, device, 32, zeros)
    weights = signed(*weights) if is_signed else weights
    exact = formula(*weights, bits).view(3, 21, 96)
    packed, scales, offsets = (each.view(3, 21, -1) for each in weights)
    for tokens, own in ((2, False), (2, True), (30, False), (30, True)):
        x = torch.randn(tokens, *([2] if own else []), 96, device=device, requires_grad=True)
        experts = torch.randint(3, (tokens, 2), device=device)
        y = metalcore.affine_linear_experts(x, packed, scales, offsets, bits, experts)
        with torch.no_grad():
            again = metalcore.affine_linear_experts(x, packed, scales, offsets, bits, experts)
        grad = torch.randn_like(y)
        y.backward(grad)
        numbers = x.detach().cpu().double()
        numbers = numbers if own else numbers[:, None]
        chosen = exact[experts.cpu()]  # (tokens, experts of a token, rows, length)
        expected = (chosen @ numbers[..., None])[..., 0]
        wanted = (grad.cpu().double()[..., None, :] @ chosen)[..., 0, :]
        wanted = wanted if own else wanted.sum(1)
        # A sum of 96 products, of integers and offsets that are up to 2**bits scales each.
        bound = 100 * 2**-24 * 2**bits * scales.abs().max().item() * numbers.abs().sum(-1, keepdim=True)
        for found in (y, again):
            assert ((found.detach().cpu().double() - expected).abs() <= bound).all()
        limit = 100 * 2**-24 * 2**bits * scales.abs().max().item() * grad.abs().sum().item()
        assert (x.grad.cpu().double() - wanted).abs().max() <= limit
    missing = torch.tensor([[3, -1]], device=device)
    with torch.no_grad():
        assert metalcore.affine_linear_experts(x[:1, 0], packed, scales, offsets, bits, missing).isnan().all()
    with pytest.raises(RuntimeError, match=r"scales and offsets must have shape \(3, 21, groups\)"):
        metalcore.affine_linear_experts(x, packed, scales[:2], offsets, bits, experts[:2])
    inputs = x.detach()[:2, 0].contiguous(), packed, scales, offsets, missing.int().repeat(2, 1).clamp(0, 2), bits
    torch.library.opcheck(ops.affine_matmul_experts.default, inputs, test_utils=("test_schema", "test_faketensor"))


def test_modules_of_experts(device):
    """They compute what the functions do, keep their scales in other dtypes, and load their states."""

    def experts_of(bits, rows, length, group):
        packed, scales, offsets = affine_sample(bits, 3 * rows, length, device, group)
        return *(each.view(3, rows, -1) for each in (packed, scales, offsets)), bits

    gate, up, down = experts_of(4, 96, 64, 64), experts_of(5, 96, 64, 32), experts_of(8, 64, 96, 32)
    biases = tuple(torch.nn.Parameter(torch.randn(3, rows, device=device)) for rows in (96, 96, 64))
    module = metalcore.nn.AffineExperts(gate, up, down, biases)
    x, shares = torch.randn(2, 64, device=device), torch.rand(2, 2, device=device)
    chosen = torch.tensor([[2, 0], [1, 2]], device=device)

    def part(x, weight, bias):
        return metalcore.affine_linear_experts(x, *weight, chosen) + bias[chosen]

    middle = metalcore.swiglu(part(x, gate, biases[0]), part(x, up, biases[1]))
    expected = (part(middle, down, biases[2]) * shares[..., None]).sum(1)
    assert torch.equal(module(x, chosen, shares), expected)
    zeros = [(torch.zeros_like(w[0]), *w[1:]) for w in (gate, up, down)]
    other = metalcore.nn.AffineExperts(*zeros, biases).half()
    assert other.gate_scales.dtype is torch.float32 and "bits=4, 5, 8" in repr(other)
    other.load_state_dict(module.state_dict())
    assert torch.equal(other.float().down, module.down)
    with pytest.raises(RuntimeError, match="gate, up and down do not go together"):
        metalcore.nn.AffineExperts(gate, up, gate)
