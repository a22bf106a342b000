"""Clipping of many gradients at once, by their norm and by value."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch import Tensor

from .._core.operators import cpu_kernel, fake_kernel, ops
from .._core.registry import FunctionOverride, Op, Sample, register
from .._core.tensors import is_dtensor, is_partial, local
from ._multi_tensor import by_kind, takes

__all__ = ["clip_grad_norm_", "clip_grad_value_"]


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scales the gradients of parameters, all by one factor, such that their norm is at most max_norm: as
    torch.nn.utils.clip_grad_norm_.

    On `mps` and `cuda`, for dense float32, float16 and bfloat16 gradients of any strides, two kernels take the norm of
    all of them as one vector, in float32 and always in the same order, and a third one scales them by
    max_norm / (norm + 1e-6) if that is less than one. If it is not, nothing is written. Other gradients go to PyTorch's
    own function. The norm of DTensors is that of the whole gradients, of any placements and on any meshes, and all
    ranks get it.

    Args:
        parameters: one parameter, or several. Those without a gradient are left out.
        max_norm: the largest norm that stays as it is.
        norm_type: p of the norm, float("inf") for the largest size of an element. Where it is not above 0, PyTorch's
            own function runs.
        error_if_nonfinite: whether a norm that is infinite or NaN is an error. Only then the host waits for the norm.
        foreach: chooses PyTorch's implementation where its own function runs.

    Returns:
        The norm before the clipping, 0-d, of the dtype to which those of the gradients promote. It is on the device of
        the first gradient. The clipping uses it in float32.

    Raises:
        RuntimeError: the norm is infinite or NaN, and error_if_nonfinite is true. No gradient has changed then.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2, device="mps"))
        >>> weight.grad = torch.tensor([3.0, 4.0], device="mps")
        >>> metalcore.optim.clip_grad_norm_([weight], max_norm=1.0).item()  # the norm that they had
        5.0
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    grads = _grads(parameters)
    kinds = _kinds(grads, norm_type)
    if kinds is None:
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
    norm = _norm(kinds, norm_type, grads[0].device)
    _refuse_nonfinite(norm, norm_type, error_if_nonfinite)
    _scale(kinds, norm, max_norm)
    return norm.to(_dtype(kinds))


@torch.no_grad()
def clip_grad_value_(parameters: Tensor | Iterable[Tensor], clip_value: float, foreach: bool | None = None) -> None:
    """Clips each element of the gradients of parameters to [-clip_value, clip_value]: as
    torch.nn.utils.clip_grad_value_. A NaN stays one.

    One kernel takes the dense float32, float16 and bfloat16 gradients on `mps` and `cuda`, of any strides. Where one of
    the gradients is another, PyTorch's own function takes all of them.

    Args:
        parameters: one parameter, or several. Those without a gradient are left out.
        clip_value: the largest size of an element.
        foreach: chooses PyTorch's implementation where its own function runs.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2, device="mps"))
        >>> weight.grad = torch.tensor([3.0, -4.0], device="mps")
        >>> metalcore.optim.clip_grad_value_([weight], 1.0)
        >>> weight.grad.tolist()
        [1.0, -1.0]
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    kinds = _kinds(_grads(parameters))
    if kinds is None:
        torch.nn.utils.clip_grad_value_(parameters, clip_value, foreach)
        return
    _clamp(kinds, clip_value)


def _kinds(grads, norm_type=2.0):
    """Returns lists of gradients of one device and dtype, or None if the kernels do not take all of them."""
    if not grads or not float(norm_type) > 0:
        return None
    kinds = [grads for grads, _ in by_kind((grad, grad) for grad in grads)]
    return kinds if all(takes(grads[0], grads[0]) and not is_partial(grads[0]) for grads in kinds) else None


def _norm(kinds, norm_type, device):
    """Returns the norm in float32 of all gradients."""
    norms = [_norm_of_kind(grads, float(norm_type)) for grads in kinds]
    if len(norms) == 1:
        return norms[0]
    return torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms]), float(norm_type))


def _norm_of_kind(grads, norm_type):
    if not is_dtensor(grads[0]):
        return ops.grad_norm(grads, norm_type)
    from ..distributed.optim import whole_norm

    return whole_norm(lambda shards: ops.grad_norm(shards, norm_type), grads, norm_type)


def _dtype(kinds):
    return functools.reduce(torch.promote_types, (grads[0].dtype for grads in kinds))


def _refuse_nonfinite(norm, norm_type, error_if_nonfinite):
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"The total norm of order {float(norm_type)} for gradients from `parameters` is non-finite, so it cannot "
            "be clipped. To disable this error and scale the gradients by the non-finite norm anyway, set "
            "`error_if_nonfinite=False`"
        )


def _scale(kinds, norm, max_norm):
    for grads in kinds:
        ops.grad_clip_norm_(_shards(grads), norm.to(grads[0].device, torch.float32), float(max_norm))
        torch.autograd.graph.increment_version(grads)


