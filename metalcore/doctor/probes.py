"""The probes, by area. A probe is a function of a device that does what a report does, compares it with the CPU, and
returns the largest relative error beside its bound (`Deviation`). It raises what PyTorch raises.

Where a fault reads wrong memory, numbers are whole and so few that every sum of them is exact in any order: the bound
is 0 then.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

__all__ = [
    "Deviation",
    "attention_of_one_query",
    "attention_of_permuted_tensors",
    "attention_with_masks_of_batches",
    "attention_with_values_of_another_size",
    "batch_norm_gradients",
    "batched_long_sums",
    "batched_svd",
    "bool_views",
    "causal_attention_in_16_bits",
    "checkpointed_dropout",
    "convolution_with_a_slice",
    "error_of",
    "gradients",
    "layer_norm_gradients",
    "linear_in_16_bits",
    "linear_of_many_batches",
    "linear_to_one_output",
    "linear_with_bias",
    "long_sums",
    "lstm_gradients",
    "numbers",
    "orthogonal_singular_vectors",
    "scalar_views",
    "solve_gradients",
    "sorted_columns",
    "unique_inverse",
    "whole_numbers",
]

LARGEST = 1e300  # a number, for JSON


class Deviation(NamedTuple):
    """What a probe has found.

    Attributes:
        error: the largest difference from the CPU's result, over the result's largest magnitude; LARGEST where a result
            is not finite or has another shape.
        bound: what rounding alone may make of it.
    """

    error: float
    bound: float


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Returns random normal float32 numbers on the CPU."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), device="cpu", dtype=torch.float32)


def whole_numbers(*shape: int, seed: int = 0) -> Tensor:
    """Returns random -1, 0 and 1, as float32, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, 2, shape, generator=generator, device="cpu").to(torch.float32)


def error_of(result: Tensor, expected: Tensor) -> float:
    """Returns the largest difference, over the largest magnitude that was expected."""
    if result.shape != expected.shape:
        return LARGEST
    expected = expected.detach().cpu().double()
    difference = (result.detach().cpu().double() - expected).abs().max()
    error = (difference / expected.abs().max().clamp_min(torch.finfo(torch.float32).tiny)).item()
    return min(error, LARGEST) if error == error else LARGEST


def gradients(function: Callable[..., Tensor], *tensors: Tensor) -> list[Tensor]:
    """Returns the gradients of a function's sum."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    return list(torch.autograd.grad(function(*leaves).sum(), leaves))


def _attention_error(device, dtype, q, k, v, mask=None, layout=lambda x: x, **options):
    q, k, v = (x.to(dtype) for x in (q, k, v))
    on_device = (layout(x.to(device)) for x in (q, k, v))
    result = F.scaled_dot_product_attention(*on_device, attn_mask=None if mask is None else mask.to(device), **options)
    in_float64 = (layout(x.double()) for x in (q, k, v))
    expected = F.scaled_dot_product_attention(*in_float64, attn_mask=None if mask is None else mask.double(), **options)
    return error_of(result, expected)


def _attention_bound(dtype, size):
    """Returns the bound of the results' error. Scores of normal numbers stay below 8, so that one that is rounded to
    its dtype moves a weight by 4 eps: as much again for the weights, the sums and the result. In float32, sums of
    `size` terms come to it."""
    eps = torch.finfo(dtype).eps
    return 8 * eps + 2 * size * torch.finfo(torch.float32).eps


def _normal(*shapes):
    return tuple(numbers(*shape, seed=seed) for seed, shape in enumerate(shapes))


def causal_attention_in_16_bits(device: str) -> Deviation:
    inputs = _normal(*[(1, 4, 64, 64)] * 3)
    errors = [_attention_error(device, dtype, *inputs, is_causal=True) for dtype in (torch.float16, torch.bfloat16)]
    return Deviation(max(errors), _attention_bound(torch.bfloat16, 64))


def attention_of_one_query(device: str) -> Deviation:
    inputs = _normal((1, 32, 1, 128), (1, 2, 1024, 128), (1, 2, 1024, 128))
    errors = [_attention_error(device, torch.float16, *inputs, enable_gqa=True) for _ in range(2)]
    # A mean of 1,024 values is small beside them: the values' rounding counts by its root.
    return Deviation(max(errors), 4 * _attention_bound(torch.float16, 1024))


def attention_of_permuted_tensors(device: str) -> Deviation:
    inputs = _normal(*[(84, 3, 3, 64)] * 3)
    error = _attention_error(device, torch.float32, *inputs, layout=lambda x: x.permute(0, 2, 1, 3))
    return Deviation(error, _attention_bound(torch.float32, 64))


def attention_with_masks_of_batches(device: str) -> Deviation:
    inputs = _normal(*[(2, 4, 8, 64)] * 3)
    mask = torch.zeros(2, 1, 8, 8)
    mask[0, 0, 4:, :4] = float("-inf")
    return Deviation(_attention_error(device, torch.float32, *inputs, mask=mask), _attention_bound(torch.float32, 64))


def attention_with_values_of_another_size(device: str) -> Deviation:
    errors = []
    for queries in (1, 16):
        inputs = _normal((1, 2, queries, 64), (1, 2, 16, 64), (1, 2, 16, 32))
        errors.append(_attention_error(device, torch.float32, *inputs))
    return Deviation(max(errors), _attention_bound(torch.float32, 64))


def _before_other_numbers(values: Tensor, device: str) -> Tensor:
    """Returns a copy on the device, behind which lie other numbers, as in an allocator's memory that was used before. A
    kernel that reads past its operands' ends adds them."""
    buffer = torch.full((values.numel() + 65536,), 777.0, dtype=values.dtype, device=device)
    return buffer[: values.numel()].view_as(values).copy_(values)


