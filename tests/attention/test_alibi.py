"""ALiBi's biases: a mask with a number for each distance, in all kernels, for one length and for many."""

import pytest
import torch
from attention_cases import check, make
from references import DTYPES, assert_near, check_operator
from test_attention_options import formula as without_slopes

import metalcore
from metalcore.attention._operators import Options, attention, spread
from metalcore.attention._varlen import varlen_attention

SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])


def formula(q, k, v, mask=None, *, alibi_slopes, lower_right=False, **options):
    rows, columns = q.shape[2], k.shape[2]
    i = torch.arange(rows).unsqueeze(-1) + (columns - rows if lower_right else 0)
    bias = -alibi_slopes.reshape(-1, q.shape[1], 1, 1) * (i - torch.arange(columns)).abs()
    if mask is not None:
        bias = bias.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else bias + mask
    return without_slopes(q, k, v, bias, lower_right=lower_right, **options)


@pytest.mark.usefixtures("each_width")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_and_gradients(device, dtype):
    """Also those of the slopes."""
    tensors = make((2, 4, 70, 64), (2, 2, 75, 64), (2, 2, 75, 64), dtype)
    for options in (
        {"is_causal": True, "lower_right": True},
        {"window": (20, 9), "softcap": 3.0, "return_lse": True},
    ):
        for slopes in (SLOPES.to(dtype), torch.rand(2, 4).to(dtype)):
            check(device, tensors, formula=formula, alibi_slopes=slopes, enable_gqa=True, **options)


@pytest.mark.parametrize("masked", [torch.bool, torch.float32])
def test_with_a_mask(device, masked):
    tensors = make((2, 4, 30, 24), (2, 4, 40, 24), (2, 4, 40, 24), torch.float32)
    mask = torch.rand(2, 1, 30, 40) > 0.3 if masked == torch.bool else torch.randn(30, 40)
    if masked == torch.float32:
        return check(device, tensors, mask, formula=formula, alibi_slopes=SLOPES)
    found = metalcore.scaled_dot_product_attention(
        *(t.to(device) for t in tensors), mask.to(device), alibi_slopes=SLOPES.to(device)
    )
    expected = formula(*(t.double() for t in tensors), mask, alibi_slopes=SLOPES.double())
    return assert_near(found, expected, terms=40)


