"""The references of the ops' tests: float64 on the CPU, on the same rounded inputs."""

import re

import pytest
import torch
from torch.library import opcheck

from metalcore import _C

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def tensor(*shape, dtype=torch.float32, device="cpu", scale=1.0):
    return (torch.randn(shape) * scale).to(dtype).to(device)


def wide(value):
    """The same numbers in float64 on the CPU."""
    return value.detach().cpu().double()


def flushes_subnormals(dtype=torch.float32):
    """Whether the device takes a dtype's subnormal numbers for zero. Apple's GPUs do so with those of float32 and of
    bfloat16, which are float32's, and by public reports keep float16's."""
    if getattr(torch._C, "_metalcore_simulates_mps", False):
        return _C.simulator_info()["flushing"]
    return torch.backends.mps.is_available() and dtype is not torch.float16


def smallest(dtype):
    """The smallest number of a dtype that the device tells from zero."""
    limits = torch.finfo(dtype)
    return limits.smallest_normal * (1 if flushes_subnormals(dtype) else limits.eps)


def as_device_has(value):
    """The numbers that the device has: zeros in the place of subnormal ones where it has none."""
    subnormal = value.abs() < torch.finfo(value.dtype).smallest_normal
    return value.masked_fill(subnormal, 0) if flushes_subnormals(value.dtype) else value


def assert_near(actual, expected, *, terms=1, magnitude=None):
    """Checks that `actual` differs from the float64 reference by at most 8 * terms * eps32 of the reference's largest
    value, which covers sums of `terms`, and one rounding to its own dtype. Where larger numbers cancel, their
    `magnitude` replaces the largest value. NaN and infinity must be in the same places."""
    eps = torch.finfo(torch.float32).eps
    dtype = actual.dtype
    finite = expected[expected.isfinite()]
    largest = finite.abs().max().item() if finite.numel() else 0.0
    absolute = 8 * terms * eps * max(largest, magnitude or 0.0) + smallest(dtype)
    torch.testing.assert_close(
        wide(actual), expected, rtol=torch.finfo(dtype).eps + 8 * eps, atol=absolute, equal_nan=True
    )


def rounds_weights(kernel):
    """Whether a kernel of attention's decode rounds weights: one that multiplies matrices of 16 or 32 rows, and is not
    narrow."""
    return re.search(r"matrices_\d+x(16|32)_", kernel) is not None


def assert_attention_near(found, expected, v, rounded_weights):
    """Checks (out, lse) of attention over few terms. Weights that are rounded to the type of the values have errors of
    half an eps of themselves each, and their sum is 1."""
    (out, lse), eps = found, torch.finfo(torch.float32).eps
    roundings = torch.finfo(v.dtype).eps / 2 / (8 * eps) if rounded_weights else 0
    magnitude = wide(v).abs().max().item() if rounded_weights else None
    assert_near(out, expected[0], terms=8 + roundings, magnitude=magnitude)
    assert_near(lse, expected[1], terms=8)


def assert_same_error(ours, theirs):
    """Both calls raise errors of one type with the same first line. PyTorch's message may have more lines."""
    with pytest.raises(Exception) as expected:  # noqa: PT011 (PyTorch may raise any error)
        theirs()
    with pytest.raises(expected.type) as found:
        ours()
    assert str(found.value).splitlines()[0] == str(expected.value).splitlines()[0]


def layouts(make):
    """Tensors of one shape (4, 6, 8) that lie in memory in every way that matters."""
    return {
        "contiguous": make(4, 6, 8),
        "permuted": make(8, 4, 6).permute(1, 2, 0),
        "inner transposed": make(4, 8, 6).transpose(1, 2),
        "columns of wider rows": make(4, 6, 20)[..., 4:12],
        "odd offset": make(4 * 6 * 8 + 1)[1:].view(4, 6, 8),
        "offset by four elements": make(4 * 6 * 8 + 4)[4:].view(4, 6, 8),  # 16 bytes of float32, 8 of the others
        "every other": make(4, 6, 16)[..., ::2],
        "every other row": make(4, 12, 8)[:, ::2],
        "expanded rows": make(4, 1, 8).expand(4, 6, 8),
        "expanded elements": make(4, 6, 1).expand(4, 6, 8),
    }


def check_operator(op, *inputs):
    """Checks schema, fake kernel and tracing by torch.library.opcheck, and registration where it knows the device."""
    tests = ["test_schema", "test_faketensor", "test_aot_dispatch_dynamic"]
    if inputs[0].device.type != "mps":
        tests.append("test_autograd_registration")
    opcheck(op.default, inputs, test_utils=tests)


def derivatives(function, tensors, orders, parts=None):
    """Gradients of random linear functions of the results in `parts` (of all that have a gradient), then of those
    gradients and so on."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    results = function(*leaves)
    results = (results,) if isinstance(results, torch.Tensor) else results
    values = [result for result in results if result.requires_grad] if parts is None else [results[i] for i in parts]
    found = []
    for order in range(orders):
        directions = [
            torch.randn(v.shape, generator=torch.Generator().manual_seed(10 * order + i)).to(v)
            for i, v in enumerate(values)
        ]
        values = torch.autograd.grad(values, leaves, directions, create_graph=order + 1 < orders)
        found += [value.detach() for value in values]
    return found


def leaf(value):
    """A tensor of its own for a gradient, or None of None."""
    return None if value is None else value.detach().requires_grad_()


def second_derivatives(function, leaves, grad):
    """Gradients, by x, by the weight and by grad, of the squares of a norm's gradients."""
    leaves, grad = [leaf(tensor) for tensor in leaves], leaf(grad)
    first = torch.autograd.grad(function(*leaves), leaves, grad, create_graph=True)
    return torch.autograd.grad(sum(g.square().sum() for g in first), (*leaves[:2], grad))
