"""Many keys: forward and gradients against float64, with large logits and with queries that see nothing."""

import math

import pytest
import torch
from attention_cases import by_torch, check, make
from references import DTYPES, assert_near

import metalcore

LONGEST, KEYS = 32768, 8192
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def tensors(dtype, rows, scale=1.0, keys=KEYS):
    return make((1, 1, rows, 64), (1, 1, keys, 64), (1, 1, keys, 64), dtype, scale=scale)


def last_rows(q, k, v, mask=None, **options):
    """PyTorch's formula for queries of which the last one is at the last key."""
    rows = q.shape[-2]
    return by_torch(q, k, v, torch.ones(rows, KEYS, dtype=torch.bool).tril(KEYS - rows))


@each_dtype
@pytest.mark.parametrize("rows, scale, keys", [(4, 1.0, LONGEST), (24, 30.0, KEYS)], ids=["usual", "large"])
def test_few_queries(device, dtype, rows, scale, keys):
    """The errors of large scores are those of the few rows whose two largest scores are close: there must be some."""
    check(device, tensors(dtype, rows, scale, keys))


@each_dtype
def test_the_last_rows_of_a_causal_mask(device, dtype):
    """They fill a block of queries and begin another one, and end inside of a block of keys."""
    check(device, tensors(dtype, 70), formula=last_rows, is_causal=True, lower_right=True)


@each_dtype
def test_queries_that_see_nothing(device, dtype):
    """Query 1 sees no key, and query 2 sees the last key alone."""
    mask = torch.ones(4, KEYS, dtype=torch.bool)
    mask[1], mask[2, :-1] = False, False
    check(device, tensors(dtype, 4), mask)


@each_dtype
def test_decode(device, dtype):
    """Threadgroups share the keys, where no gradient is asked for. Their sums have a fixed number of terms each."""
    q, k, v = tensors(dtype, 1, 4.0, LONGEST)
    plan = metalcore.explain("scaled_dot_product_attention", q.shape, k.shape, v.shape, dtype=dtype)
    assert "attention_merge_float" in plan.kernels
    found, lse = metalcore.scaled_dot_product_attention(*(x.to(device) for x in (q, k, v)), return_lse=True)
    scores = q.double() @ k.double().mT / 8
    assert_near(found, scores.softmax(-1) @ v.double(), terms=math.ceil(math.log2(LONGEST)))
    assert_near(lse, scores.logsumexp(-1), terms=math.ceil(math.log2(LONGEST)))
