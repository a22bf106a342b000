"""What scaled_dot_product_attention has and PyTorch's function has not: windows, softcap, sinks, lse, other alignment;
and dropout."""

import math
from itertools import pairwise

import pytest
import torch
from attention_cases import check, make, random_directions
from references import DTYPES
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import metalcore
from metalcore.attention._operators import Options, attend, attention

pytestmark = pytest.mark.usefixtures("each_width")
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def formula(
    q,
    k,
    v,
    mask=None,
    *,
    is_causal=False,
    window=(-1, -1),
    lower_right=False,
    softcap=0.0,
    sinks=None,
    enable_gqa=False,
    return_lse=False,
):
    """Written out, as the papers have it."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    wide = torch.promote_types(q.dtype, torch.float32)
    s = (q.to(wide) @ k.to(wide).mT) / math.sqrt(q.shape[-1])
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    if mask is not None:
        s = s + mask
    rows, columns = s.shape[-2:]
    i = torch.arange(rows).unsqueeze(-1) + (columns - rows if lower_right else 0)
    j = torch.arange(columns)
    left, right = window[0], 0 if is_causal else window[1]
    seen = torch.ones(rows, columns, dtype=torch.bool)
    if left >= 0:
        seen &= j >= i - left
    if right >= 0:
        seen &= j <= i + right
    s = s.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        s = torch.cat([s, sinks.to(wide).view(1, -1, 1, 1).expand(*s.shape[:-1], 1)], -1)
    blind = (s == -torch.inf).all(-1)
    p = torch.softmax(s.masked_fill(blind.unsqueeze(-1), 0), -1) * ~blind.unsqueeze(-1)
    out = (p[..., :columns] @ v.to(wide)).to(q.dtype)
    return (out, torch.logsumexp(s, -1)) if return_lse else out


def tensors(dtype, rows=70, columns=75, size=64, heads=4):
    return make((2, heads, rows, size), (2, 2, columns, size), (2, 2, columns, size), dtype)


WINDOWS = [(0, 0), (5, 3), (40, -1), (-1, 2), (33, 0)]


@pytest.mark.parametrize(
    "dtype, window",
    [(torch.float32, window) for window in WINDOWS] + [(dtype, (5, 3)) for dtype in DTYPES if dtype.itemsize == 2],
    ids=str,
)
@pytest.mark.parametrize("rows, columns", [(70, 75), (75, 20), (20, 75)])
def test_windows(device, dtype, window, rows, columns):
    for lower_right in (False, True):
        check(
            device,
            tensors(dtype, rows, columns),
            formula=formula,
            window=window,
            lower_right=lower_right,
            enable_gqa=True,
        )


def sinks_deviation(inputs, mask, sinks, **options):
    """What rounding the weights to the inputs' dtype does to the gradient of sinks: at most its standard deviation.

    The gradient is the sum over queries of the sink's weight times the product of a result and its gradient, and the
    result is a sum of values by rounded weights, as in FlashAttention. A weight p is off by at most eps / 2 p, and by
    eps / (2 sqrt(3)) p in the root of the mean square.
    """
    q, k, v = (x.double() for x in inputs)
    columns = torch.eye(k.shape[2], dtype=q.dtype).expand(*k.shape[:2], -1, -1)
    p = formula(q, k, columns, mask.double(), sinks=sinks.double(), **options)[0]
    (grad,) = random_directions([torch.empty(*q.shape[:3], v.shape[3])], inputs[0].dtype)
    products = grad.double() @ v.repeat_interleave(q.shape[1] // v.shape[1], 1).mT
    terms = (1 - p.sum(-1, keepdim=True)) * p * products
    return terms.square().sum((0, 2, 3)).sqrt().norm() * torch.finfo(inputs[0].dtype).eps / 12**0.5


@each_dtype
def test_everything_together(device, dtype, each_width):
    """Tiles of each size. Wide kernels round weights of 16 bits, which the formula does not, and narrow ones do not."""
    options = {"window": (20, 30), "lower_right": True, "softcap": 2.0, "enable_gqa": True, "return_lse": True}
    for size in (64, 96, 128, 192, 256):
        sinks, mask = torch.randn(4).to(dtype), torch.randn(2, 1, 70, 75).to(dtype)
        inputs = tensors(dtype, size=size)
        rounds = not each_width and dtype != torch.float32
        more = {6: 3 * sinks_deviation(inputs, mask, sinks, **options)} if rounds else None
        check(device, inputs, mask, formula=formula, more=more, sinks=sinks, **options)


@each_dtype
@pytest.mark.parametrize(
    "options", [{"softcap": 5.0}, {"return_lse": True}, {"is_causal": True, "lower_right": True}], ids=str
)
def test_one_by_one(device, dtype, options):
    check(device, tensors(dtype), formula=formula, enable_gqa=True, **options)


@each_dtype
@pytest.mark.parametrize("value", [-50.0, 0.0, 50.0])
def test_sinks(device, dtype, value):
    """A sink that takes next to nothing, some, and nearly all; also of queries that see no key."""
    sinks = torch.randn(4) + value
    check(
        device,
        tensors(dtype, 40, 20),
        formula=formula,
        sinks=sinks.to(dtype),
        enable_gqa=True,
        is_causal=True,
        lower_right=True,
        return_lse=True,
    )


@pytest.mark.parametrize("rows, columns", [(40, 40), (20, 50), (50, 20)])
def test_causal_biases(device, rows, columns):
    q, k, v = (x.to(device) for x in make((1, 2, rows, 64), (1, 2, columns, 64), (1, 2, columns, 64), torch.float32))
    run = metalcore.scaled_dot_product_attention
    assert torch.equal(run(q, k, v, causal_upper_left(rows, columns)), run(q, k, v, is_causal=True))
    assert torch.equal(run(q, k, v, causal_lower_right(rows, columns)), run(q, k, v, is_causal=True, lower_right=True))


@each_dtype
def test_variable_lengths(device, dtype):
    """The operator's sequences give what each gives by itself, also an empty one; rows of none give zeros."""
    starts_q, starts_k = [0, 5, 5, 75, 108], [0, 9, 20, 20, 90]
    q, k, v = make((1, 4, 110, 64), (1, 2, 95, 64), (1, 2, 95, 64), dtype)
    q, k, v = (x.to(device).requires_grad_() for x in (q, k, v))
    cu_seq_q, cu_seq_k = (torch.tensor(starts, dtype=torch.int32, device=device) for starts in (starts_q, starts_k))
    options = Options(75, 90, 30, 0, True, 0.125, 0.0, 0.0)
    out, lse = attention(q, k, v, None, None, cu_seq_q, cu_seq_k, None, *options)
    found = torch.autograd.grad((out.float().sin().sum() + lse[lse.isfinite()].sum()), (q, k, v))
    parts, lses = [], []
    for (a, b), (c, d) in zip(pairwise(starts_q), pairwise(starts_k)):
        one = metalcore.scaled_dot_product_attention(
            q[:, :, a:b],
            k[:, :, c:d],
            v[:, :, c:d],
            is_causal=True,
            window=(30, -1),
            lower_right=True,
            enable_gqa=True,
            return_lse=True,
        )
        parts.append(one[0]), lses.append(one[1])
    assert torch.equal(out[:, :, :108], torch.cat(parts, 2)) and not out[:, :, 108:].any()
    assert torch.equal(lse[:, :, :108], torch.cat(lses, 2)) and (lse[:, :, 108:] == -torch.inf).all()
    expected = sum(part.float().sin().sum() + one[one.isfinite()].sum() for part, one in zip(parts, lses))
    for a, b in zip(found, torch.autograd.grad(expected, (q, k, v))):
        assert (a - b).abs().max() <= torch.finfo(dtype).eps * b.abs().max()
    formula_out, formula_lse = attend(
        *(x.detach().cpu().double() for x in (q, k, v)), None, None, cu_seq_q.cpu(), cu_seq_k.cpu(), None, options
    )
    # A score of up to 8 has two roundings, each of half an eps times 8, and a weight and its value have one each.
    assert (out.detach().cpu() - formula_out).abs().max() < 10 * torch.finfo(dtype).eps
    assert torch.equal(formula_lse.isfinite(), lse.detach().cpu().isfinite())


