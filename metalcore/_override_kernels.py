"""The kernels that metalcore.overrides puts into PyTorch's dispatcher: metalcore's op if it takes the input, else the
kernel that was there before.

An operator's kernel is made of the kernel that was there, the count to go by, and `left`, which counts and runs what was
there. They call the operators `metalcore::…`, never metalcore's public functions, which would send what they do not take
to the PyTorch function that is being overridden.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from ._core.operators import ops
from ._core.routing import FLOAT_DTYPES, accelerated
from ._linalg_override_kernels import DTYPES as LINALG_DTYPES
from ._linalg_override_kernels import OPERATORS as LINALG_OPERATORS
from ._report import count_of
from .normalization import _EPS, _fits

__all__ = ["OPERATORS", "install", "remove"]


def _silu(previous, count, left):
    def kernel(keyset, x):
        if not accelerated(x):
            return left(keyset, x)
        count.ran += 1
        return ops.silu(x)

    return kernel


def _silu_backward(previous, count, left):
    def kernel(keyset, grad, x):
        if not _alike(grad, x):
            return left(keyset, grad, x)
        count.ran += 1
        return ops.silu_backward(grad, x)

    return kernel


def _gelu(previous, count, left):
    def kernel(keyset, x, *, approximate="none"):
        if not accelerated(x) or approximate not in ("none", "tanh"):
            return left(keyset, x, approximate=approximate)
        count.ran += 1
        return ops.gelu(x, approximate)

    return kernel


def _gelu_backward(previous, count, left):
    def kernel(keyset, grad, x, *, approximate="none"):
        if not _alike(grad, x) or approximate not in ("none", "tanh"):
            return left(keyset, grad, x, approximate=approximate)
        count.ran += 1
        return ops.gelu_backward(grad, x, approximate)

    return kernel


def _softmax_of(op):
    def make(previous, count, left):
        def kernel(keyset, x, dim, half_to_float):
            if not accelerated(x) or not -x.dim() <= dim < max(x.dim(), 1):
                return left(keyset, x, dim, half_to_float)
            count.ran += 1
            return op(x, dim, half_to_float)

        return kernel

    return make


def _softmax_backward_of(op):
    def make(previous, count, left):
        def kernel(keyset, grad, output, dim, input_dtype):
            if not _alike(grad, output):
                return left(keyset, grad, output, dim, input_dtype)
            count.ran += 1
            return op(grad, output, dim, input_dtype)

        return kernel

    return make


def _rms_norm(previous, count, left):
    def kernel(keyset, x, normalized_shape, weight=None, eps=None):
        if not (_is_plain(x) and _is_plain(weight) and _alike(x, weight) and _fits(x, normalized_shape, weight)):
            return left(keyset, x, normalized_shape, weight, eps)
        count.ran += 1
        return ops.rms_norm(x, len(normalized_shape), weight, _EPS if eps is None else eps)

    return kernel


# override -> what it registers: (operator, whether at the autograd key, maker of the kernel)
OPERATORS = {
    "silu": [("silu", False, _silu), ("silu_backward", False, _silu_backward)],
    "gelu": [("gelu", False, _gelu), ("gelu_backward", False, _gelu_backward)],
    "softmax": [
        ("_softmax", False, _softmax_of(ops.softmax)),
        ("_softmax_backward_data", False, _softmax_backward_of(ops.softmax_backward)),
    ],
    "log_softmax": [
        ("_log_softmax", False, _softmax_of(ops.log_softmax)),
        ("_log_softmax_backward_data", False, _softmax_backward_of(ops.log_softmax_backward)),
    ],
    "rms_norm": [("rms_norm", True, _rms_norm), ("rms_norm", False, _rms_norm)],
    **LINALG_OPERATORS,
}


def install(name, device):
    """Registers an override's kernels for a device type; what it returns holds them."""
    # All looked up first: with a kernel at one key, PyTorch would compute another answer for the next.
    found = [
        (operator, key, make, torch.library.get_kernel(f"aten::{operator}", key))
        for operator, at_autograd, make in OPERATORS[name]
        for key in [("Autograd" if at_autograd else "") + device.upper()]
    ]
    library = torch.library.Library("aten", "IMPL")
    dtypes = LINALG_DTYPES if name in LINALG_OPERATORS else FLOAT_DTYPES
    with warnings.catch_warnings():
        # Some versions of PyTorch warn of the first override of a process. It is what was asked for.
        warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
        for operator, key, make, previous in found:
            count = count_of(name, f"aten::{operator} on {device}")
            library.impl(operator, make(previous, count, _left(previous, count, dtypes)), key, with_keyset=True)
    _forget_resolved(name)
    return library


def remove(name, library):
    """Takes an override's kernels out again; PyTorch's dispatcher goes back to what it had."""
    library._destroy()
    _forget_resolved(name)


def _left(previous, count, dtypes):
    def left(keyset, *args, **kwargs):
        count.left[_why_left(args, dtypes)] += 1
        return previous.call_boxed(keyset, *args, **kwargs)

    return left


def _why_left(args, dtypes):
    """Why metalcore did not take these arguments of an operator, in words."""
    tensors = [value for value in args if isinstance(value, Tensor)]
    for tensor in tensors:
        if tensor.dtype not in dtypes:
            return f"{str(tensor.dtype).removeprefix('torch.')}, which its kernels do not take"
        if tensor.layout is not torch.strided:
            return "a layout that its kernels do not take"
        if not _is_plain(tensor):
            return "tensors that stand for others, as in a trace"
    if tensors and not accelerated(*tensors, dtypes=dtypes):
        return "torch.func transforms, forward-mode derivatives, or tensors of several devices"
    if len({tensor.dtype for tensor in tensors}) > 1:
        return "tensors of several dtypes"
    return "shapes or options that its kernels do not take"


def _alike(*tensors):
    return accelerated(*tensors) and len({tensor.dtype for tensor in tensors if tensor is not None}) == 1


def _is_plain(tensor):
    """Not one of the tensors that stand for others while a function is traced."""
    return tensor is None or type(tensor) in (torch.Tensor, torch.nn.Parameter)


def _forget_resolved(name):
    # Tracing resolves an operator's kernel in Python and remembers it; registering from Python does not reset that.
    for operator, _, _ in OPERATORS[name]:
        getattr(torch.ops.aten, operator).default._dispatch_cache.clear()
