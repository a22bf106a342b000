"""What the functions of this package share: 16-bit input, `out=`, pieces of derivatives."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.compiler import is_compiling

from .. import _C
from .._core.operators import cpu_kernel, fake_kernel, ops
from .._core.recording import on_meta

__all__ = [
    "Tensors",
    "cast_out",
    "check_types",
    "in_float32",
    "left_to_torch",
    "plan_is_torchs",
    "raise_errors",
    "skew",
    "square",
    "without_autocast",
    "write_out",
]

Tensors = tuple[torch.Tensor, ...] | list[torch.Tensor]  # what `out` is, where a function has several results

_linalg_check_errors = torch.ops.aten._linalg_check_errors.default
_chosen_tuning = _C.chosen_tuning
_info_any = ops.info_any.default._op
_modes_active = torch._C._len_torch_dispatch_stack  # such as those of fake tensors


def in_float32(call: Callable, *tensors: torch.Tensor) -> Any:
    """call(*tensors) for tensors of one dtype: 16-bit ones are taken as float32, and floating-point results cast back.

    `call` gives a tensor or several; the result is a tensor or a list.
    """
    dtype = tensors[0].dtype
    if dtype is torch.float32:
        return call(*tensors)
    results = call(*[tensor.float() for tensor in tensors])
    if isinstance(results, torch.Tensor):
        return results.to(dtype)
    return [result.to(dtype) if result.is_floating_point() else result for result in results]


def without_autocast(call: Callable) -> Callable:
    """`call`, whose first argument is a tensor, with torch.autocast switched off, which would compute the products that
    it is made of in 16 bits."""

    @functools.wraps(call)
    def called(tensor, *others):
        device = tensor.device.type
        if device == "meta" or not torch.is_autocast_enabled(device):
            return call(tensor, *others)
        with torch.autocast(device, enabled=False):
            return call(tensor, *others)

    return called


def left_to_torch(op, option, A, B=None, C=None):
    """Whether the plan of a call on an NVIDIA GPU is PyTorch's own op: for functions whose small calls go to PyTorch's
    function at once, since any other way there takes the host longer than the GPU works. So it is asked first, of
    arguments that nobody has looked at yet, and does little. Inside a compiled graph the operator decides.

    option: the name and value of the one that plans depend on, or ().
    """
    try:
        if not A.is_cuda or A.dtype is not torch.float32 or is_compiling():
            return False
        return plan_is_torchs(op, option, A, B, C)
    except (AttributeError, TypeError):  # not tensors; symbolic sizes, while a graph is traced, are not hashable
        return False


def plan_is_torchs(op, option, A, B=None, C=None):
    """Whether the plan of a call on an NVIDIA GPU is PyTorch's own op."""
    return _plan_is_torchs(
        op, option, _chosen_tuning(), A.shape, None if B is None else B.shape, None if C is None else C.shape
    )


@functools.lru_cache(maxsize=4096)
def _plan_is_torchs(op: str, option, family, *shapes):
    try:
        with on_meta("cuda") as recorder:
            getattr(ops, _OPERATORS.get(op, op))(*_arguments(op, option, shapes))
    except (RuntimeError, IndexError):  # shapes that the function itself refuses, in its own words
        return False
    return any(plan.variant == "torch" for plan in recorder.recording.plans[:1])


_OPERATORS = {"cholesky": "cholesky_ex", "lu_factor": "lu_factor_ex"}
_USUAL = {"left": True, "mode": "reduced", "pivot": True, "triangle": "full", "alpha": 1.0, "beta": 0.0}


def _arguments(op: str, option, shapes):
    """Arguments for the operator: meta tensors, the option, and usual values for what plans do not depend on."""
    given = dict([option] if option else [])
    shapes = iter([shape for shape in shapes if shape is not None])
    for argument in getattr(ops, _OPERATORS.get(op, op)).default._schema.arguments:
        if "Tensor" in str(argument.type):
            shape = next(shapes, None)
            dtype = torch.int32 if argument.name == "pivots" else torch.float32
            yield None if shape is None else torch.empty(shape, dtype=dtype, device="meta")
        else:
            yield given.get(argument.name, _USUAL.get(argument.name, False))


def check_types(name, *arguments):
    """Raises TypeError for the first of the arguments of function `name`, each its name, value and type, that is none
    of that type."""
    for argument, value, wanted in arguments:
        if not isinstance(value, wanted):
            expected = "a bool" if wanted is bool else "a tensor"
            raise TypeError(f"{name}: {argument} must be {expected}, not {type(value).__name__}")