def long_sums(device: str) -> Deviation:
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
    return Deviation(max(errors), 0.0)  # sums of at most 50,000 are below 2^24, so exact in float32


def _weight_gradient(tokens, weight, direction):
    return gradients(lambda w: F.linear(tokens, w) * direction, weight)[0]


def batched_long_sums(device: str) -> Deviation:
    A, B = whole_numbers(2, 16, 32_767), whole_numbers(2, 32_767, 16, seed=1)
    left, right = _before_other_numbers(A, device), _before_other_numbers(B, device)
    zeros = torch.zeros(2, 16, 16, device=device)
    results = (torch.bmm(left, right), torch.baddbmm(zeros, left, right))
    return Deviation(max(error_of(each, A @ B) for each in results), 0.0)


def linear_of_many_batches(device: str) -> Deviation:
    x, weight, bias = whole_numbers(65_537, 11, 16), whole_numbers(64, 16, seed=1), whole_numbers(64, seed=2)
    result = F.linear(x.to(device), weight.to(device), bias.to(device))
    # The batches whose number wraps around, and those that they take the place of, lie at the ends.
    ends = ((result[:64], x[:64]), (result[-64:], x[-64:]))
    return Deviation(max(error_of(ours, F.linear(values, weight, bias)) for ours, values in ends), 0.0)


def linear_with_bias(device: str) -> Deviation:
    errors = []
    for shape, outputs in (((80, 1, 2), 192), ((80, 1, 2), 768), ((2, 64, 128), 384)):
        x, weight, bias = whole_numbers(*shape), whole_numbers(outputs, shape[-1], seed=1), whole_numbers(outputs)
        result = F.linear(x.to(device), weight.to(device), bias.to(device))
        errors.append(error_of(result, F.linear(x, weight, bias)))
    return Deviation(max(errors), 0.0)


def linear_in_16_bits(device: str) -> Deviation:
    errors = []
    for dtype in (torch.bfloat16, torch.float16):
        for shape in ((2, 13, 1024), (6, 6, 634)):
            x, weight = whole_numbers(*shape), whole_numbers(shape[-1], shape[-1], seed=1)
            inputs = x.to(device, dtype), weight.to(device, dtype)
            expected = F.linear(x, weight).to(dtype)  # rounded once: the sums are exact in float32
            errors += [error_of(F.linear(*inputs), expected) for _ in range(2)]
            of_x = _input_gradient(*inputs, x.flip(-1).to(device, dtype))
            errors.append(error_of(of_x, (x.flip(-1) @ weight).to(dtype)))
    return Deviation(max(errors), 0.0)


