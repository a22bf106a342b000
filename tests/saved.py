"""Calls whose arguments or results a program changes in place between the forward and the backward pass."""

import warnings

import torch


class Call:
    """A call of an op, or of another function, with a sample's arguments. None of these is a leaf."""

    def __init__(self, op, sample, device, dtype, function=None):
        self.leaves = [tensor.requires_grad_() for tensor in sample.make(device, dtype)]
        given = sample.arguments(*(leaf * 1 for leaf in self.leaves))
        self.given = [value.clone() if isinstance(value, torch.Tensor) else value for value in given]
        torch.manual_seed(0)  # some ops draw random numbers
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            returned = op.call(function or op.function, *self.given, **sample.options)
        self.outputs = [returned] if isinstance(returned, torch.Tensor) else list(returned)
        results = [result for result in op.results(returned) if result.requires_grad]
        # The sum saves the constant factors alone.
        self.total = sum(
            (result * torch.linspace(1, 2, result.numel()).view(result.shape).to(result)).sum().real
            for result in results
        )

    def tensors(self):
        return [value for value in (*self.given, *self.outputs) if isinstance(value, torch.Tensor)]

    def gradients(self):
        found = torch.autograd.grad(self.total, self.leaves, allow_unused=True)
        return [gradient for gradient in found if gradient is not None]


def changed(make, which):
    """The gradients where one tensor was changed after the forward pass, or None where that is an error."""
    call = make()
    tensor = call.tensors()[which]
    with torch.no_grad():
        tensor.mul_(3) if tensor.is_floating_point() or tensor.is_complex() else tensor.zero_()
    try:
        return call.gradients()
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        return None