def _grads(parameters):
    """Returns the gradients that there are."""
    return [grad for p in parameters if (grad := p.grad) is not None]


def _shards(grads):
    """Returns this rank's shards of the gradients of one kind."""
    return list(map(local, grads)) if is_dtensor(grads[0]) else grads


def _clamp(kinds, clip_value):
    for grads in kinds:
        ops.grad_clip_value_(_shards(grads), float(clip_value))
        torch.autograd.graph.increment_version(grads)


@cpu_kernel("grad_norm")
def _(grads, norm_type):
    filled = [grad for grad in grads if grad.numel()]
    if not filled:
        return torch.zeros((), device=grads[0].device)
    norms = [torch.linalg.vector_norm(grad, norm_type, dtype=torch.float32) for grad in filled]
    return torch.linalg.vector_norm(torch.stack(norms), norm_type)


@fake_kernel("grad_norm")
def _(grads, norm_type):
    return grads[0].new_empty((), dtype=torch.float32)


@cpu_kernel("grad_clip_norm_")
def _(grads, norm, max_norm):
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for grad in grads:
        grad.copy_(grad.float() * factor)


@fake_kernel("grad_clip_norm_")
def _(grads, norm, max_norm):
    pass


@cpu_kernel("grad_clip_value_")
def _(grads, clip_value):
    for grad in grads:
        grad.clamp_(min=-clip_value).clamp_(max=clip_value)


@fake_kernel("grad_clip_value_")
def _(grads, clip_value):
    pass


# What clip_grad_norm_ of PyTorch is made of. It looks both up when it runs, so that every way to call it meets these,
# whenever it was imported.
def _total_norm(previous, count, decline):
    @functools.wraps(previous)
    @torch.no_grad()
    def get_total_norm(tensors, norm_type=2.0, error_if_nonfinite=False, foreach=None):
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        kinds = _kinds(tensors, norm_type)
        if kinds is None:
            return decline(tensors, norm_type, error_if_nonfinite, foreach)
        norm = count.run(_norm, kinds, norm_type, tensors[0].device)
        _refuse_nonfinite(norm, norm_type, error_if_nonfinite)
        return norm.to(_dtype(kinds))

    return get_total_norm


def _clip_with_norm(previous, count, decline):
    @functools.wraps(previous)
    @torch.no_grad()
    def clip_grads_with_norm(parameters, max_norm, total_norm, foreach=None):
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        kinds = _kinds(_grads(parameters))
        if kinds is None:
            return decline(parameters, max_norm, total_norm, foreach)
        return count.run(_scale, kinds, total_norm, max_norm)

    return clip_grads_with_norm


def _clip_value(previous, count, decline):
    @functools.wraps(previous)
    @torch.no_grad()
    def clip_grad_value(parameters, clip_value, foreach=None):
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        kinds = _kinds(_grads(parameters))
        if kinds is None:
            return decline(parameters, clip_value, foreach)
        return count.run(_clamp, kinds, clip_value)

    return clip_grad_value


def _parameters(*tensors):
    parameters = [torch.nn.Parameter(torch.zeros_like(tensor)) for tensor in tensors]
    for parameter, tensor in zip(parameters, tensors):
        parameter.grad = tensor.clone()
    return parameters


def _call(function, parameters, *arguments, **options):
    norm = function(parameters, *arguments, **options)
    return [*([] if norm is None else [norm]), *(parameter.grad for parameter in parameters)]


def _sample(name, limit, **options):
    shapes = ((300, 57), (5,), (2049,))
    return Sample(name, shapes, options, arguments=lambda *t: (_parameters(*t), limit), terms=20000, roundings=2)


register(
    Op(
        "clip_grad_norm_",
        clip_grad_norm_,
        namesake="torch.nn.utils.clip_grad_norm_",
        call=_call,
        operators=("grad_norm", "grad_clip_norm_"),
        override=FunctionOverride(
            {
                "torch.nn.utils.clip_grad._get_total_norm": _total_norm,
                "torch.nn.utils.clip_grad._clip_grads_with_norm_": _clip_with_norm,
            }
        ),
        backward=False,
        waits=True,  # only its samples' parameters, which cannot be made in a graph
        samples=lambda: (
            _sample("clipped", 1.0),
            _sample("below the limit", 1e5),
            _sample("largest element", 0.5, norm_type=float("inf")),
            _sample("sum", 10.0, norm_type=1.0),
            _sample("cubes", 1.0, norm_type=3.0),
        ),
    )
)
register(
    Op(
        "clip_grad_value_",
        clip_grad_value_,
        namesake="torch.nn.utils.clip_grad_value_",
        call=_call,
        operators=("grad_clip_value_",),
        override=FunctionOverride(
            {
                "torch.nn.utils.clip_grad.clip_grad_value_": _clip_value,
                "torch.nn.utils.clip_grad_value_": _clip_value,
            }
        ),
        backward=False,
        waits=True,  # only its samples' parameters, which cannot be made in a graph
        samples=lambda: (_sample("clipped", 0.5),),
    )
)
