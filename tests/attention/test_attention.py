"""scaled_dot_product_attention against float64: sizes, lengths, masks, strides, and what is hard for softmax."""

import pytest
import torch
from attention_cases import by_torch, check, make
from references import DTYPES

import metalcore

pytestmark = pytest.mark.usefixtures("each_width")
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@each_dtype
@pytest.mark.parametrize("size", [1, 8, 40, 64, 65, 80, 96, 100, 128, 136, 192, 200, 256])
def test_head_sizes(device, dtype, size):
    """At and next to each size that kernels have tiles for, with rows that can be loaded as vectors and that cannot."""
    check(device, make((1, 2, 35, size), (1, 2, 37, size), (1, 2, 37, size), dtype), is_causal=True)


@pytest.mark.parametrize("size, value_size", [(192, 128), (24, 64), (64, 20), (8, 200)])
def test_values_of_another_size(device, size, value_size):
    check(device, make((1, 2, 35, size), (1, 2, 37, size), (1, 2, 37, value_size), torch.float16))


@each_dtype
@pytest.mark.parametrize(
    "rows, columns", [(1, 1), (1, 70), (31, 7), (32, 32), (33, 65), (64, 64), (65, 63), (130, 129)]
)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_lengths(device, dtype, rows, columns, causal):
    check(device, make((1, 2, rows, 64), (1, 2, columns, 64), (1, 2, columns, 64), dtype), is_causal=causal)


@pytest.mark.parametrize("size", [64, 128])
@each_dtype
def test_groups_of_heads(device, dtype, size):
    check(device, make((2, 6, 40, size), (2, 2, 50, size), (2, 2, 50, size), dtype), enable_gqa=True)


@each_dtype
@pytest.mark.parametrize("shape", [(2, 3, 40, 50), (40, 50), (1, 1, 50), (2, 1, 1, 50), (3, 40, 1), (2, 1, 40, 50)])
@pytest.mark.parametrize("kind", ["bool", "added"])
def test_masks(device, dtype, shape, kind):
    """Masks of all shapes that broadcast. Query 3 sees no key where the mask has queries."""
    mask = torch.randn(shape)
    if kind == "bool":
        mask = mask > 0
        if shape[-2] == 40:
            mask[..., 3, :] = False
    else:
        mask = mask.to(dtype)
    check(device, make((2, 3, 40, 64), (2, 3, 50, 64), (2, 3, 50, 64), dtype), mask)


def test_a_float32_mask_of_shorter_queries(device):
    q, k, v = (x.to(device) for x in make((2, 3, 40, 64), (2, 3, 50, 64), (2, 3, 50, 64), torch.bfloat16))
    mask = torch.randn(40, 50, device=device)
    rounded = metalcore.scaled_dot_product_attention(q, k, v, mask.bfloat16())
    exact = by_torch(q.cpu().double(), k.cpu().double(), v.cpu().double(), mask.cpu().double())
    ours = metalcore.scaled_dot_product_attention(q, k, v, mask)
    assert (ours.cpu() - exact).norm() < (rounded.cpu() - exact).norm()


@each_dtype
def test_queries_that_see_nothing(device, dtype):
    """They give zeros, and zero gradients: by a mask of False, of -inf, and by a causal mask aligned to the right."""
    tensors = [x.to(device).requires_grad_() for x in make((1, 2, 40, 64), (1, 2, 20, 64), (1, 2, 20, 64), dtype)]
    hidden = torch.zeros(40, 20, dtype=torch.bool, device=device)
    added = torch.full((40, 20), -torch.inf, dtype=dtype, device=device, requires_grad=True)
    for mask, options in ((hidden, {}), (added, {}), (None, {"is_causal": True, "lower_right": True})):
        out, lse = metalcore.scaled_dot_product_attention(*tensors, mask, return_lse=True, **options)
        rows = slice(0, 20) if options else slice(None)
        assert not out[:, :, rows].any() and (lse[:, :, rows] == -torch.inf).all()
        found = torch.autograd.grad(out.sum(), [*tensors, *([added] if mask is added else [])])
        assert all(x.isfinite().all() for x in found) and not found[0][:, :, rows].any()
        if not options:
            assert not any(x.any() for x in found)


