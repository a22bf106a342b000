"""Few queries and many keys: threadgroups share the keys, and their results are merged."""

import pytest
import torch
from references import DTYPES, assert_near, tensor, wide
from rows import tuned

from metalcore import scaled_dot_product_attention as attend
from metalcore.recording import record

SUFFIXES = dict(zip(DTYPES, ("float", "half", "bfloat")))
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(params=["baseline", "apple7"], ids=["wide", "narrow"])
def family(request):
    """Many threadgroups share the keys; and their threads have few registers."""
    with tuned(request.param):
        yield request.param


def reference(q, k, v, mask=None, scale=None, low=None, high=None, softcap=0.0, sinks=None):
    """In float64. A query at place p sees keys p + low to p + high; the last one is at the last key."""
    q, k, v = wide(q), wide(k), wide(v)
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        mask = mask.cpu()
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.double()
    distance = torch.arange(k.shape[2]) - torch.arange(q.shape[2])[:, None] - (k.shape[2] - q.shape[2])
    for bound, outside in ((low, torch.lt), (high, torch.gt)):
        if bound is not None:
            scores = scores.masked_fill(outside(distance, bound), -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, wide(sinks).view(-1, 1, 1).expand(*scores.shape[:-1], 1)], -1)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.nan_to_num(0.0, neginf=0.0)[..., None]).exp()
    return weights[..., : k.shape[2]] @ v, lse


def inputs(device, dtype, heads=4, kv_heads=2, queries=1, keys=300, size=64, value_size=None, batch=2):
    make = lambda *shape: tensor(*shape, dtype=dtype, device=device)  # noqa: E731
    return (
        make(batch, heads, queries, size),
        make(batch, kv_heads, keys, size),
        make(batch, kv_heads, keys, size if value_size is None else value_size),
    )


def check(found, expected):
    for ours, theirs in zip(found, expected):
        assert_near(ours, theirs, terms=8)


def kernels(*tensors, **options):
    return record(attend, *tensors, enable_gqa=True, **options)[1].kernels


@each_dtype
@pytest.mark.parametrize("number", ["least", -1e9])
def test_parts_whose_logarithms_are_large(device, dtype, number, family):
    """A mask whose numbers leave nothing of the scores gives seen keys equal weights, also where the threadgroups that
    share the keys see different numbers of them."""
    q, k, v = inputs(device, dtype, keys=600)
    number = torch.finfo(torch.float32).min if number == "least" else number
    mask = torch.full((1, 1, 1, 600), number, device=device)
    mask[..., :200] = -torch.inf
    assert len(kernels(q, k, v, attn_mask=mask)) == 2
    out, lse = attend(q, k, v, mask, enable_gqa=True, return_lse=True)
    mean = wide(v)[:, :, 200:].mean(2, keepdim=True).repeat_interleave(2, 1)
    assert_near(out, mean, terms=8)
    # The logarithm of 400 and the scores are less than a rounding of the number.
    assert torch.allclose(lse.cpu().double(), torch.tensor(number).double(), rtol=2 * torch.finfo(torch.float32).eps)


@each_dtype
@pytest.mark.parametrize(
    "size, value_size, kernel",
    [(64, 64, 64), (50, 30, 64), (65, 64, 128), (80, 80, 128), (128, 128, 128), (192, 128, 256), (576, 512, 576)],
)
def test_sizes(device, dtype, size, value_size, kernel, family):
    tensors = inputs(device, dtype, size=size, value_size=value_size, batch=1)
    if family == "baseline":
        rows = 8 if kernel == 576 or size % 8 else 4  # those of 4 rows only load vectors
        name = f"attention_decode_{kernel}x{rows}_{SUFFIXES[dtype]}"
    else:
        name = f"attention_decode_narrow_{'general_' if size % 8 else ''}{kernel}x4_{SUFFIXES[dtype]}"
    assert kernels(*tensors) == (name, "attention_merge_float")
    check(attend(*tensors, enable_gqa=True, return_lse=True), reference(*tensors))
    found = attend(*tensors, softcap=3.0, enable_gqa=True, return_lse=True)
    check(found, reference(*tensors, softcap=3.0))


@pytest.mark.parametrize("heads, kv_heads, queries", [(1, 1, 1), (4, 1, 1), (5, 1, 1), (8, 4, 4), (3, 1, 3), (4, 1, 8)])
def test_rows(device, heads, kv_heads, queries, family):
    """Fewer and more rows than a threadgroup has, which the causal limit cuts one by one."""
    tensors = inputs(device, torch.float32, heads, kv_heads, queries, keys=261)
    options = {"is_causal": True, "lower_right": True, "enable_gqa": True, "return_lse": True}
    one = heads * queries == kv_heads
    rows = 1 if one else 4 if family == "apple7" or heads * queries <= 4 * kv_heads else 8
    assert f"x{rows}_" in kernels(*tensors)[0]
    check(attend(*tensors, **options), reference(*tensors, high=0))


@each_dtype
@pytest.mark.parametrize("size, kernel", [(48, 64), (80, 128), (128, 128), (200, 256)])
def test_one_row(device, dtype, size, kernel, family):
    """Each head has keys of its own. The last of 261 keys stands where a simdgroup has several ahead."""
    tensors = inputs(device, dtype, 3, 3, keys=261, size=size, value_size=size)
    assert f"{kernel}x1_" in kernels(*tensors)[0]
    check(attend(*tensors, return_lse=True), reference(*tensors))
    check(attend(*tensors, softcap=3.0, return_lse=True), reference(*tensors, softcap=3.0))


