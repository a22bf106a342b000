"""What the Python side of every op shares: which calls metalcore takes, and how its ops are registered.

An op has one module, which follows `metalcore/activation.py`:

- the public function takes the call when `accelerated(...)` says so, and gives everything else to PyTorch's own op;
- the operator `metalcore::<name>` is defined in csrc/ops, which has its kernel for the backends' devices. Python adds
  the rest with `cpu_kernel`, `fake_kernel` and `autograd`, so that torch.compile, export, opcheck and CPU tensors work.
"""

from __future__ import annotations

import functools
import os

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from . import _C

ops = torch.ops.metalcore

# What torch.library.register_autograd itself is made of.
_BelowAutograd = torch._C._AutoDispatchBelowAutograd
_after_autograd = torch._C._after_autograd_keyset
_any_requires_grad = torch._C._any_requires_grad
_is_grad_enabled = torch._C.is_grad_enabled
_is_tracing = torch._C._is_tracing  # torch.jit.trace
_is_autocast_enabled = torch.is_autocast_enabled
_DisableAutocast = torch._C._DisableAutocast
_transforms_active = torch._C._are_functorch_transforms_active
_unwrap_if_dead = torch._C._functorch.unwrap_if_dead  # a tensor that outlived its torch.func transform

FLOAT_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})
_strided = torch.strided


def _simulator_has_kernels():
    """Whether the built-in kernels are there for this CPU; METALCORE_ISA leaves them out of a build."""
    if not hasattr(_C, "simulator_info"):
        return False
    found = _C.simulator_info()
    return os.path.isdir(os.path.join(found["library_path"], found["isa"]))


# Where a backend can run the kernels: a Mac's `mps` or the simulator's, and `cuda` where PyTorch has CUDA.
_BACKENDS = {
    "mps": hasattr(_C, "mps_kernels") or _simulator_has_kernels(),
    "cuda": hasattr(_C, "cuda_dispatch") and torch.version.cuda,
}
DEVICES = frozenset(device for device, is_there in _BACKENDS.items() if is_there)
_MPS, _CUDA = "mps" in DEVICES, "cuda" in DEVICES

if "cuda" in DEVICES:

    def _compile_for_cuda(capability, requests):
        from .msl import cuda  # not before a kernel is needed

        return cuda.compile_kernels(capability, requests)

    _C.cuda_set_compiler(_compile_for_cuda)


def accelerated(*tensors, dtypes=FLOAT_DTYPES) -> bool:
    """Whether metalcore's kernels can take these arguments: strided tensors of a supported dtype, all on one supported
    device. None after the first stands for an argument that was left out. Inside torch.func transforms (vmap, grad,
    jvp …) and where forward-mode derivatives are taken PyTorch's own ops are the ones that know what to do."""
    if _transforms_active() or forward_ad._current_level >= 0:
        return False
    first = None
    for tensor in tensors:
        if tensor is None and first is not None:
            continue
        if not isinstance(tensor, Tensor) or tensor.dtype not in dtypes or tensor.layout is not _strided:
            return False
        if first is None:
            first = tensor
            if not (_CUDA and tensor.is_cuda or _MPS and tensor.is_mps):  # device.type costs six times as much
                return False
        elif tensor.device != first.device:
            return False
    return True


# Tensors of up to so many elements never have more rows, or longer ones, than kernels count.
COUNTED = 2**31 - 1


def too_many(x, length) -> bool:
    """Whether x, as rows of `length` elements, has more of them, or longer ones, than kernels count."""
    return length > COUNTED or x.numel() // max(length, 1) > 2 * COUNTED + 1


# What torch.autocast computes in float32, where this version of PyTorch has a rule for it.
_AUTOCAST_TO_FLOAT32 = frozenset(
    (name, device)
    for name, operator in {"softmax": "softmax.int", "log_softmax": "log_softmax.int", "rms_norm": "rms_norm"}.items()
    for device in ("mps", "cuda")
    if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{operator}", f"Autocast{device.upper()}")
)


def autocast_to_float32(name, x) -> bool:
    """Whether PyTorch's op of this name would take a 16-bit x as float32, because autocast is on."""
    if x.dtype is torch.float32:
        return False
    device = "cuda" if x.is_cuda else "mps"
    return torch.is_autocast_enabled(device) and (name, device) in _AUTOCAST_TO_FLOAT32


_library = torch.library.Library("metalcore", "FRAGMENT")


def cpu_kernel(name):
    """Registers the decorated function as the operator's kernel for CPU tensors, in terms of PyTorch's ops."""

    def register(kernel):
        _library.impl(name, kernel, "CPU")
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
            with _BelowAutograd():
                output = direct(*inputs) if keyset is None else redispatch(keyset, *inputs)
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
    plain_apply = super(torch.autograd.Function, Derivative).apply

    def kernel(keyset, *inputs):
        keyset = keyset & _after_autograd
        if _is_grad_enabled() and _any_requires_grad(*inputs):
            return apply(*inputs, keyset)
        with _BelowAutograd():
            return redispatch(keyset, *inputs)

    _library.impl(name, kernel, "Autograd", with_keyset=True)

    def call(*inputs):
        if is_compiling() or _is_tracing():
            return op(*inputs)
        if _is_grad_enabled() and _any_requires_grad(*inputs):
            return plain_apply(*[_unwrap_if_dead(i) if isinstance(i, Tensor) else i for i in inputs], None)
        with _BelowAutograd():
            return direct(*inputs)

    return call