def _input_gradient(x, weight, direction):
    return gradients(lambda x: F.linear(x, weight) * direction, x)[0]


def linear_to_one_output(device: str) -> Deviation:
    x, weight = whole_numbers(3840, 33), whole_numbers(1, 33, seed=1)
    [gradient] = gradients(lambda x: F.linear(x, weight.to(device)), x.to(device))
    return Deviation(error_of(gradient, weight.expand(3840, 33)), 0.0)  # each gradient is one weight


_EPS = torch.finfo(torch.float32).eps


def batched_svd(device: str) -> Deviation:
    # The reports have the first size that fails: 512 matrices of 16 numbers.
    A = numbers(512, 4, 4)
    U, S, Vh = (each.cpu() for each in torch.linalg.svd(A.to(device)))
    values = torch.linalg.svdvals(A.to(device))
    tall = torch.eye(8, 4) * 4 + numbers(512, 8, 4, seed=1) / 4
    B = numbers(512, 8, 2, seed=2)
    solution = torch.linalg.lstsq(tall.to(device), B.to(device)).solution
    error = max(
        error_of(U @ S.diag_embed() @ Vh, A),
        error_of(values, torch.linalg.svdvals(A.double())),
        error_of(solution, torch.linalg.lstsq(tall.double(), B.double()).solution),
    )
    # The algorithms are backward stable: a small multiple of n roundings, here 16 n. The least squares' condition is
    # below 2, which a factor of 4 covers.
    return Deviation(error, 64 * 4 * _EPS)


def orthogonal_singular_vectors(device: str) -> Deviation:
    A = numbers(16, 32, 8) @ numbers(16, 8, 32, seed=1)  # of rank 8
    U = torch.linalg.svd(A.to(device)).U.cpu().double()
    error = error_of(U.mT @ U, torch.eye(32).expand(16, 32, 32))
    return Deviation(error, 16 * 32 * _EPS)  # Householder's and Jacobi's vectors are orthogonal up to some n roundings


def solve_gradients(device: str) -> Deviation:
    A, B = 4 * torch.eye(4) + numbers(3, 4, 4) / 2, numbers(3, 4, 2, seed=1)
    ours = gradients(torch.linalg.solve, A.to(device), B.to(device))
    theirs = gradients(torch.linalg.solve, A.double(), B.double())
    error = max(map(error_of, ours, theirs))
    # Two solutions of systems with n = 4 whose condition is below 3, each of 16 n roundings.
    return Deviation(error, 2 * 16 * 4 * 3 * _EPS)


_EPS = torch.finfo(torch.float32).eps


def layer_norm_gradients(device: str) -> Deviation:
    x, weight, bias = numbers(64, 32), numbers(32, seed=1), numbers(32, seed=2)
    direction = numbers(64, 32, seed=3)

    def of_parameters(device, dtype):
        frozen, factors = x.to(device, dtype), direction.to(device, dtype)
        parameters = weight.to(device, dtype), bias.to(device, dtype)
        return gradients(lambda w, b: F.layer_norm(frozen, (32,), w, b) * factors, *parameters)

    error = max(map(error_of, of_parameters(device, torch.float32), of_parameters("cpu", torch.float64)))
    return Deviation(error, 4 * 64 * _EPS)  # sums of 64 terms of numbers that have some roundings each


def batch_norm_gradients(device: str) -> Deviation:
    x, direction = numbers(4, 3, 8, 8), numbers(4, 3, 8, 8, seed=1)
    weight, bias = numbers(3, seed=2), numbers(3, seed=3)

    def of_all(device, dtype):
        channels_last = x.to(device, dtype).to(memory_format=torch.channels_last)
        tensors = channels_last, weight.to(device, dtype), bias.to(device, dtype)
        factors = direction.to(device, dtype)
        return gradients(lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True) * factors, *tensors)

    error = max(map(error_of, of_all(device, torch.float32), of_all("cpu", torch.float64)))
    return Deviation(error, 4 * 256 * _EPS)  # sums of 256 terms


