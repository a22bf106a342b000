"""The kernels that metalcore.overrides puts into PyTorch's dispatcher: metalcore's op if it takes the input, else the
kernel that was there before.

They call the operators `metalcore::…`, never metalcore's public functions, which would send what they do not take to
the PyTorch function that is being overridden.
"""

from __future__ import annotations

import torch

from ._linalg_override_kernels import OPERATORS as LINALG_OPERATORS
from ._routing import accelerated, ops
from .normalization import _EPS, _fits

__all__ = ["OPERATORS", "install", "remove", "takes_parameters"]


def _silu(previous):
    def kernel(keyset, x):
        return ops.silu(x) if accelerated(x) else previous.call_boxed(keyset, x)
    return kernel


def _silu_backward(previous):
    def kernel(keyset, grad, x):
        return ops.silu_backward(grad, x) if _alike(grad, x) else previous.call_boxed(keyset, grad, x)
    return kernel


def _gelu(previous):
    def kernel(keyset, x, *, approximate="none"):
        if accelerated(x) and approximate in ("none", "tanh"):
            return ops.gelu(x, approximate)
        return previous.call_boxed(keyset, x, approximate=approximate)
    return kernel


def _gelu_backward(previous):
    def kernel(keyset, grad, x, *, approximate="none"):
        if _alike(grad, x) and approximate in ("none", "tanh"):
            return ops.gelu_backward(grad, x, approximate)
        return previous.call_boxed(keyset, grad, x, approximate=approximate)
    return kernel


def _softmax_of(op):
    def make(previous):
        def kernel(keyset, x, dim, half_to_float):
            if accelerated(x) and -x.dim() <= dim < max(x.dim(), 1):
                return op(x, dim, half_to_float)
            return previous.call_boxed(keyset, x, dim, half_to_float)
        return kernel
    return make


def _softmax_backward_of(op):
    def make(previous):
        def kernel(keyset, grad, output, dim, input_dtype):
            if _alike(grad, output):
                return op(grad, output, dim, input_dtype)
            return previous.call_boxed(keyset, grad, output, dim, input_dtype)
        return kernel
    return make


def _rms_norm(previous):
    def kernel(keyset, x, normalized_shape, weight=None, eps=None):
        if _is_plain(x) and _is_plain(weight) and _alike(x, weight) and _fits(x, normalized_shape, weight):
            return ops.rms_norm(x, len(normalized_shape), weight, _EPS if eps is None else eps)
        return previous.call_boxed(keyset, x, normalized_shape, weight, eps)
    return kernel


# override -> what it registers: (operator, whether at the autograd key, maker of the kernel)
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
    found = [(operator, key, make(torch.library.get_kernel(f"aten::{operator}", key)))
             for operator, at_autograd, make in OPERATORS[name]
             for key in [("Autograd" if at_autograd else "") + device.upper()]]
    library = torch.library.Library("aten", "IMPL")
    for operator, key, kernel in found:
        library.impl(operator, kernel, key, with_keyset=True)
    _forget_resolved(name)
    return library


def remove(name, library):
    """Takes an override's kernels out again; PyTorch's dispatcher goes back to what it had."""
    library._destroy()
    _forget_resolved(name)


def takes_parameters(params) -> bool:
    """Whether an optimizer's parameters (tensors, pairs with names, or groups) hold one for metalcore.optim.AdamW,
    which leaves the others to PyTorch."""
    tensors = []
    for entry in params:
        entries = [entry]
        if isinstance(entry, dict) and "params" in entry:
            group = entry["params"]
            entries = entry["params"] = [group] if isinstance(group, torch.Tensor) else list(group)  # or a generator
        tensors += [item[1] if isinstance(item, tuple) else item for item in entries]
    return any(accelerated(tensor) for tensor in tensors)


def _alike(*tensors):
    return accelerated(*tensors) and len({tensor.dtype for tensor in tensors if tensor is not None}) == 1


def _is_plain(tensor):
    """Not one of the tensors that stand for others while a function is traced."""
    return tensor is None or type(tensor) in (torch.Tensor, torch.nn.Parameter)


def _forget_resolved(name):
    # Tracing resolves an operator's kernel in Python and remembers it; registering from Python does not reset that.
    for operator, _, _ in OPERATORS[name]:
        getattr(torch.ops.aten, operator).default._dispatch_cache.clear()