@pytest.mark.parametrize("queries", [0, 1, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_few_queries(device, dtype, queries):
    """Kernels of decoding; and no queries, or no keys."""
    for keys in (300, 0):
        q, k, v = make((2, 4, queries, 64), (2, 2, keys, 64), (2, 2, keys, 64), dtype)
        options = {"window": (-1, 0), "lower_right": True, "enable_gqa": True}
        slopes = torch.rand(2, 4)
        found = metalcore.scaled_dot_product_attention(
            q.to(device), k.to(device), v.to(device), alibi_slopes=slopes.to(device), **options
        )
        expected = formula(q.double(), k.double(), v.double(), alibi_slopes=slopes.double(), **options)
        assert_near(found, expected.nan_to_num(0.0), terms=64)


def sequences(device, dtype, lengths=((5, 7), (0, 2), (40, 61), (1, 0), (9, 9)), size=16):
    queries, keys = zip(*lengths)
    q, k, v = torch.randn(sum(queries), 4, size), torch.randn(sum(keys), 2, size), torch.randn(sum(keys), 2, size)
    tensors = [t.to(device, dtype).requires_grad_() for t in (q, k, v)]
    bounds = [torch.tensor([0, *n], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device) for n in (queries, keys)]
    return tensors, bounds, max(queries), max(keys)


@pytest.mark.usefixtures("each_width")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [(-1, 0), (-1, -1), (6, 3)])
def test_sequences(device, dtype, window):
    """Each as it is by itself."""
    tensors, bounds, *longest = sequences(device, dtype)
    slopes = torch.rand(5, 4, device=device)
    out, lse = varlen_attention(*tensors, *bounds, *longest, window=window, alibi_slopes=slopes, return_lse=True)
    gradients = torch.autograd.grad(out.float().sin().sum() + lse[lse.isfinite()].sum(), tensors)
    wide = [t.detach().cpu().double().requires_grad_() for t in tensors]
    outs, sums = [], []
    for n in range(5):
        rows, columns = (slice(*b[n : n + 2].tolist()) for b in bounds)
        one = (t[part].transpose(0, 1).unsqueeze(0) for t, part in zip(wide, (rows, columns, columns)))
        found, total = formula(
            *one,
            alibi_slopes=slopes[n].cpu().double(),
            lower_right=True,
            window=window,
            enable_gqa=True,
            return_lse=True,
        )
        outs.append(found[0].transpose(0, 1))
        sums.append(total[0])
    expected, sums = torch.cat(outs), torch.cat(sums, 1)
    theirs = torch.autograd.grad(expected.sin().sum() + sums[sums.isfinite()].sum(), wide)
    assert_near(lse, sums.detach(), terms=61)
    # Kernels round weights to the dtype, of which 61 make a sum, and gradients go through weights twice.
    eps = torch.finfo(dtype).eps
    for roundings, ours, exact in ((1, out, expected), *((4, *pair) for pair in zip(gradients, theirs))):
        absolute = (roundings * eps + 61 * 1e-6) * exact.abs().max().item()
        torch.testing.assert_close(ours.cpu().double(), exact, rtol=roundings * eps, atol=absolute)


def test_a_number_for_each_distance(device):
    """The mask of one row, with its gradient and fake kernel."""
    q, k = torch.randn(1, 2, 20, 16, device=device), torch.randn(1, 2, 30, 16, device=device)
    options = Options(0, 0, -1, -1, False, 0.25, 0.0, 0.0)
    mask = torch.randn(1, 2, 1, 49, device=device, requires_grad=True)
    full = spread(mask.detach(), 20, 30, None, None, options).requires_grad_()
    assert full[0, 0, 3, 7] == mask[0, 0, 0, 7 - 3 + 19]
    out, expected = (attention(q, k, k, m, None, None, None, None, *options)[0] for m in (mask, full))
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    (found,) = torch.autograd.grad(out.sin().sum(), mask)
    (of_scores,) = torch.autograd.grad(expected.sin().sum(), full)
    summed = torch.stack([of_scores.diagonal(n, 2, 3).sum(-1) for n in range(-19, 30)], -1)
    torch.testing.assert_close(found[:, :, 0], summed, rtol=1e-5, atol=1e-6)
    arguments = q, k, k, mask, None, None, None, None, *options, True
    check_operator(torch.ops.metalcore.attention, *arguments)
    with pytest.raises(RuntimeError, match="or 49 columns in one row"):
        attention(q, k, k, mask[..., :48], None, None, None, None, *options)


def test_wrong_lengths_stay_inside(device):
    """Where the host does not see that a sequence is longer than it said, nothing is read behind the biases."""
    from metalcore.attention._varlen import _with_slopes

    bounds = torch.tensor([0, 9, 20], device=device, dtype=torch.int32)
    options = Options(8, 11, -1, 0, True, 1.0, 0.0, 0.0)
    (found, _), bias = _with_slopes(bounds, bounds, torch.ones(1, 4, device=device), options)
    assert not found.any() and bias.shape == (2, 4, 1, 18)
    (found, _), _ = _with_slopes(bounds, bounds, torch.ones(1, 4, device=device), options._replace(max_q=11))
    assert torch.equal(found, bounds)


@pytest.mark.parametrize("where", ["cpu", "device"])
def test_compiled_and_on_the_cpu(device, where):
    place = "cpu" if where == "cpu" else device
    q = torch.randn(1, 4, 33, 16, device=place, requires_grad=True)
    slopes = SLOPES.to(place)

    def attend(q, slopes):
        return metalcore.scaled_dot_product_attention(q, q, q, is_causal=True, alibi_slopes=slopes)

    found = attend(q, slopes)
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)(q, slopes)
    torch.testing.assert_close(compiled, found)
    gradients = [torch.autograd.grad(x.sin().sum(), q)[0] for x in (found, compiled)]
    torch.testing.assert_close(*gradients)
    wide = q.detach().cpu().double()
    assert_near(found, formula(wide, wide, wide, alibi_slopes=slopes.cpu().double(), is_causal=True), terms=33)


def test_errors(device):
    q = torch.randn(2, 4, 8, 16, device=device)
    attend = metalcore.scaled_dot_product_attention
    with pytest.raises(ValueError, match=r"alibi_slopes must have the shape \(4,\) or \(2, 4\), not \(3,\)"):
        attend(q, q, q, alibi_slopes=torch.ones(3, device=device))
    with pytest.raises(ValueError, match="alibi_slopes must be floating-point numbers, not torch.int64"):
        attend(q, q, q, alibi_slopes=torch.ones(4, dtype=torch.int64, device=device))
    with pytest.raises(TypeError, match="alibi_slopes must be a tensor, not list"):
        attend(q, q, q, alibi_slopes=[1.0] * 4)  # pyright: ignore[reportArgumentType]