@each_dtype
@pytest.mark.parametrize("rows, columns, size", [(40, 50, 64), (13, 13, 8), (1, 70, 64)])
@pytest.mark.parametrize("wide", [False, True], ids=["dtype", "float32"])
def test_masks_of_the_smallest_number(device, dtype, rows, columns, size, wide):
    """Libraries hide keys by it. A query that sees no other key has the mean of the values, as PyTorch's has. Without
    gradients, few queries run the kernels of decode."""
    q, k, v = make((2, 2, rows, size), (2, 2, columns, size), (2, 2, columns, size), dtype)
    of_mask = torch.float32 if wide else dtype
    mask = torch.zeros(2, 1, rows, columns, dtype=of_mask)
    mask[..., :9] = torch.finfo(of_mask).min
    mask[1, :, 0] = torch.finfo(of_mask).min
    exact = by_torch(q.double(), k.double(), v.double(), mask.double())
    # The smallest float16 number leaves 2^-8 of a score, and each weight has half of that as its error.
    bound = 8 * torch.finfo(dtype).eps + (2**-8 if of_mask == torch.float16 else 2**-20)
    for needed in (False, True):
        tensors = [x.to(device).requires_grad_(needed) for x in (q, k, v)]
        out = metalcore.scaled_dot_product_attention(*tensors, mask.to(device))
        assert (out.detach().cpu() - exact).abs().max() <= bound * v.abs().max()
        if needed:
            assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.float().square().sum(), tensors))


@each_dtype
@pytest.mark.parametrize("scale", [30.0, 300.0])
def test_large_scores(device, dtype, scale):
    check(device, make((1, 2, 50, 64), (1, 2, 60, 64), (1, 2, 60, 64), dtype, scale=scale))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", ["keys that differ", "keys that are equal"])
def test_scores_that_float32_rounds_to_thousands(device, dtype, case):
    """An exponent of the scores' size is rounded by more than a weight can hold. All the same the largest weight is at
    most 1, and gradients are finite."""
    q, k, v = make((1, 2, 50, 64), (1, 2, 60, 64), (1, 2, 60, 64), dtype, scale=1e11)
    if case == "keys that are equal":
        k = k[:, :, :1].expand(-1, -1, 60, -1)
    tensors = [x.to(device).requires_grad_() for x in (q, k, v)]
    out, lse = metalcore.scaled_dot_product_attention(*tensors, return_lse=True)
    expected = by_torch(q.double(), k.double(), v.double())
    eps = torch.finfo(dtype).eps
    assert (out.cpu() - expected).abs().max() <= 4 * eps * expected.abs().max()
    expected = (q.double() @ k.double().mT / 8).logsumexp(-1)
    assert (lse.cpu() - expected).abs().max() <= 64 * torch.finfo(torch.float32).eps * expected.abs().max()
    assert all(x.isfinite().all() for x in torch.autograd.grad(out.sum(), tensors))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_mask_of_the_least_number(device, dtype):
    """Programs use it where -inf gave NaN. A query whose keys all have it sees them alike."""
    tensors = [x.to(device).requires_grad_() for x in make((1, 2, 40, 64), (1, 2, 50, 64), (1, 2, 50, 64), dtype)]
    mask = torch.zeros(40, 50, dtype=dtype)
    mask[:, :40] = torch.finfo(dtype).min
    mask[5] = torch.finfo(dtype).min
    out, lse = metalcore.scaled_dot_product_attention(*tensors, mask.to(device), return_lse=True)
    expected = by_torch(*(x.detach().cpu().double() for x in tensors), mask.double())
    assert (out.detach().cpu() - expected).abs().max() <= 4 * torch.finfo(dtype).eps * expected.abs().max()
    assert lse.isfinite().all()
    assert all(x.isfinite().all() for x in torch.autograd.grad(out.sum(), tensors))


