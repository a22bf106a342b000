"""Helpers of this package's functions: 16-bit input, `out=`, errors, and parts of derivatives."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .. import _C
from .._core.operators import cpu_kernel, fake_kernel, ops
from .._core.routing import FLOAT_DTYPES, autocast_dtype, explained
from .._core.tensors import is_dtensor, whole
from ..recording import on_meta

__all__ = [
    "COMPUTED",
    "NUMBERS",
    "Broadened",
    "Tensors",
    "cast_out",
    "check_broadening",
    "check_types",
    "complex_by_torch",
    "division",
    "host_number",
    "host_numbers",
    "in_float32",
    "plan_is_torch",
    "raise_errors",
    "skew",
    "square",
    "torch_is_faster",
    "without_autocast",
    "write_out",
]

COMPUTED = frozenset({torch.float32, torch.complex64})  # the dtypes of kernels for real and complex numbers
NUMBERS = FLOAT_DTYPES | COMPUTED
Tensors = tuple[torch.Tensor, ...] | list[torch.Tensor]  # the type of `out` for several results

_linalg_check_errors = torch.ops.aten._linalg_check_errors.default
_tuning_version = _C.tuning_version
_info_any = ops.info_any.default._op
_modes_active = torch._C._len_torch_dispatch_stack  # modes such as that of fake tensors


def in_float32(call: Callable, *tensors: torch.Tensor) -> Any:
    """Returns call(*tensors) for tensors of one dtype. It converts 16-bit tensors to float32, and floating-point
    results back. float32 and complex64 stay as they are.

    `call` returns a tensor or several, and the result is a tensor or a list.
    """
    dtype = tensors[0].dtype
    if dtype in COMPUTED:
        return call(*tensors)
    results = call(*[tensor.float() for tensor in tensors])
    if isinstance(results, torch.Tensor):
        return results.to(dtype)
    return [result.to(dtype) if result.is_floating_point() else result for result in results]


def without_autocast(call: Callable) -> Callable:
    """Returns `call`, whose first argument is a tensor, with torch.autocast switched off. Autocast would compute the
    products inside `call` in 16 bits."""

    @functools.wraps(call)
    def called(tensor, *others):
        if autocast_dtype(tensor) is None:
            return call(tensor, *others)
        with torch.autocast(tensor.device.type, enabled=False):
            return call(tensor, *others)

    return called


def torch_is_faster(op, option, A, B=None, C=None):
    """Returns whether the plan of a call on an NVIDIA GPU is PyTorch's own op. So is that of complex matrices that no
    kernel holds.

    Functions call it before they check any argument, and then call PyTorch's function at once: any other way takes the
    host longer than small calls take the GPU. Inside a compiled graph the operator decides.

    option: the name and value of the argument that plans depend on, or ().
    """
    try:
        if not A.is_cuda or A.dtype not in COMPUTED or is_compiling():
            return False
        return plan_is_torch(op, option, A, B, C)
    except (AttributeError, TypeError):  # not tensors, or symbolic sizes of a traced graph, which are not hashable
        return False


def complex_by_torch(op, option, A):
    """Returns whether complex matrices on an NVIDIA GPU go to PyTorch's op."""
    return A.is_complex() and torch_is_faster(op, option, A)


def plan_is_torch(op, option, A, B=None, C=None):
    """Returns whether the plan of a call on an NVIDIA GPU is PyTorch's own op."""
    return _plan_is_torch(
        op, option, _tuning_version(), A.dtype, A.shape, None if B is None else B.shape, None if C is None else C.shape
    )


@functools.lru_cache(maxsize=4096)
def _plan_is_torch(op: str, option, version, dtype, *shapes):
    try:
        with on_meta("cuda") as recorder:
            getattr(ops, _OPERATORS.get(op, op))(*_arguments(op, option, dtype, shapes))
    except (RuntimeError, IndexError):  # the function itself refuses such shapes, with its own message
        return False
    return any(plan.variant in ("torch", "cpu") for plan in recorder.recording.plans[:1])


_OPERATORS = {"cholesky": "cholesky_ex", "lu_factor": "lu_factor_ex"}
_USUAL = {
    "left": True,
    "mode": "reduced",
    "pivot": True,
    "UPLO": "L",
    "compute_v": True,
    "compute_uv": True,
    "triangle": "full",
    "alpha": 1.0,
    "beta": 0.0,
}


def _arguments(op: str, option, dtype, shapes):
    """Returns arguments for the operator: meta tensors, the option, and usual values for arguments that no plan depends
    on."""
    options = dict([option] if option else [])
    shapes = iter([shape for shape in shapes if shape is not None])
    for argument in getattr(ops, _OPERATORS.get(op, op)).default._schema.arguments:
        if "Tensor" in str(argument.type):
            shape = next(shapes, None)
            own = torch.int32 if argument.name == "pivots" else dtype
            yield None if shape is None else torch.empty(shape, dtype=own, device="meta")
        else:
            yield options.get(argument.name, _USUAL.get(argument.name, False))


def check_types(name, *arguments):
    """Raises TypeError for the first argument of function `name` that does not have its type. Each of `arguments` has a
    name, a value and a type."""
    for argument, value, wanted in arguments:
        if not isinstance(value, wanted):
            expected = "a bool" if wanted is bool else "a tensor"
            raise TypeError(f"{name}: {argument} must be {expected}, not {type(value).__name__}")


