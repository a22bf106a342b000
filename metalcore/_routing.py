"""What the Python side of every op shares: which calls metalcore takes, and how its ops are registered.

An op has one module, which follows `metalcore/activation.py`:

- the public function takes the call when `accelerated(...)` says so, and gives everything else to PyTorch's own op;
- the operator `metalcore::<name>` is defined in csrc/ops and has an MPS kernel there. Python adds the rest with
  `cpu_kernel`, `fake_kernel` and `autograd`, so that torch.compile, export, opcheck and CPU tensors work.
"""

from __future__ import annotations

import torch

ops = torch.ops.metalcore

FLOAT_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})
DEVICES = frozenset({"mps"})


def accelerated(*tensors, dtypes=FLOAT_DTYPES) -> bool:
    """Whether metalcore's kernels can take these arguments: strided tensors of a supported dtype, all on one supported
    device. None among the tensors stands for an argument that was left out."""
    device = None
    for tensor in tensors:
        if tensor is None:
            continue
        if not isinstance(tensor, torch.Tensor) or tensor.dtype not in dtypes or tensor.layout is not torch.strided:
            return False
        if device is None:
            device = tensor.device
            if device.type not in DEVICES:
                return False
        elif tensor.device != device:
            return False
    return device is not None


def cpu_kernel(name):
    """Registers the decorated function as the operator's kernel for CPU tensors, in terms of PyTorch's ops."""
    return torch.library.impl(f"metalcore::{name}", "CPU")


def fake_kernel(name):
    """Registers the decorated function, which makes outputs without computing them, for tracing."""
    return torch.library.register_fake(f"metalcore::{name}")


def autograd(name, backward, setup_context):
    """Registers the operator's derivative: `setup_context(ctx, inputs, output)` and `backward(ctx, *grads)`."""
    torch.library.register_autograd(f"metalcore::{name}", backward, setup_context=setup_context)