def convolution_with_a_slice(device: str) -> Deviation:
    x, weight = whole_numbers(2, 128, 16, 16), whole_numbers(3, 128, 3, 3, 3, seed=1)
    result = F.conv2d(x.to(device), weight.to(device)[:, :, 1])
    return Deviation(error_of(result, F.conv2d(x, weight[:, :, 1].contiguous())), 0.0)  # sums of 1,152 whole numbers


def lstm_gradients(device: str) -> Deviation:
    lstm = torch.nn.LSTM(4, 4, num_layers=2, dropout=0.5)
    with torch.no_grad():
        for seed, parameter in enumerate(lstm.parameters()):
            parameter.copy_(numbers(*parameter.shape, seed=seed) / 2)
    lstm.to(device)
    x, direction = numbers(3, 2, 4, seed=20).to(device), numbers(3, 2, 4, seed=21).to(device)

    def loss(x):
        torch.manual_seed(42)  # the same mask in each call
        return lstm(x)[0].sum()

    [gradient] = gradients(loss, x)
    step = 1e-2
    with torch.no_grad():
        difference = ((loss(x + step * direction) - loss(x - step * direction)) / (2 * step)).cpu()
    # Differences of sums of 24 outputs below 1 have an error of 24 eps / step, and of step² times a third derivative,
    # which is below the sum of |direction|³, about 50: both are below a hundredth of the derivative's scale, |g| |d|.
    scale = (gradient.norm() * direction.norm()).cpu()
    return Deviation(((gradient * direction).sum().cpu() - difference).abs().div(scale).item(), 0.02)


def checkpointed_dropout(device: str) -> Deviation:
    x = torch.ones(4096, device=device, requires_grad=True)
    y = checkpoint(lambda x: F.dropout(x, 0.5), x, use_reentrant=False)
    [gradient] = torch.autograd.grad(y.sum(), x)
    return Deviation(error_of(gradient, y), 0.0)  # each is 0 where the mask is, and otherwise 2


def scalar_views(device: str) -> Deviation:
    scalars, x = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([8.0, 16.0, -4.0])
    errors = []
    for function in (operator.add, operator.sub, operator.mul, operator.truediv):
        for scalar in scalars:
            expected = function(x, scalar.item())
            errors.append(error_of(function(x.to(device), scalar), expected))
        errors.append(error_of(function(scalars[2], x.to(device)), function(scalars[2], x)))
    return Deviation(max(errors), 0.0)  # powers of two and their sums are exact


def bool_views(device: str) -> Deviation:
    def after(device, name, offset):
        everything = torch.zeros(16, dtype=torch.bool, device=device)
        view = everything.narrow(0, offset, 8)
        places = torch.tensor([0, 2], device=device)
        ones = torch.ones(2, dtype=torch.bool, device=device)
        if name == "index_put_":
            view.index_put_((places,), ones, accumulate=True)
        else:
            getattr(view, name)(0, places, ones)
        return everything

    errors = [
        error_of(after(device, name, offset), after("cpu", name, offset))
        for name in ("scatter_add_", "index_add_", "index_put_")
        for offset in (1, 2, 3)
    ]
    return Deviation(max(errors), 0.0)


def sorted_columns(device: str) -> Deviation:
    x = numbers(3, 2**22 + 1)
    order = x.to(device).argsort(dim=0).cpu()
    values = x.gather(0, order)
    wrong = (values[1:] < values[:-1]).any(0) | (order.sum(0) != 3)
    return Deviation(wrong.sum().item() / wrong.numel(), 0.0)


def unique_inverse(device: str) -> Deviation:
    generator = torch.Generator().manual_seed(0)
    keys = 2**28 + torch.randint(0, 4096, (2**17,), generator=generator, device="cpu")
    unique, inverse = torch.unique(keys.to(device), return_inverse=True)
    wrong = unique.cpu()[inverse.cpu()] != keys
    return Deviation(wrong.sum().item() / wrong.numel(), 0.0)
