"""Probes of elementwise operators, of indices and of sorting."""

from __future__ import annotations

import operator

import torch

from . import Found, error_of, numbers

__all__ = ["bool_views", "scalar_views", "sorted_columns", "unique_inverse"]


def scalar_views(device: str) -> Found:
    scalars, x = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([8.0, 16.0, -4.0])
    errors = []
    for function in (operator.add, operator.sub, operator.mul, operator.truediv):
        for scalar in scalars:
            expected = function(x, scalar.item())
            errors.append(error_of(function(x.to(device), scalar), expected))
        errors.append(error_of(function(scalars[2], x.to(device)), function(scalars[2], x)))
    return Found(max(errors), 0.0)  # powers of two and their sums are exact


def bool_views(device: str) -> Found:
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
    return Found(max(errors), 0.0)


def sorted_columns(device: str) -> Found:
    x = numbers(3, 2**22 + 1)
    order = x.to(device).argsort(dim=0).cpu()
    values = x.gather(0, order)
    wrong = (values[1:] < values[:-1]).any(0) | (order.sum(0) != 3)
    return Found(wrong.sum().item() / wrong.numel(), 0.0)


def unique_inverse(device: str) -> Found:
    generator = torch.Generator().manual_seed(0)
    keys = 2**28 + torch.randint(0, 4096, (2**17,), generator=generator, device="cpu")
    unique, inverse = torch.unique(keys.to(device), return_inverse=True)
    wrong = unique.cpu()[inverse.cpu()] != keys
    return Found(wrong.sum().item() / wrong.numel(), 0.0)
