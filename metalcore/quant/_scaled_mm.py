"""Products of two matrices of 8-bit floating-point numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from .._core.operators import ops
from .._core.registry import Op, Override, Sample, register
from .._core.routing import FLOAT_DTYPES, require_tensors
from ._linear import add_bias
from ._scaled_recipes import EIGHT_BITS, FOUR_BITS, Operand, operand_of, rows_of_bytes

__all__ = ["scaled_mm"]


def scaled_mm(
    mat_a: Tensor,
    mat_b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Computes (A B) + bias for matrices of 8-bit floating-point numbers with scales, as torch.nn.functional.scaled_mm.

    On an NVIDIA GPU PyTorch's operator computes on tensor cores what it takes: capability 8.9 at least, lengths that 16
    divides, and one scale for each matrix or for each of its rows. Elsewhere A becomes numbers, and B too if A has more
    than 8 rows; up to 8 rows are multiplied in float32 with B as it is read. The result is rounded once to out_dtype.

    Args:
        mat_a: float8_e4m3fn or float8_e5m2, (M, K).
        mat_b: the same, (K, N). Its columns are read one after the other, so that the transpose of a contiguous weight
            is not copied.
        scale_a: float32: one number, (M, 1) for rows, or (M, ceil(K / 128)) for 128 numbers of a row.
        scale_b: float32: one number, (1, N) for columns, (ceil(K / 128), N) for 128 numbers of a column, or (ceil(K /
            128), ceil(N / 128)) for blocks of 128 by 128.
        bias: (N,), or None.
        out_dtype: float32, float16 or bfloat16, by default bfloat16.

    Returns:
        (M, N), of out_dtype. It has no derivative.

    Raises:
        TypeError: an argument is no tensor, or a dtype is another.
        RuntimeError: shapes do not go together.

    Example:
        >>> a = torch.ones(2, 32, device="mps").to(torch.float8_e4m3fn)
        >>> half, two = torch.tensor(0.5, device="mps"), torch.tensor(2.0, device="mps")
        >>> metalcore.scaled_mm(a, a.T, half, two, out_dtype=torch.float32)[0, 0].item()
        32.0
    """
    require_tensors("scaled_mm", mat_a=mat_a, mat_b=mat_b, scale_a=scale_a, scale_b=scale_b)
    require_tensors("scaled_mm", optional=True, bias=bias)
    out_dtype = torch.bfloat16 if out_dtype is None else out_dtype
    for name, matrix in (("mat_a", mat_a), ("mat_b", mat_b)):
        if matrix.dtype not in EIGHT_BITS:
            raise TypeError(f"scaled_mm: {name} must be float8_e4m3fn or float8_e5m2, not {matrix.dtype}")
        if matrix.dim() != 2:
            raise RuntimeError(f"scaled_mm: {name} must have 2 dimensions, not shape {list(matrix.shape)}")
    for name, scale in (("scale_a", scale_a), ("scale_b", scale_b)):
        if scale.dtype != torch.float32:
            raise TypeError(f"scaled_mm: {name} must be float32, not {scale.dtype}")
    if out_dtype not in FLOAT_DTYPES:
        raise TypeError(f"scaled_mm: out_dtype must be torch.float32, torch.float16 or torch.bfloat16, not {out_dtype}")
    if mat_a.shape[1] != mat_b.shape[0]:
        raise RuntimeError(f"scaled_mm: mat_a {list(mat_a.shape)} and mat_b {list(mat_b.shape)} do not have the same K")
    blocks = _block("scale_a", scale_a, mat_a.shape), _block("scale_b", _turned(scale_b), mat_b.shape[::-1])
    if mat_a.is_cuda and _tensor_cores(mat_a, mat_b, blocks, bias, out_dtype):
        column_major = mat_b if mat_b.stride(0) == 1 else mat_b.T.contiguous().T
        return torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
            mat_a.contiguous(), column_major, scale_a, scale_b.contiguous(), bias, out_dtype=out_dtype
        )
    return _scaled_mm(mat_a, mat_b.T, scale_a, _turned(scale_b), blocks, bias, out_dtype)


