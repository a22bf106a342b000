"""Probes of scaled_dot_product_attention, against the CPU's in float64."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from . import Found, error_of, numbers

__all__ = ["causal_in_16_bits", "masks_of_batches", "one_query_of_many_keys", "permuted", "values_of_another_size"]


def _error(device, dtype, q, k, v, mask=None, layout=lambda x: x, **options):
    q, k, v = (x.to(dtype) for x in (q, k, v))
    on_device = (layout(x.to(device)) for x in (q, k, v))
    result = F.scaled_dot_product_attention(*on_device, attn_mask=None if mask is None else mask.to(device), **options)
    in_float64 = (layout(x.double()) for x in (q, k, v))
    expected = F.scaled_dot_product_attention(*in_float64, attn_mask=None if mask is None else mask.double(), **options)
    return error_of(result, expected)


def _bound(dtype, size):
    """Scores of normal numbers stay below 8, so that one that is rounded to its dtype moves a weight by 4 eps: as much
    again for the weights, the sums and the result. In float32, sums of `size` terms come to it."""
    eps = torch.finfo(dtype).eps
    return 8 * eps + 2 * size * torch.finfo(torch.float32).eps


def _normal(*shapes):
    return tuple(numbers(*shape, seed=seed) for seed, shape in enumerate(shapes))


def causal_in_16_bits(device: str) -> Found:
    inputs = _normal(*[(1, 4, 64, 64)] * 3)
    errors = [_error(device, dtype, *inputs, is_causal=True) for dtype in (torch.float16, torch.bfloat16)]
    return Found(max(errors), _bound(torch.bfloat16, 64))


def one_query_of_many_keys(device: str) -> Found:
    inputs = _normal((1, 32, 1, 128), (1, 2, 1024, 128), (1, 2, 1024, 128))
    errors = [_error(device, torch.float16, *inputs, enable_gqa=True) for _ in range(2)]
    # A mean of 1,024 values is small beside them: the values' rounding counts by its root.
    return Found(max(errors), 4 * _bound(torch.float16, 1024))


def permuted(device: str) -> Found:
    inputs = _normal(*[(84, 3, 3, 64)] * 3)
    error = _error(device, torch.float32, *inputs, layout=lambda x: x.permute(0, 2, 1, 3))
    return Found(error, _bound(torch.float32, 64))


def masks_of_batches(device: str) -> Found:
    inputs = _normal(*[(2, 4, 8, 64)] * 3)
    mask = torch.zeros(2, 1, 8, 8)
    mask[0, 0, 4:, :4] = float("-inf")
    return Found(_error(device, torch.float32, *inputs, mask=mask), _bound(torch.float32, 64))


def values_of_another_size(device: str) -> Found:
    errors = []
    for queries in (1, 16):
        inputs = _normal((1, 2, queries, 64), (1, 2, 16, 64), (1, 2, 16, 32))
        errors.append(_error(device, torch.float32, *inputs))
    return Found(max(errors), _bound(torch.float32, 64))