@each_dtype
def test_many_keys(device, dtype):
    check(device, make((1, 1, 4, 64), (1, 1, 5000, 64), (1, 1, 5000, 64), dtype))


def test_strides(device, each_width):
    """No copy is made where the last dimension's elements are neighbours, and results are right everywhere."""
    x = torch.randn(2, 40, 3, 4, 70, device=device)
    expected = by_torch(*(x[:, :, i, :, 3:67].transpose(1, 2).cpu().double() for i in range(3)))
    packed = [x[:, :, i, :, 3:67].transpose(1, 2) for i in range(3)]  # rows begin at odd places
    across = [y.transpose(2, 3).contiguous().transpose(2, 3) for y in packed]
    grouped = [packed[0], *(y[:, :1].expand(-1, 4, -1, -1) for y in packed[1:])]
    assert (metalcore.scaled_dot_product_attention(*packed).cpu() - expected).abs().max() < 1e-6
    assert (metalcore.scaled_dot_product_attention(*across).cpu() - expected).abs().max() < 1e-6
    expected = by_torch(*(y.cpu().double() for y in grouped))
    assert (metalcore.scaled_dot_product_attention(*grouped).cpu() - expected).abs().max() < 1e-6
    plan = metalcore.explain("scaled_dot_product_attention", *packed)
    narrow = (each_width or metalcore._C.gpu_family(device)).startswith("apple")
    kernel = f"attention_forward_{'narrow_' * narrow}64_float"
    assert not plan.by_torch and plan.kernels == (kernel,)


@pytest.mark.parametrize(
    "shapes",
    [
        ((5, 8), (7, 8), (7, 9)),
        ((3, 5, 8), (3, 7, 8), (3, 7, 9)),
        ((2, 3, 4, 5, 8), (2, 3, 4, 7, 8), (2, 3, 4, 7, 9)),
        ((2, 3, 4, 5, 8), (4, 7, 8), (1, 4, 7, 9)),
        ((2, 4, 5, 8), (2, 1, 7, 8), (1, 1, 7, 9)),
    ],
)
def test_dimensions(device, shapes):
    tensors = [torch.randn(shape) for shape in shapes]
    ours = metalcore.scaled_dot_product_attention(*(x.to(device) for x in tensors))
    expected = by_torch(*(x.double() for x in tensors))
    assert ours.shape == expected.shape and (ours.cpu() - expected).abs().max() < 1e-6


@pytest.mark.parametrize(
    "shapes",
    [
        ((0, 2, 5, 8), (0, 2, 7, 8)),
        ((2, 0, 5, 8), (2, 0, 7, 8)),
        ((2, 2, 0, 8), (2, 2, 7, 8)),
        ((2, 2, 5, 8), (2, 2, 0, 8)),
    ],
)
def test_empty(device, shapes):
    q, k, v = (torch.randn(shape, device=device, requires_grad=True) for shape in (*shapes, shapes[1]))
    out, lse = metalcore.scaled_dot_product_attention(q, k, v, return_lse=True)
    assert out.shape == q.shape and not out.any() and (lse == -torch.inf).all()
    for gradient, x in zip(torch.autograd.grad((out, lse), (q, k, v), (out + 1, lse * 0)), (q, k, v)):
        assert gradient.shape == x.shape and not gradient.any()
    assert metalcore.scaled_dot_product_attention(q, k, v, enable_gqa=True).shape == q.shape


@each_dtype
def test_the_same_bits(device, dtype):
    tensors = [x.to(device).requires_grad_() for x in make((2, 4, 70, 64), (2, 2, 90, 64), (2, 2, 90, 64), dtype)]

    def run():
        out = metalcore.scaled_dot_product_attention(*tensors, is_causal=True, enable_gqa=True)
        return [out, *torch.autograd.grad(out, tensors, torch.ones_like(out))]

    assert all(torch.equal(a, b) for a, b in zip(run(), run()))