def square(A):
    """Whether A is a batch of square matrices."""
    return A.ndim >= 2 and A.shape[-2] == A.shape[-1]


def raise_errors(info, name, A):
    """Raises PyTorch's error for the first matrix of A whose info is not 0; waits for the result.

    name: PyTorch's name of the function, which the message begins with ("linalg.inv").
    """
    if info.is_meta:
        _info_any(info)
        return
    # PyTorch's own look at the infos takes two launches more; it words the error, and has a place in graphs.
    if is_compiling() or _modes_active() or _info_any(info).item():
        _linalg_check_errors(info, name, is_matrix=A.ndim == 2)


@cpu_kernel("info_any")
def _(info):
    return info.count_nonzero().int()


@fake_kernel("info_any")
def _(info):
    return info.new_empty(())


def write_out(name: str, out: Any, results: Callable, *inputs: torch.Tensor) -> Any:
    """Writes results into the tensors of `out`, as PyTorch does: resized where the shape differs, no autograd.

    Args:
        name: PyTorch's name of the operator, for errors ("linalg_qr").
        out: a tensor, or a tuple or list of them, as results are. None: there is nothing to write to.
        results: a function that computes them, called when `out` has been found to fit.
        inputs: the tensors that the call takes.

    Returns:
        `out`, or what `results` gave where that is None.
    """
    if out is None:
        return results()
    targets = _targets(name, out)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*inputs, *targets)):
        raise RuntimeError(
            f"{name}(): functions with out=... arguments don't support automatic differentiation, "
            "but one of the arguments requires grad."
        )
    values = results()
    if isinstance(values, torch.Tensor) != isinstance(out, torch.Tensor):
        expected = "Tensor" if isinstance(values, torch.Tensor) else "tuple of Tensors"
        raise TypeError(f"{name}(): argument 'out' must be {expected}, not {type(out).__name__}")
    values = (values,) if isinstance(values, torch.Tensor) else tuple(values)
    if len(targets) != len(values):
        raise TypeError(f"expected tuple of {len(values)} elements but got {len(targets)}")
    for target, value in zip(targets, values):
        if target.dtype != value.dtype:
            raise RuntimeError(f"Expected out tensor to have dtype {value.dtype}, but got {target.dtype} instead")
        if target.device != value.device:
            raise RuntimeError(f"Expected out tensor to be on {value.device}, but got {target.device} instead")
    for target, value in zip(targets, values):
        if target.shape != value.shape:
            target.resize_(value.shape)
        target.copy_(value)
    return out


def _targets(name, out):
    """The tensors of `out`."""
    targets = tuple(out) if isinstance(out, (tuple, list)) else (out,)
    for target in targets:
        if not isinstance(target, torch.Tensor):
            raise TypeError(f"{name}(): argument 'out' must be of Tensors, not of {type(target).__name__}")
    return targets


def cast_out(
    name: str,
    out: Any,
    results: Callable,
    *inputs: torch.Tensor,
    dtype: torch.dtype,
    parts: Sequence[str] = ("result",),
) -> Any:
    """write_out for the functions whose results PyTorch casts to the dtypes of `out`.

    Args:
        name: as PyTorch's errors have it ("linalg.pinv").
        dtype: of the results; an `out` of a lesser kind (an integer for a float, a bool for an integer) is refused.
        parts: what PyTorch calls each of them.
    """
    if out is None:
        return results()
    of = name.removeprefix("torch.").replace(".", "_")
    targets = _targets(of, out)
    if isinstance(out, torch.Tensor) != (len(parts) == 1) or len(targets) != len(parts):
        expected = "a Tensor" if len(parts) == 1 else f"a tuple of {len(parts)} Tensors"
        raise TypeError(f"{of}(): argument 'out' must be {expected}, not {type(out).__name__}")
    for part, target in zip(parts, targets):
        if not torch.can_cast(dtype, target.dtype):
            kinds = [
                torch.empty(0, dtype=kind, device="cpu").type()[len("torch.") : -len("Tensor")]
                for kind in (dtype, target.dtype)
            ]
            raise RuntimeError(
                f"{name}: Expected {part} to be safely castable from {kinds[0]} dtype, but got {part} "
                f"with dtype {kinds[1]}"
            )

    def cast():
        values = results()
        if isinstance(values, torch.Tensor):
            return values.to(targets[0].dtype)
        return [value.to(target.dtype) for value, target in zip(values, targets)]

    return write_out(of, out, cast, *inputs)


def skew(A):
    """A - Aᵀ."""
    return A - A.mT