@pytest.mark.parametrize("keys", [64, 127, 128, 255, 256, 257, 1024])
def test_keys(device, keys, family):
    """Below and above the numbers of keys from which threadgroups share them."""
    tensors = inputs(device, torch.float32, keys=keys, batch=1, heads=2)
    assert ("attention_merge_float" in kernels(*tensors)) == (keys >= 256)
    check(attend(*tensors, return_lse=True), reference(*tensors))


@each_dtype
@pytest.mark.parametrize("heads", [4, 8])
@pytest.mark.parametrize("keys", [32, 33, 39, 40, 41, 63, 64, 65, 97, 523])
def test_steps(device, keys, heads, dtype, family):
    """Below and above the keys that a simdgroup and a threadgroup have at a time: some simdgroups have a step more than
    others, or none at all."""
    tensors = inputs(device, dtype, keys=keys, batch=1, heads=heads, kv_heads=1)
    mask = torch.rand(keys, device=device) < 0.7
    check(attend(*tensors, enable_gqa=True, return_lse=True), reference(*tensors))
    check(attend(*tensors, mask, enable_gqa=True, return_lse=True), reference(*tensors, mask))


@each_dtype
def test_options(device, dtype):
    q, k, v = inputs(device, dtype, queries=2, heads=4)
    sinks = tensor(4, device=device)
    for family in ("baseline", "simulator", "apple7"):
        with tuned(family):
            found = attend(q, k, v, window=(40, 3), lower_right=True, enable_gqa=True, return_lse=True)
            check(found, reference(q, k, v, low=-40, high=3))
            found = attend(q * 8, k, v, softcap=3.0, sinks=sinks, scale=0.3, enable_gqa=True, return_lse=True)
            check(found, reference(q * 8, k, v, scale=0.3, softcap=3.0, sinks=sinks))


@each_dtype
def test_masks(device, dtype, family):
    q, k, v = inputs(device, dtype, queries=2)
    for shape in ((2, 4, 2, 300), (300,), (2, 1), (2, 1, 1, 300)):
        seen = torch.rand(shape).to(device) > 0.3
        added = tensor(*shape, dtype=dtype, device=device)
        for mask in (seen, added, added.float()):
            found = attend(q, k, v, mask, enable_gqa=True, return_lse=True)
            check(found, reference(q, k, v, mask))


def test_rows_that_see_no_key(device):
    q, k, v = inputs(device, torch.float32, queries=2)
    mask = torch.ones(2, 300, dtype=torch.bool, device=device)
    mask[1] = False
    for family in ("baseline", "simulator", "apple7"):
        with tuned(family):
            out, lse = attend(q, k, v, mask, enable_gqa=True, return_lse=True)
        assert (out[:, :, 1] == 0).all() and (lse[:, :, 1] == -torch.inf).all()
        check((out[:, :, :1], lse[:, :, :1]), reference(q[:, :, :1], k, v))


def test_no_keys(device):
    """Only these kernels have heads of this size. Values are shorter than queries."""
    q, k, v = (torch.randn(1, 2, n, size, device=device) for n, size in ((9, 300), (0, 300), (0, 5)))
    sinks = torch.tensor([1.0, 2.0], device=device)
    for options, expected in (({}, torch.full((2,), -torch.inf)), ({"sinks": sinks}, sinks.cpu())):
        out, lse = attend(q, k, v, return_lse=True, **options)
        assert out.shape == (1, 2, 9, 5) and not out.any()
        torch.testing.assert_close(lse.cpu(), expected.view(1, 2, 1).expand(1, 2, 9))


def test_large_scores(device, family):
    q, k, v = inputs(device, torch.float32)
    check(attend(q * 100, k, v, enable_gqa=True, return_lse=True), reference(q * 100, k, v))


@each_dtype
def test_layouts(device, dtype, family):
    """Heads beside each other, rows at no multiple of 16 bytes, a batch that is expanded."""
    q, k, v = inputs(device, dtype, batch=2)
    expected = reference(q, k, v)
    beside = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    odd = [torch.nn.functional.pad(x, (1, 2))[..., 1:-2] for x in (q, k, v)]
    turned = [x.mT.contiguous().mT for x in (q, k, v)]
    for tensors in (beside, odd, turned):
        check(attend(*tensors, enable_gqa=True, return_lse=True), expected)
    k, v = k[:1].expand(2, -1, -1, -1), v[:1].expand(2, -1, -1, -1)
    check(attend(q, k, v, enable_gqa=True, return_lse=True), reference(q, k, v))


def test_gradients(device):
    """The kernels of many queries keep what the derivative needs."""
    tensors = inputs(device, torch.float32, queries=2, keys=70)
    assert kernels(*tensors)[0].startswith("attention_decode")
    leaves = [x.requires_grad_() for x in tensors]
    assert kernels(*leaves)[0].startswith("attention_forward")
    found = torch.autograd.grad(attend(*leaves, enable_gqa=True).square().sum(), leaves)
    leaves = [wide(x).requires_grad_() for x in tensors]
    group = [leaves[0], *(x.repeat_interleave(2, 1) for x in leaves[1:])]
    out = torch.nn.functional.scaled_dot_product_attention(*group)
    for ours, theirs in zip(found, torch.autograd.grad(out.square().sum(), leaves)):
        assert_near(ours, theirs, terms=16)
