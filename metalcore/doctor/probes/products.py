"""Probes of products of matrices. The numbers are -1, 0 and 1, so that every sum is exact."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from . import Found, error_of, gradients, whole_numbers

__all__ = [
    "batched_long_sums",
    "linear_in_16_bits",
    "linear_of_many_batches",
    "linear_to_one_output",
    "linear_with_bias",
    "long_sums",
]


def _before_other_numbers(values: Tensor, device: str) -> Tensor:
    """Returns a copy on the device, behind which lie other numbers, as in an allocator's memory that was used before. A
    kernel that reads past its operands' ends adds them."""
    buffer = torch.full((values.numel() + 65536,), 777.0, dtype=values.dtype, device=device)
    return buffer[: values.numel()].view_as(values).copy_(values)


def long_sums(device: str) -> Found:
    errors = []
    for terms in (50_000, 32_767):
        X = whole_numbers(terms, 25)
        on_device = _before_other_numbers(X, device)
        errors.append(error_of(on_device.T @ on_device, X.T @ X))
    # A linear layer's gradient is a sum over the tokens, and over the outputs, of which vocabularies have many.
    tokens, weight = whole_numbers(40_000, 16), whole_numbers(16, 16, seed=1)
    direction = whole_numbers(40_000, 16, seed=2)
    of_weight = _weight_gradient(*(_before_other_numbers(each, device) for each in (tokens, weight, direction)))
    errors.append(error_of(of_weight, direction.T @ tokens))
    return Found(max(errors), 0.0)  # sums of at most 50,000 are below 2^24, so exact in float32


def _weight_gradient(tokens, weight, direction):
    return gradients(lambda w: F.linear(tokens, w) * direction, weight)[0]


def batched_long_sums(device: str) -> Found:
    A, B = whole_numbers(2, 16, 32_767), whole_numbers(2, 32_767, 16, seed=1)
    left, right = _before_other_numbers(A, device), _before_other_numbers(B, device)
    zeros = torch.zeros(2, 16, 16, device=device)
    results = (torch.bmm(left, right), torch.baddbmm(zeros, left, right))
    return Found(max(error_of(each, A @ B) for each in results), 0.0)


def linear_of_many_batches(device: str) -> Found:
    x, weight, bias = whole_numbers(65_537, 11, 16), whole_numbers(64, 16, seed=1), whole_numbers(64, seed=2)
    result = F.linear(x.to(device), weight.to(device), bias.to(device))
    # The batches whose number wraps around, and those that they take the place of, lie at the ends.
    ends = ((result[:64], x[:64]), (result[-64:], x[-64:]))
    return Found(max(error_of(ours, F.linear(values, weight, bias)) for ours, values in ends), 0.0)


def linear_with_bias(device: str) -> Found:
    errors = []
    for shape, outputs in (((80, 1, 2), 192), ((80, 1, 2), 768), ((2, 64, 128), 384)):
        x, weight, bias = whole_numbers(*shape), whole_numbers(outputs, shape[-1], seed=1), whole_numbers(outputs)
        result = F.linear(x.to(device), weight.to(device), bias.to(device))
        errors.append(error_of(result, F.linear(x, weight, bias)))
    return Found(max(errors), 0.0)


def linear_in_16_bits(device: str) -> Found:
    errors = []
    for dtype in (torch.bfloat16, torch.float16):
        for shape in ((2, 13, 1024), (6, 6, 634)):
            x, weight = whole_numbers(*shape), whole_numbers(shape[-1], shape[-1], seed=1)
            inputs = x.to(device, dtype), weight.to(device, dtype)
            expected = F.linear(x, weight).to(dtype)  # rounded once: the sums are exact in float32
            errors += [error_of(F.linear(*inputs), expected) for _ in range(2)]
            of_x = _input_gradient(*inputs, x.flip(-1).to(device, dtype))
            errors.append(error_of(of_x, (x.flip(-1) @ weight).to(dtype)))
    return Found(max(errors), 0.0)


def _input_gradient(x, weight, direction):
    return gradients(lambda x: F.linear(x, weight) * direction, x)[0]


def linear_to_one_output(device: str) -> Found:
    x, weight = whole_numbers(3840, 33), whole_numbers(1, 33, seed=1)
    [gradient] = gradients(lambda x: F.linear(x, weight.to(device)), x.to(device))
    return Found(error_of(gradient, weight.expand(3840, 33)), 0.0)  # each gradient is one weight
