"""How the operators metalcore::<name> are registered.

csrc/ops defines them, with their kernels for the backends' devices. Python adds the rest with `cpu_kernel`,
`fake_kernel` and `autograd`, so that torch.compile, export, opcheck and CPU tensors work.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import unwrap_if_dead as _unwrap_if_dead  # a tensor that outlived its transform
from torch.compiler import is_dynamo_compiling

from .. import _C
from . import generated_kernels, refused
from .routing import DEVICES

__all__ = [
    "autograd",
    "composed_kernel",
    "cpu_kernel",
    "derive",
    "differentiating",
    "fake_kernel",
    "needs_gradient",
    "ops",
    "plain_operator",
    "without_derivative",
]

ops = torch.ops.metalcore

# What torch.library.register_autograd itself is made of.
_after_autograd = torch._C._after_autograd_keyset
_any_requires_grad = torch._C._any_requires_grad
_is_grad_enabled = torch._C.is_grad_enabled
_is_tracing = torch._C._is_tracing  # torch.jit.trace
_DisableAutocast = torch._C._DisableAutocast
_AUTOGRAD = torch._C.DispatchKey.AutogradFunctionality
_AUTOCAST = [torch._C._dispatch_key_parse(f"Autocast{device.upper()}") for device in sorted(DEVICES)]
_exclude = torch._C._dispatch_tls_set_dispatch_key_excluded
_is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
_transforms_active = torch._C._are_functorch_transforms_active
_compiler = torch.compiler
_VALUES = torch.Tensor, torch.nn.Parameter

if "cuda" in DEVICES:

    def _compile_for_cuda(capability, requests):
        from ..msl.nvidia import cuda  # not before a kernel is needed

        programs = [
            (generated_kernels.cuda_number(kernel) or number, kernel, layout) for number, kernel, layout in requests
        ]
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
    """Refuses tensors of several devices. A meta tensor among others brings a call here, whose result would be
    memory that nobody has written."""
    devices = {str(tensor.device) for tensor in inputs if isinstance(tensor, Tensor)}
    if len(devices) > 1:
        raise RuntimeError(f"metalcore::{name}: tensors must be on one device, not on {' and '.join(sorted(devices))}")


def needs_gradient(A) -> bool:
    """Returns whether autograd will ask for A's derivative, so that a function has to compute what that needs."""
    return torch.is_grad_enabled() and A.requires_grad


def _below_autograd(function):
    """Returns the function, called where operators' derivatives are not looked for: what
    torch._C._AutoDispatchBelowAutograd is for, at half of its cost. Its callers are above autograd."""

    def call(*inputs):
        try:
            _exclude(_AUTOGRAD, True)
            return function(*inputs)
        finally:
            _exclude(_AUTOGRAD, False)

    return call


def without_derivative(name):
    """Returns the operator as a function of inputs from which no gradient is asked. Where nothing is traced it calls
    neither Python's layers over PyTorch's C++ nor what looks for derivatives."""
    op = getattr(ops, name).default
    run = _below_autograd(op._op)

    def call(*inputs):
        if is_dynamo_compiling() or _compiler._is_compiling_flag or _transforms_active() or _is_excluded(_AUTOGRAD):
            return op(*inputs)
        return run(*inputs)

    return call


def plain_operator(name, function):
    """Registers `function`, of other operators, as what calls with a gradient come to, for an operator that makes
    nothing for a derivative. Both have the same results.

    Returns:
        a function that calls the operator on accelerated() inputs where nobody asks a gradient and nothing is traced,
        and `function` elsewhere.
    """
    op = getattr(ops, name).default
    run, redispatch = _below_autograd(op._op), _below_autograd(op.redispatch)

    def kernel(keyset, *inputs):
        if _is_grad_enabled() and _any_requires_grad(*inputs):
            return function(*inputs)
        return redispatch(keyset & _after_autograd, *inputs)

    _library.impl(name, kernel, "Autograd", with_keyset=True)

    def call(*inputs):
        if (
            type(inputs[0]) not in _VALUES  # a tensor that stands for another in a trace
            or is_dynamo_compiling()
            or _compiler._is_compiling_flag
            or _transforms_active()
            or _is_excluded(_AUTOGRAD)
            or _is_tracing()
            or _is_grad_enabled()
            and _any_requires_grad(*inputs)
        ):
            return function(*inputs)
        return run(*inputs)

    return call


@contextlib.contextmanager
def differentiating():
    """Lets PyTorch record a graph, also below autograd, where a kernel in Python computes derivatives by it."""
    excluded = _is_excluded(_AUTOGRAD)
    _exclude(_AUTOGRAD, False)
    try:
        with torch.enable_grad():
            yield
    finally:
        _exclude(_AUTOGRAD, excluded)


