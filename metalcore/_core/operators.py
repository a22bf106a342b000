"""How the operators metalcore::<name> are registered.

csrc/ops defines them, with their kernels for the backends' devices. Python adds the rest with `cpu_kernel`,
`fake_kernel` and `autograd`, so that torch.compile, export, opcheck and CPU tensors work.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch._C._functorch import unwrap_if_dead as _unwrap_if_dead  # a tensor that outlived its transform
from torch.compiler import is_compiling

from .. import _C
from . import generated, refused
from .routing import DEVICES

__all__ = ["autograd", "composed_kernel", "cpu_kernel", "fake_kernel", "needs_gradient", "ops"]

ops = torch.ops.metalcore

# What torch.library.register_autograd itself is made of.
_after_autograd = torch._C._after_autograd_keyset
_any_requires_grad = torch._C._any_requires_grad
_is_grad_enabled = torch._C.is_grad_enabled
_is_tracing = torch._C._is_tracing  # torch.jit.trace
_is_autocast_enabled = torch.is_autocast_enabled
_DisableAutocast = torch._C._DisableAutocast
_AUTOGRAD = torch._C.DispatchKey.AutogradFunctionality
_exclude = torch._C._dispatch_tls_set_dispatch_key_excluded
_is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
_transforms_active = torch._C._are_functorch_transforms_active

if "cuda" in DEVICES:

    def _compile_for_cuda(capability, requests):
        from ..msl import cuda  # not before a kernel is needed

        programs = [(generated.cuda_number(kernel) or number, kernel, layout) for number, kernel, layout in requests]
        return cuda.compile_kernels(capability, programs)

    _C.cuda_set_compiler(_compile_for_cuda)

_library = torch.library.Library("metalcore", "FRAGMENT")


def cpu_kernel(name):
    """Registers the decorated function as the operator's kernel for CPU tensors, in terms of PyTorch's ops. It also
    takes the tensors of a GPU that refuses the operator's kernels: so it is written for any device."""

    def register(kernel):
        _library.impl(name, kernel, "CPU")
        refused.define(name, kernel)
        return kernel

    return register


def composed_kernel(name):
    """Registers the decorated function as the operator's kernel for every device. It is made of other operators."""

    def register(kernel):
        _library.impl(name, kernel, "CompositeExplicitAutograd")
        return kernel

    return register


def fake_kernel(name):
    """Registers the decorated function, which makes outputs without computing them, for tracing and meta tensors."""

    def register(kernel):
        @functools.wraps(kernel)
        def checked(*inputs, **options):
            _check_one_device(name, inputs)
            return kernel(*inputs, **options)

        torch.library.register_fake(f"metalcore::{name}", checked, lib=_library)
        return kernel

    return register


def _check_one_device(name, inputs):
    """A meta tensor among others brings a call here, whose result would be memory that nobody has written."""
    devices = {str(tensor.device) for tensor in inputs if isinstance(tensor, Tensor)}
    if len(devices) > 1:
        raise RuntimeError(f"metalcore::{name}: tensors must be on one device, not on {' and '.join(sorted(devices))}")


def needs_gradient(A) -> bool:
    """Whether autograd will ask for A's derivative, so that a function has to compute what that needs."""
    return torch.is_grad_enabled() and A.requires_grad


def _below_autograd(function, *inputs):
    """Calls the function where operators' derivatives are not looked for: what torch._C._AutoDispatchBelowAutograd is
    for, at half of its cost."""
    if _is_excluded(_AUTOGRAD):
        return function(*inputs)
    try:
        _exclude(_AUTOGRAD, True)
        return function(*inputs)
    finally:
        _exclude(_AUTOGRAD, False)


def autograd(name, backward, setup_context):
    """Registers the operator's derivative: `setup_context(ctx, inputs, output)` and `backward(ctx, *grads)`.

    What torch.library.register_autograd does, at two thirds of its cost per call: no keyword-only arguments, no
    defaults in the schema, no lists of tensors.

    Returns:
        a function that calls the operator on accelerated() inputs; where no compiler is tracing it does without the
        way through the dispatcher to `kernel` below, and without Python's layers over PyTorch's C++, which takes
        another third off.
    """
    op = getattr(ops, name).default
    redispatch = op.redispatch
    direct = op._op  # what op() calls

    class Derivative(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs_and_keyset):
            *inputs, keyset = inputs_and_keyset
            if keyset is None:
                output = _below_autograd(direct, *inputs)
            else:
                output = _below_autograd(redispatch, keyset, *inputs)
            setup_context(ctx, inputs, output)
            return output

        @staticmethod
        def backward(ctx, *grads):
            if any(map(_is_autocast_enabled, DEVICES)):  # it would have the formula's products in 16 bits
                with _DisableAutocast():
                    found = backward(ctx, *grads)
            else:
                found = backward(ctx, *grads)
            return (*found, None) if isinstance(found, tuple) else (found, None)

    Derivative.__name__ = Derivative.__qualname__ = f"metalcore_{name}"
    apply = Derivative.apply
    # What that comes to where no torch.func transform is active.
    plain_apply = super(torch.autograd.Function, Derivative).apply  # pyright: ignore[reportAttributeAccessIssue]

    def kernel(keyset, *inputs):
        keyset = keyset & _after_autograd
        if _is_grad_enabled() and _any_requires_grad(*inputs):
            return apply(*inputs, keyset)
        return _below_autograd(redispatch, keyset, *inputs)

    _library.impl(name, kernel, "Autograd", with_keyset=True)

    def call(*inputs):
        if is_compiling() or _transforms_active():
            return op(*inputs)
        if _is_grad_enabled() and _any_requires_grad(*inputs):
            if _is_tracing():
                return op(*inputs)
            return plain_apply(*[_unwrap_if_dead(i) if isinstance(i, Tensor) else i for i in inputs], None)
        return _below_autograd(direct, *inputs)

    return call
