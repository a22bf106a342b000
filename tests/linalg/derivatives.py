"""Derivatives of several orders, for a comparison with those of PyTorch's functions."""

import torch


def derivatives(function, tensors, orders, parts=None):
    """Gradients of random linear functions of the results in `parts` (of all that have a gradient), then of those
    gradients and so on."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    results = function(*leaves)
    results = (results,) if isinstance(results, torch.Tensor) else results
    values = [result for result in results if result.requires_grad] if parts is None else [results[i] for i in parts]
    found = []
    for order in range(orders):
        directions = [
            torch.randn(v.shape, generator=torch.Generator().manual_seed(10 * order + i)).to(v)
            for i, v in enumerate(values)
        ]
        values = torch.autograd.grad(values, leaves, directions, create_graph=order + 1 < orders)
        found += [value.detach() for value in values]
    return found