def autograd(name, backward, setup_context, results=None):
    """Registers the operator's derivative: `setup_context(ctx, inputs, output)` and `backward(ctx, *grads)`.

    What torch.library.register_autograd does, at two thirds of its cost per call: no keyword-only arguments, no
    defaults in the schema, no lists of tensors.

    Args:
        results: how many of the operator's outputs are results, whose gradients `backward` gets; each may be None. The
            others are there to be saved for it. By default all are results, and no gradient is None.

    Returns:
        a function that calls the operator on accelerated() inputs, and returns the results. Where no compiler is
        tracing it calls neither `kernel` below, by way of the dispatcher, nor Python's layers over PyTorch's C++. That
        takes off another half.
    """
    op = getattr(ops, name).default
    direct = op._op  # what op() calls
    run, redispatch = _below_autograd(direct), _below_autograd(op.redispatch)
    chosen = None if results is None else 0 if results == 1 else slice(results)
    tensors = [i for i, a in enumerate(op._schema.arguments) if str(a.type) in ("Tensor", "Optional[Tensor]")]

    class Derivative(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            output = run(*inputs)
            setup_context(ctx, inputs, output)
            return output if chosen is None else output[chosen]

        @staticmethod
        def backward(ctx, *grads):
            if all(map(_is_excluded, _AUTOCAST)):
                return backward(ctx, *grads)
            with _DisableAutocast():  # autocast would have the formula's products in 16 bits
                return backward(ctx, *grads)

    class Redispatched(Derivative):
        """The derivative of a call that the dispatcher has brought this far. Its last input is the rest of its way."""

        @staticmethod
        def forward(ctx, *inputs_and_keyset):
            *inputs, keyset = inputs_and_keyset
            output = redispatch(keyset, *inputs)
            setup_context(ctx, inputs, output)
            if results is not None:
                ctx.mark_non_differentiable(*output[results:])
                ctx.set_materialize_grads(False)
            return output

        @staticmethod
        def backward(ctx, *grads):
            gradients = Derivative.backward(ctx, *grads[:results])
            return (*gradients, None) if isinstance(gradients, tuple) else (gradients, None)

    for function in (Derivative, Redispatched):
        function.__name__ = function.__qualname__ = f"metalcore_{name}"
        node: Any = function._backward_cls
        node.__name__ = node.__qualname__ = f"metalcore_{name}Backward"
        node.apply = function.backward  # what autograd calls is a layer of Python, which looks for vjp() as well
    # What Derivative.apply comes to where no torch.func transform is active.
    plain_apply = super(torch.autograd.Function, Derivative).apply  # pyright: ignore[reportAttributeAccessIssue]

    def kernel(keyset, *inputs):
        keyset = keyset & _after_autograd
        if _is_grad_enabled() and _any_requires_grad(*inputs):
            return Redispatched.apply(*inputs, keyset)
        return redispatch(keyset, *inputs)

    _library.impl(name, kernel, "Autograd", with_keyset=True)

    def call(*inputs):
        # The first two are what torch.compiler.is_compiling() finds with twice as many calls.
        if is_dynamo_compiling() or _compiler._is_compiling_flag or _transforms_active():
            output = op(*inputs)
        elif _is_excluded(_AUTOGRAD):
            output = direct(*inputs)
        elif not (differentiated := _is_grad_enabled() and _any_requires_grad(*inputs)) or _is_tracing():
            try:  # run(), without another call. torch.jit.trace compares two traces, one with gradients, by line.
                _exclude(_AUTOGRAD, not differentiated)
                output = direct(*inputs)
            finally:
                _exclude(_AUTOGRAD, False)
        else:
            for i in tensors:
                if inputs[i] is not None and _unwrap_if_dead(inputs[i]) is not inputs[i]:
                    return Derivative.apply(*inputs)
            return plain_apply(*inputs)
        return output if chosen is None else output[chosen]

    return call


def derive(
    function: Callable[..., Sequence[Tensor]], saved: Sequence[Tensor | None], cotangents: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Returns the gradients of a differentiable function's results, weighted by the cotangents, with respect to the
    tensors that autograd has saved. They have gradients themselves if autograd asks for them. Where a saved tensor
    needs none, there is None."""
    with torch.enable_grad():
        inputs = [None if tensor is None else tensor.view_as(tensor) for tensor in saved]
        outputs = function(*inputs)
    pairs = [(y, g) for y, g in zip(outputs, cotangents) if g is not None and y.requires_grad]
    wanted = [tensor for tensor in inputs if tensor is not None and tensor.requires_grad]
    if not pairs or not wanted:
        return [None] * len(inputs)
    gradients = iter(
        torch.autograd.grad(
            [y for y, _ in pairs],
            wanted,
            [g for _, g in pairs],
            create_graph=torch.is_grad_enabled(),
            allow_unused=True,
        )
    )
    return [next(gradients) if tensor is not None and tensor.requires_grad else None for tensor in inputs]
