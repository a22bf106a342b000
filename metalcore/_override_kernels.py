"""The kernels that metalcore.overrides puts into PyTorch's dispatcher: metalcore's op if it takes the input, else the
kernel that was there before.

Each override has functions with an operator's arguments, which return None for what they do not take. They call the
operators `metalcore::…`, never metalcore's public functions, which would send what they do not take to the PyTorch
function that is being overridden.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from ._linalg_override_kernels import OPERATORS as LINALG_OPERATORS
from ._linalg_override_kernels import outermost
from ._report import count_of
from ._routing import FLOAT_DTYPES, accelerated, ops
from .normalization import _EPS, _fits

__all__ = ["OPERATORS", "install", "remove"]


def _silu(x):
    return ops.silu(x) if accelerated(x) else None


def _silu_backward(grad, x):
    return ops.silu_backward(grad, x) if _alike(grad, x) else None


def _gelu(x, *, approximate="none"):
    return ops.gelu(x, approximate) if accelerated(x) and approximate in ("none", "tanh") else None


def _gelu_backward(grad, x, *, approximate="none"):
    if _alike(grad, x) and approximate in ("none", "tanh"):
        return ops.gelu_backward(grad, x, approximate)


def _softmax_of(op):
    def take(x, dim, half_to_float):
        if accelerated(x) and -x.dim() <= dim < max(x.dim(), 1):
            return op(x, dim, half_to_float)
    return take


def _softmax_backward_of(op):
    def take(grad, output, dim, input_dtype):
        return op(grad, output, dim, input_dtype) if _alike(grad, output) else None
    return take


def _rms_norm(x, normalized_shape, weight=None, eps=None):
    if _is_plain(x) and _is_plain(weight) and _alike(x, weight) and _fits(x, normalized_shape, weight):
        return ops.rms_norm(x, len(normalized_shape), weight, _EPS if eps is None else eps)


# override -> what it registers: (operator, whether at the autograd key, the function that takes its arguments)
OPERATORS = {
    "silu": [("silu", False, _silu), ("silu_backward", False, _silu_backward)],
    "gelu": [("gelu", False, _gelu), ("gelu_backward", False, _gelu_backward)],
    "softmax": [("_softmax", False, _softmax_of(ops.softmax)),
                ("_softmax_backward_data", False, _softmax_backward_of(ops.softmax_backward))],
    "log_softmax": [("_log_softmax", False, _softmax_of(ops.log_softmax)),
                    ("_log_softmax_backward_data", False, _softmax_backward_of(ops.log_softmax_backward))],
    "rms_norm": [("rms_norm", True, _rms_norm), ("rms_norm", False, _rms_norm)],
    **LINALG_OPERATORS,
}


def install(name, device):
    """Registers an override's kernels for a device type; what it returns holds them."""
    # All looked up first: with a kernel at one key, PyTorch would compute another answer for the next.
    found = [(operator, key, take, torch.library.get_kernel(f"aten::{operator}", key))
             for operator, at_autograd, take in OPERATORS[name]
             for key in [("Autograd" if at_autograd else "") + device.upper()]]
    library = torch.library.Library("aten", "IMPL")
    make = outermost if name in LINALG_OPERATORS else _kernel
    with warnings.catch_warnings():
        # Some versions of PyTorch warn of the first override of a process. It is what was asked for.
        warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
        for operator, key, take, previous in found:
            kernel = make(take, previous, count_of(name, f"aten::{operator} on {device}"), why_left)
            library.impl(operator, kernel, key, with_keyset=True)
    _forget_resolved(name)
    return library


def remove(name, library):
    """Takes an override's kernels out again; PyTorch's dispatcher goes back to what it had."""
    library._destroy()
    _forget_resolved(name)


def _kernel(take, previous, count, why_left):
    def kernel(keyset, *args, **kwargs):
        result = take(*args, **kwargs)
        if result is None:
            count.left[why_left(args)] += 1
            return previous.call_boxed(keyset, *args, **kwargs)
        count.ran += 1
        return result
    return kernel


def why_left(args, dtypes=FLOAT_DTYPES):
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