def test_lse_of_the_least_mask(device):
    """It is the mask's number: scores and the number of keys are less than a rounding of it."""
    least = torch.finfo(torch.float32).min
    for rows, columns in ((20, 40), (1, 40), (3, 5)):
        q, k, v = (x.to(device) for x in tensors(torch.float32, rows, columns))
        mask = torch.full((rows, 1), least, device=device)
        lse = metalcore.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True, return_lse=True)[1]
        assert (lse == least).all()


def test_tokens_before_the_first_sequence(device):
    """They give zeros, also in the formula."""
    q, k, v = make((1, 2, 20, 16), (1, 2, 20, 16), (1, 2, 20, 16), torch.float32)
    starts = torch.tensor([6, 12, 20], dtype=torch.int32)
    options = Options(8, 8, -1, 0, True, 0.25, 0.0, 0.0)
    exact, exact_lse = attend(*(x.double() for x in (q, k, v)), None, None, starts, starts, None, options)
    assert not exact[:, :, :6].any() and (exact_lse[:, :, :6] == -torch.inf).all()
    placed = (x.to(device) for x in (q, k, v, starts))
    q, k, v, starts = placed
    out, lse = attention(q, k, v, None, None, starts, starts, None, *options)
    assert (out.cpu() - exact).abs().max() < 10 * torch.finfo(torch.float32).eps
    assert torch.equal(lse.cpu().isfinite(), exact_lse.isfinite())


@each_dtype
@pytest.mark.parametrize("probability, size", [(0.25, 64), (0.25, 128), (1.0, 64)])
def test_dropout(device, dtype, probability, size):
    """The formula with the same random numbers gives the same results and gradients."""
    q, k, v = (x.to(device).requires_grad_() for x in tensors(dtype, size=size))
    seed = torch.tensor([-5, 12345], dtype=torch.int32, device=device)
    options = Options(0, 0, -1, -1, False, 0.125, 0.0, probability)
    out, _ = attention(q, k, v, None, None, None, None, seed, *options)
    wide = [x.detach().cpu().double().requires_grad_() for x in (q, k, v)]
    expected, _ = attend(*wide, None, None, None, None, seed.cpu(), options)
    found = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    eps = torch.finfo(dtype).eps
    for a, b in zip((out, *found), (expected, *torch.autograd.grad(expected, wide, torch.ones_like(expected)))):
        assert (a.detach().cpu() - b).norm() <= 4 * eps * b.norm()


def test_dropout_follows_the_generator(device):
    q = torch.randn(1, 2, 64, 64, device=device)
    ones = torch.ones_like(q)
    draws = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        draws += [metalcore.scaled_dot_product_attention(q, q, ones, dropout_p=0.5) for _ in range(2)]
    assert torch.equal(draws[0], draws[2]) and torch.equal(draws[1], draws[3])
    assert not torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[4])
    assert abs(draws[0].mean().item() - 1) < 0.1