def square(A):
    """Returns whether A is a batch of square matrices."""
    return A.ndim >= 2 and A.shape[-2] == A.shape[-1]


def raise_errors(info, name, A):
    """Raises PyTorch's error for the first matrix of A whose info is not 0. It waits for the result.

    name: PyTorch's name of the function ("linalg.inv"), with which the message begins.
    """
    if info.is_meta:
        _info_any(info)
        _C.note_torch_step("aten::_local_scalar_dense")  # the host waits there
        return
    if is_dtensor(info):  # of which each rank has a part: all of them raise
        if not whole(_info_any(info)).item():
            return
        info = whole(info)
    # PyTorch's own check takes two launches more. It makes the message, and graphs can contain it.
    if is_compiling() or _modes_active() > explained.observers or _info_any(info).item():
        _linalg_check_errors(info, name, is_matrix=A.ndim == 2)


@cpu_kernel("info_any")
def _(info):
    return info.count_nonzero().int()


@fake_kernel("info_any")
def _(info):
    return info.new_empty(())


def host_number(value: torch.Tensor, without_memory: Any) -> Any:
    """Returns the number in a tensor, for which the host waits. `without_memory` is that of a tensor without memory,
    whose plan is asked for."""
    if value.is_meta:
        _C.note_torch_step("aten::_local_scalar_dense")
        return without_memory
    return torch.ops.aten._local_scalar_dense(value)


def host_numbers(values: torch.Tensor, without_memory: float) -> list[float]:
    """Returns the numbers in a vector, for which the host waits. All numbers of a tensor without memory, whose plan is
    asked for, are `without_memory`."""
    if values.is_meta:
        _C.note_torch_step("aten::to")
        return [without_memory] * values.numel()
    return values.to("cpu").tolist()


def write_out(name: str, out: Any, results: Callable, *inputs: torch.Tensor) -> Any:
    """Writes results into the tensors of `out`, as PyTorch does: it resizes them where shapes differ, with PyTorch's
    warning, and without autograd.

    Args:
        name: PyTorch's name of the operator, for errors ("linalg_qr").
        out: a tensor, or a tuple or list of tensors, like the results. None: there is nothing to write to.
        results: a function that computes the results. It is called after `out` has been checked.
        inputs: the tensors that the call takes.

    Returns:
        `out`, or the results if `out` is None.
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
            if target.numel():
                warnings.warn(
                    f"An output with one or more elements was resized since it had shape {list(target.shape)}, which "
                    f"does not match the required output shape {list(value.shape)}. This behavior is deprecated, and "
                    "in a future PyTorch release outputs will not be resized unless they have zero elements. You can "
                    "explicitly reuse an out tensor t by resizing it, inplace, to zero elements with t.resize_(0).",
                    stacklevel=3,
                )
            target.resize_(value.shape)
        target.copy_(value)
    return out


def _targets(name, out):
    """Returns the tensors of `out`."""
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
    """Writes results as write_out does, for functions whose results PyTorch casts to the dtypes of `out`.

    Args:
        name: the function's name in PyTorch's errors ("linalg.pinv").
        dtype: the dtype of the results. It refuses an `out` of a lesser kind: an integer for a float, or a bool for an
            integer.
        parts: PyTorch's name of each result.
    """
    if out is None:
        return results()
    function = name.removeprefix("torch.").replace(".", "_")
    targets = _targets(function, out)
    if isinstance(out, torch.Tensor) != (len(parts) == 1) or len(targets) != len(parts):
        expected = "a Tensor" if len(parts) == 1 else f"a tuple of {len(parts)} Tensors"
        raise TypeError(f"{function}(): argument 'out' must be {expected}, not {type(out).__name__}")
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

    return write_out(function, out, cast, *inputs)


def skew(A):
    """Returns A - Aᴴ."""
    return A - A.mH


def check_broadening(name: str, A: Tensor, broadening: float) -> bool:
    """Returns whether there is a broadening. Raises ValueError for one that function `name` does not take."""
    number = isinstance(broadening, (int, float)) and not isinstance(broadening, bool)
    if not number or not 0 <= broadening < math.inf:
        raise ValueError(f"metalcore.{name}: broadening must be a finite number of at least 0, not {broadening!r}")
    if broadening and A.is_complex():
        raise ValueError(f"metalcore.{name}: broadening is for real matrices, and A is {A.dtype}")
    return broadening > 0


def division(largest: Tensor | None, broadening: float) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns the function (y, x) -> y / x, or with a broadening y x / (x² + d²), d = broadening * largest (Liao et al.
    2019, arXiv:1903.09650). A matrix of zeros, where d is zero, has zeros there.

    largest: of the values that the divisors x are made of; it broadcasts with x.
    """
    if not broadening or largest is None:
        return torch.div
    unit = largest.detach()
    unit = unit.where(unit > 0, 1.0)

    def divide(y, x):
        share = x / unit
        root = torch.hypot(share, torch.full_like(share, broadening))  # share² might underflow
        return y * (share / root / root / unit)

    return divide


class Broadened(torch.autograd.Function):
    """A decomposition with a derivative that is finite where divisors are zero. Its last argument is the broadening.

    What inherits has `forward` and `backward`, which finds the results in ctx.saved_tensors.
    """

    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.broadening = inputs[-1]
        ctx.save_for_backward(*output)
        ctx.set_materialize_grads(False)
