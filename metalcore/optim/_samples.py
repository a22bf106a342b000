"""How the registry runs an optimizer, or its reference, on sample tensors."""

from __future__ import annotations

import torch

__all__ = ["steps_of"]

STEPS = 3


def steps_of(states):
    """Returns a function for Op.call: the parameters, and the entries `states` of their state, after three steps.

    The first half of its tensors are the parameters, and the second half their gradients, which differ from step to
    step."""

    def run(optimizer, *tensors, **options):
        half = len(tensors) // 2
        params = [torch.nn.Parameter(tensor.detach().clone()) for tensor in tensors[:half]]
        instance = optimizer(params, **options)
        for step in range(STEPS):
            for param, grad in zip(params, tensors[half:]):
                param.grad = (grad * 2**step).roll(step)  # exact in every dtype
            instance.step()
        entries = [instance.state[param][name] for param in params for name in states if name in instance.state[param]]
        return [param.detach() for param in params] + entries

    return run
