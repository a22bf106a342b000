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


def swizzled(scales):
    """As cuBLAS has the scales of 128 rows and 4 columns: 32 rows, of 4 times 4 columns."""
    rows, columns = scales.shape
    whole = torch.zeros(-(rows // -128) * 128, -(columns // -4) * 4, dtype=torch.uint8)
    whole[:rows, :columns] = scales.view(torch.uint8).cpu()
    parts = [
        torch.cat([whole[128 * i + 32 * k :][:32, 4 * j : 4 * j + 4] for k in range(4)], 1)
        for i in range(len(whole) // 128)
        for j in range(whole.shape[1] // 4)
    ]
    return torch.stack(parts).to(scales.device)


@pytest.mark.only_on("simulator", "mps")
@pytest.mark.parametrize("rows", [5, 130])
@pytest.mark.parametrize("format", ["mxfp8", "mxfp4", "nvfp4", "128x128"])
def test_recipes(device, rows, format):
    """The layouts of torch.nn.functional.scaled_mm's block-wise scales."""
    length, columns = 544, 160
    kinds, swizzles = F.ScalingType, F.SwizzleType
    left, right = (torch.randn(count, length, device=device) for count in (rows, columns))
    if format == "128x128":
        made = metalcore.quantize_scaled(left, "e4m3", (1, 128)), metalcore.quantize_scaled(right, "e4m3", (128, 128))
        a, b = (one.packed.view(torch.float8_e4m3fn) for one in made)
        padded = F.pad(made[1].scales, (0, 3))  # columns of 8, of which 5 are scales
        scales = [made[0].scales.T.contiguous().T], [padded.T]
        recipes, places = ([kinds.BlockWise1x128], [kinds.BlockWise128x128]), [swizzles.NO_SWIZZLE]
    else:
        made = metalcore.quantize_scaled(left, format), metalcore.quantize_scaled(right, format)
        dtype = torch.float8_e4m3fn if format == "mxfp8" else torch.float4_e2m1fn_x2
        a, b = (one.packed.view(dtype) for one in made)
        of_scales = torch.float8_e4m3fn if format == "nvfp4" else torch.float8_e8m0fnu
        scales = [[swizzled(one.scales).view(of_scales)] for one in made]
        recipe = [kinds.BlockWise1x16 if format == "nvfp4" else kinds.BlockWise1x32]
        places = [swizzles.SWIZZLE_32_4_4]
        if format == "nvfp4":
            scales = [[*each, one.factor] for each, one in zip(scales, made)]
            recipe, places = [*recipe, kinds.TensorWise], [*places, swizzles.NO_SWIZZLE]
        recipes = recipe, recipe
    bias = torch.randn(columns, device=device)
    with metalcore.enable_pytorch_overrides("scaled_mm"):
        found = F.scaled_mm(
            a, b.T, scales[0], recipes[0], scales[1], recipes[1], places, places, bias=bias, output_dtype=torch.float32
        )
    x, w = (metalcore.dequantize_scaled(one, torch.float32).cpu().double() for one in made)
    expected, size = x @ w.T + bias.cpu().double(), x.abs() @ w.abs().T + bias.cpu().double().abs()
    assert ((found.cpu().double() - expected).abs() <= (length + 3) * 2**-24 * size).all()


def test_compiled(device):
    given = operands(device, 5, 64, 48, "row")
    compiled = torch.compile(metalcore.scaled_mm, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*given), metalcore.scaled_mm(*given))
