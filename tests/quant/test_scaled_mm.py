"""Products of two matrices of 8-bit floating-point numbers against float64."""

import pytest
import torch
import torch.nn.functional as F

import metalcore

EIGHT = (torch.float8_e4m3fn, torch.float8_e5m2)


def spread(scale, shape):
    """A scale for each number of a matrix, in float64."""
    scale = scale.cpu().double()
    scale = scale.view(1, 1) if scale.numel() == 1 else scale
    for dim, size in enumerate(shape):
        each = 1 if scale.shape[dim] == size else size if scale.shape[dim] == 1 else 128
        scale = scale.repeat_interleave(each, dim).narrow(dim, 0, size)
    return scale


def operands(device, rows, length, columns, scales, dtypes=EIGHT[:1] * 2):
    a = torch.randn(rows, length, device="cpu").to(dtypes[0]).to(device)
    b = torch.randn(columns, length, device="cpu").to(dtypes[1]).to(device).T
    parts, groups = -(length // -128), -(columns // -128)
    shapes = {
        "tensor": ((), ()),
        "row": ((rows, 1), (1, columns)),
        "both 128": ((rows, parts), (parts, columns)),
        "blocks": ((rows, parts), (parts, groups)),
        "mixed": ((rows, 1), ()),
    }[scales]
    return a, b, *(torch.rand(shape, device=device) + 0.1 for shape in shapes)


def check(ours, a, b, scale_a, scale_b, bias=None):
    """A and B are rounded to the result's dtype, each sum is float32's, and the result is rounded three times."""
    left = a.cpu().double() * spread(scale_a, a.shape)
    right = b.cpu().double() * spread(scale_b, b.shape)
    eps, result = torch.finfo(ours.dtype).eps, left @ right
    full = result if bias is None else result + bias.cpu().double()
    bound = (left.abs() @ right.abs()) * (eps + (len(right) + 4) * 2**-24) + 2 * eps * (result.abs() + full.abs())
    assert ours.shape == result.shape and ((ours.cpu().double() - full).abs() <= bound).all()


@pytest.mark.parametrize("scales", ["tensor", "row", "both 128", "blocks", "mixed"])
def test_scaled_mm(device, scales):
    """Lengths that neither 32 nor 128 divides, on both sides of 8 rows, and B in either layout."""
    for rows, length, columns in ((1, 288, 136), (8, 80, 40), (9, 144, 300)):
        for out_dtype in (torch.float32, torch.float16, torch.bfloat16):
            given = operands(device, rows, length, columns, scales)
            bias = torch.randn(columns, device=device).to(out_dtype)
            check(metalcore.scaled_mm(*given, out_dtype=out_dtype), *given)
            check(metalcore.scaled_mm(*given, bias, out_dtype), *given, bias)
            a, b, *rest = given
            check(metalcore.scaled_mm(a.repeat(1, 2)[:, :length], b.contiguous(), *rest, out_dtype=out_dtype), *given)
    a, b, *rest = operands("cpu", 9, 144, 300, scales)
    check(metalcore.scaled_mm(a, b, *rest, out_dtype=torch.float32), a, b, *rest)


def test_formats_and_empty_matrices(device):
    for dtypes in (EIGHT, EIGHT[::-1], EIGHT[1:] * 2):
        given = operands(device, 5, 64, 48, "row", dtypes)
        result = metalcore.scaled_mm(*given)
        assert result.dtype is torch.bfloat16
        check(result, *given)
    for shape in ((0, 32, 16), (3, 32, 0), (3, 0, 16)):
        a, b, _, _ = operands(device, *shape, "tensor")
        one = torch.ones((), device=device)
        result = metalcore.scaled_mm(a, b, one, one)
        assert result.shape == (shape[0], shape[2]) and result.eq(0).all()


def test_errors(device):
    a, b, scale_a, scale_b = operands(device, 5, 160, 48, "row")
    with pytest.raises(TypeError, match="scaled_mm: mat_a must be float8_e4m3fn or float8_e5m2, not torch.float32"):
        metalcore.scaled_mm(a.float(), b, scale_a, scale_b)
    with pytest.raises(RuntimeError, match="do not have the same K"):
        metalcore.scaled_mm(a, b[:64], scale_a, scale_b)
    with pytest.raises(RuntimeError, match=r"scaled_mm: scale_a \[4, 1\] is neither"):
        metalcore.scaled_mm(a, b, scale_a[:4], scale_b)
    with pytest.raises(RuntimeError, match=r"scaled_mm: scale_b \[1, 47\] is neither"):
        metalcore.scaled_mm(a, b, scale_a, scale_b[:, 1:])
    with pytest.raises(TypeError, match="scale_b must be float32"):
        metalcore.scaled_mm(a, b, scale_a, scale_b.half())
    with pytest.raises(TypeError, match="out_dtype must be"):
        metalcore.scaled_mm(a, b, scale_a, scale_b, out_dtype=torch.int8)


@pytest.mark.only_on("simulator", "mps")
def test_override(device):
    """torch._scaled_mm and torch.nn.functional.scaled_mm run our kernels, and leave what they do not take."""
    for scales, recipe in (("tensor", F.ScalingType.TensorWise), ("row", F.ScalingType.RowWise)):
        a, b, scale_a, scale_b = operands(device, 5, 64, 48, scales)
        with metalcore.enable_pytorch_overrides("scaled_mm"):
            ours = torch._scaled_mm(a, b, scale_a, scale_b, out_dtype=torch.bfloat16)
            again = F.scaled_mm(a, b, scale_a, recipe, scale_b, recipe)
            ran = {row.what.split()[0]: row.ran for row in metalcore.report().rows if row.override == "scaled_mm"}
        expected = metalcore.scaled_mm(a, b, scale_a, scale_b)
        assert torch.equal(ours, expected) and torch.equal(again, expected)
        assert ran == {"aten::_scaled_mm": 1, "aten::_scaled_mm_v2": 1}


def test_compiled(device):
    given = operands(device, 5, 64, 48, "row")
    compiled = torch.compile(metalcore.scaled_mm, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*given), metalcore.scaled_mm(*given))