def _turned(scale):
    return scale.mT if scale.dim() == 2 else scale


def _block(name, scale, shape):
    """Returns the block of a scale, of a matrix whose rows have K numbers."""
    rows, length = shape
    parts, groups = -(length // -128), -(rows // -128)
    if scale.numel() == 1:
        return 0, 0
    known = {(rows, parts): (1, 128)}
    if name == "scale_b":
        known[groups, parts] = (128, 128)
    known[rows, 1] = (1, 0)
    if scale.dim() != 2 or tuple(scale.shape) not in known:
        raise RuntimeError(
            f"scaled_mm: {name} {list((_turned(scale) if name == 'scale_b' else scale).shape)} is "
            "neither one number nor one for each row, each 128 numbers, or each 128 by 128 numbers"
        )
    return known[tuple(scale.shape)]


def _tensor_cores(a, b, blocks, bias, out_dtype):
    """Returns whether PyTorch's operator takes the matrices on an NVIDIA GPU."""
    (rows, length), columns = a.shape, b.shape[1]
    plain = blocks == ((0, 0), (0, 0)) or blocks == ((1, 0), (1, 0)) and out_dtype is torch.bfloat16
    return (
        plain
        and rows > 0
        and length > 0
        and length % 16 == columns % 16 == 0
        and not a.dtype == b.dtype == torch.float8_e5m2
        and (bias is None or bias.dtype == out_dtype != torch.float32)
        and torch.cuda.get_device_capability(a.device) >= (8, 9)
    )


def _scaled_mm(a, b, scale_a, scale_b, blocks, bias, out_dtype):
    """Multiplies a with the transpose of b. Both have K numbers in a row, and scales of (rows, numbers of a row)."""
    operands = (_operand(*of) for of in zip((a, b), (scale_a, scale_b), blocks))
    return _multiply(*operands, bias, out_dtype)


def _multiply(a, b, bias, out_dtype):
    few = len(a.packed) <= 8
    x = ops.scaled_rows(a.packed, a.scales, a.factor, None, a.format, a.block, torch.float32 if few else out_dtype)
    product = ops.scaled_matmul(x, b.packed, b.scales, b.factor, b.format, b.block, False)
    result = product if bias is None else add_bias(product.float(), bias)
    return result.to(out_dtype)


def _operand(matrix, scale, block):
    scale = scale.view(1, 1) if scale.numel() == 1 else scale
    packed = rows_of_bytes(matrix)
    if matrix.numel() == 0:  # a scale for all of nothing
        scale = scale[: len(packed), : matrix.shape[1]]
    return Operand(packed, scale, EIGHT_BITS[matrix.dtype], block)


def _override(previous, count, decline):
    def kernel(keyset, self, mat2, scale_a, scale_b, bias=None, scale_result=None, out_dtype=None, fast=False):
        blocks = scale_result is None and _taken(self, mat2, scale_a, scale_b, bias, out_dtype)
        if not blocks:
            return decline(keyset, self, mat2, scale_a, scale_b, bias, scale_result, out_dtype, fast)
        return count.run(_scaled_mm, self, mat2.T, scale_a, _turned(scale_b), blocks, bias, out_dtype or torch.bfloat16)

    return kernel


def _override_v2(previous, count, decline):
    def kernel(
        keyset,
        a,
        b,
        scales_a,
        recipe_a,
        swizzle_a,
        scales_b,
        recipe_b,
        swizzle_b,
        bias,
        out_dtype,
        order=(),
        fast=False,
    ):
        left = right = None
        if not order and b.dim() == 2 and out_dtype in (None, *FLOAT_DTYPES) and (bias is None or bias.dim() == 1):
            left = operand_of(a, scales_a, recipe_a, swizzle_a, False)
            right = operand_of(b.T, scales_b, recipe_b, swizzle_b, True)
        fits = left and right and left.packed.dtype == right.packed.dtype and _same_length(left, right)
        if not fits or (bias is not None and len(bias) != b.shape[1]):
            others = (scales_b, recipe_b, swizzle_b, bias, out_dtype, order, fast)
            return decline(keyset, a, b, scales_a, recipe_a, swizzle_a, *others)
        return count.run(_multiply, left, right, bias, out_dtype or torch.bfloat16)

    return kernel


def _same_length(left, right):
    four = [of.format in ("mxfp4", "nvfp4") for of in (left, right)]
    return left.packed.shape[1] << four[0] == right.packed.shape[1] << four[1]


def _taken(a, b, scale_a, scale_b, bias, out_dtype):
    """Returns the blocks of the scales, or None for calls that PyTorch's operator shall compute, or refuse in words of
    its own."""
    if (
        a.dtype not in EIGHT_BITS
        or b.dtype not in EIGHT_BITS
        or a.dim() != 2
        or b.dim() != 2
        or a.shape[1] != b.shape[0]
    ):
        return None
    if not scale_a.dtype == scale_b.dtype == torch.float32 or out_dtype not in (None, *FLOAT_DTYPES):
        return None
    if bias is not None and bias.shape != b.shape[1:]:
        return None
    try:
        return _block("scale_a", scale_a, a.shape), _block("scale_b", _turned(scale_b), b.shape[::-1])
    except RuntimeError:
        return None


def _eight_bits(a, b, scales):
    """Returns the arguments of a call, for a's and b's numbers in 8 bits."""
    a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).T
    (rows, length), columns = a.shape, b.shape[0]
    parts = -(length // -128)
    shape_a, shape_b = {
        "tensor": ((1,), (1,)),
        "row": ((rows, 1), (1, columns)),
        "block": ((rows, parts), (parts, -(columns // -128))),
    }[scales]

    def made(shape):
        count = torch.Size(shape).numel()
        return (torch.arange(count, device=a.device, dtype=torch.float32) % 5 / 8 + 0.5).view(shape)

    return a8, b8, made(shape_a), made(shape_b), None, a.dtype


def _reference(a, b, scale_a, scale_b, bias, out_dtype):
    def numbers(matrix, scale):
        for dim, size in enumerate(matrix.shape):
            each = size if scale.dim() < 2 or scale.shape[dim] == 1 else 1 if scale.shape[dim] == size else 128
            scale = scale.view(1, 1) if scale.dim() < 2 else scale
            scale = scale.repeat_interleave(each, dim).narrow(dim, 0, size)
        return matrix.to(out_dtype) * scale.to(out_dtype)

    result = numbers(a, scale_a) @ numbers(b, scale_b)
    return result if bias is None else result + bias


register(
    Op(
        "scaled_mm",
        scaled_mm,
        reference=_reference,
        operators=("scaled_rows", "scaled_matmul"),
        override=tuple(
            Override(
                operator,
                kernel,
                dtypes=frozenset({*EIGHT_BITS, *([FOUR_BITS] if FOUR_BITS else [])}),
                devices=frozenset({"mps"}),
                elsewhere="PyTorch's operator computes on tensor cores",
            )
            for operator, kernel in (("_scaled_mm", _override), ("_scaled_mm_v2", _override_v2))
        ),
        samples=lambda: tuple(
            Sample(
                f"{rows} rows, a scale for each {scales}",
                ((rows, length), (40, length)),
                arguments=lambda a, b, scales=scales: _eight_bits(a, b, scales),
                terms=length,
                roundings=2,
                backward=False,
            )
            for rows, length, scales in ((3, 288, "tensor"), (5, 288, "row"), (20, 288, "block"), (1, 80, "row"))
        ),
        backward=False,
    )
)
