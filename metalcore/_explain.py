"""metalcore.explain: which kernels a call would run, and why."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import torch

from . import _C, linalg
from ._explain_composed import COMPOSED
from .activation import gelu, log_softmax, silu, softmax
from .normalization import add_rms_norm, rms_norm
from .optim import AdamW

__all__ = ["Explanation", "Step", "explain"]


@dataclass(frozen=True)
class Step:
    """One dispatch: a kernel, its grid (in threadgroups, or in threads where `threads`) and its threadgroup's size."""

    kernel: str
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    threads: bool

    def __str__(self):
        grid, group = ("×".join(map(str, sizes)) for sizes in (self.grid, self.threadgroup))
        return f"{self.kernel}: {grid} {'threads' if self.threads else 'threadgroups'}, {group} threads a threadgroup"


@dataclass(frozen=True)
class Explanation:
    op: str
    variant: str
    why: str
    steps: tuple[Step, ...]

    @property
    def kernels(self) -> tuple[str, ...]:
        return tuple(step.kernel for step in self.steps)

    def __str__(self):
        return "\n".join([f"{self.op}: {self.variant} ({self.why})", *(f"  {step}" for step in self.steps)])


def explain(op: str, *inputs, dtype: torch.dtype | None = None, **options) -> Explanation:
    """Tells how metalcore would run an op, without running it.

    Args:
        op: the op's name, as in metalcore.<op>.
        inputs: for each tensor argument a tensor or a shape; the first tensor's device is planned for, where there is
            none that of PyTorch's accelerator.
        dtype: of the inputs; by default the first tensor's, float32 where only shapes are given.
        options: the op's other arguments; those that no plan depends on are ignored. For activations, softmaxes and
            norms also `backward=True`, for the kernels of the derivative.

    Raises:
        ValueError: an op that has no explanation, or arguments the op would not take.
        TypeError: an input that is neither a tensor nor a shape, or an argument that the op does not have.

    >>> print(metalcore.explain("softmax", (8, 4096)))
    """
    if not isinstance(op, str):
        raise TypeError(f"explain(): op must be a name, not {type(op).__name__}")
    shapes = [_shape(value) for value in inputs]
    _check_options(op, options)
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    if dtype is None:
        dtype = tensors[0].dtype if tensors else torch.float32
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"explain(): dtype must be a torch.dtype, not {dtype!r}")
    if "normalized_shape" in options:
        options["dims"] = len(options["normalized_shape"])
    device = tensors[0].device.type if tensors else torch._C._get_accelerator().type
    calls = _calls(op, shapes, options)
    plans = [
        _C.explain(name, list(shapes), str(dtype).removeprefix("torch."), options, device)
        for name, shapes, options in calls
    ]
    return Explanation(
        op,
        ", ".join(dict.fromkeys(plan["variant"] for plan in plans)),
        "; ".join(dict.fromkeys(plan["why"] for plan in plans)),
        tuple(Step(**step) for plan in plans for step in plan["steps"]),
    )


def _calls(op, shapes, options):
    if op not in COMPOSED:
        return [(op, shapes, options)]
    try:
        return COMPOSED[op](shapes, options)
    except (ValueError, IndexError):
        raise ValueError(f"explain(): not the shapes of {op}'s arguments: {', '.join(map(str, shapes))}") from None


# Whose arguments are an op's options.
_FUNCTIONS = {
    "silu": silu,
    "gelu": gelu,
    "softmax": softmax,
    "log_softmax": log_softmax,
    "rms_norm": rms_norm,
    "add_rms_norm": add_rms_norm,
    **{
        name: getattr(linalg, name)
        for name in (
            "cholesky",
            "cholesky_ex",
            "cholesky_solve",
            "det",
            "eigh",
            "geqrf",
            "householder_product",
            "inv",
            "inv_ex",
            "lu",
            "lu_factor",
            "lu_factor_ex",
            "lu_solve",
            "ormqr",
            "qr",
            "slogdet",
            "solve",
            "solve_ex",
            "solve_triangular",
            "svd",
            "syrk",
            *COMPOSED,
        )
    },
    "adamw": AdamW,
}


_WITH_BACKWARD = {"silu", "gelu", "softmax", "log_softmax", "rms_norm", "add_rms_norm"}


def _check_options(op, options):
    if op not in _FUNCTIONS:
        raise ValueError(f"explain knows no op {op!r}; it knows {', '.join(sorted(_FUNCTIONS))}")
    known = list(inspect.signature(_FUNCTIONS[op]).parameters)[1:] + ["backward"] * (op in _WITH_BACKWARD)
    for name in options:
        if name not in known:
            raise TypeError(f"explain(): {op} has no argument {name!r}; it has {', '.join(known)}")


def _shape(value):
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    if not isinstance(value, (tuple, list)) or not all(isinstance(size, int) for size in value):
        raise TypeError(f"explain(): an input must be a tensor or a shape, such as (8, 64), not {value!r}")
    if any(size < 0 for size in value):
        raise ValueError(f"explain(): a shape cannot have a negative size: {tuple(value)}")
    return tuple(value)
