"""What sections of every_kernel.py are given."""

import contextlib

import torch

from metalcore import _C


def random(device, dtype, *shape):
    return torch.randn(shape).to(device=device, dtype=dtype)


@contextlib.contextmanager
def measured(device, *values):
    """Inside, plans have these numbers: (table, field, numbers)."""
    kind = "mps" if device == "meta" else device
    _C.use_measured(kind, _C.gpu_family(kind), list(values))
    try:
        yield
    finally:
        _C.use_measured(kind, "", [])


def with_gradients(what, function, *inputs):
    inputs = [tensor.requires_grad_() for tensor in inputs]
    outputs = function(*inputs)
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    directions = [random(tensor.device, tensor.dtype, *tensor.shape) for tensor in outputs]
    for tensor in (*outputs, *torch.autograd.grad(outputs, inputs, directions)):
        yield what, tensor.detach()
