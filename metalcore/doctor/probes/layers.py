"""Probes of layers and of training."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from . import Found, error_of, gradients, numbers, whole_numbers

__all__ = [
    "batch_norm_gradients",
    "checkpointed_dropout",
    "convolution_with_a_slice",
    "layer_norm_gradients",
    "lstm_gradients",
]

_EPS = torch.finfo(torch.float32).eps


def layer_norm_gradients(device: str) -> Found:
    x, weight, bias = numbers(64, 32), numbers(32, seed=1), numbers(32, seed=2)
    direction = numbers(64, 32, seed=3)

    def of_parameters(device, dtype):
        frozen, factors = x.to(device, dtype), direction.to(device, dtype)
        parameters = weight.to(device, dtype), bias.to(device, dtype)
        return gradients(lambda w, b: F.layer_norm(frozen, (32,), w, b) * factors, *parameters)

    error = max(map(error_of, of_parameters(device, torch.float32), of_parameters("cpu", torch.float64)))
    return Found(error, 4 * 64 * _EPS)  # sums of 64 terms of numbers that have some roundings each


def batch_norm_gradients(device: str) -> Found:
    x, direction = numbers(4, 3, 8, 8), numbers(4, 3, 8, 8, seed=1)
    weight, bias = numbers(3, seed=2), numbers(3, seed=3)

    def of_all(device, dtype):
        channels_last = x.to(device, dtype).to(memory_format=torch.channels_last)
        tensors = channels_last, weight.to(device, dtype), bias.to(device, dtype)
        factors = direction.to(device, dtype)
        return gradients(lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True) * factors, *tensors)

    error = max(map(error_of, of_all(device, torch.float32), of_all("cpu", torch.float64)))
    return Found(error, 4 * 256 * _EPS)  # sums of 256 terms


def convolution_with_a_slice(device: str) -> Found:
    x, weight = whole_numbers(2, 128, 16, 16), whole_numbers(3, 128, 3, 3, 3, seed=1)
    result = F.conv2d(x.to(device), weight.to(device)[:, :, 1])
    return Found(error_of(result, F.conv2d(x, weight[:, :, 1].contiguous())), 0.0)  # sums of 1,152 whole numbers


def lstm_gradients(device: str) -> Found:
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
    return Found(((gradient * direction).sum().cpu() - difference).abs().div(scale).item(), 0.02)


def checkpointed_dropout(device: str) -> Found:
    x = torch.ones(4096, device=device, requires_grad=True)
    y = checkpoint(lambda x: F.dropout(x, 0.5), x, use_reentrant=False)
    [gradient] = torch.autograd.grad(y.sum(), x)
    return Found(error_of(gradient, y), 0.0)  # each is 0 where the mask is, and otherwise 2
