"""Stochastic gradient descent as one multi-tensor kernel."""

from __future__ import annotations

import torch
from torch.optim.sgd import sgd as torch_sgd

from .._core.operators import cpu_kernel, fake_kernel, ops
from .._core.registry import Op, OptimizerOverride, register
from ._multi_tensor import (
    MultiTensor,
    Override,
    check_devices,
    device_scalars,
    make_state,
    ready_states,
    sample_of_steps,
    shards,
    steps_of,
    unscaled,
    updated,
)

__all__ = ["SGD"]


class SGD(MultiTensor, torch.optim.SGD):
    """torch.optim.SGD whose step updates all parameters of a group with a few dispatches of one Metal kernel.

    It has the arguments of `torch.optim.SGD`, and is an instance of it: `lr` (a float, or a 1-element tensor, which the
    kernel reads where it is on the device), `momentum`, `dampening`, `weight_decay`, `nesterov`, `maximize`, `foreach`,
    `differentiable` and `fused`. Each class loads a state_dict of the other.

    The kernel takes float32, float16 and bfloat16 parameters on `mps` and `cuda` devices, with dense gradients of the
    same dtype and any strides; the update is computed in float32, and the momentum has the parameter's dtype. PyTorch's
    own code updates all others in the same call. `foreach` chooses PyTorch's implementation for those. With
    `fused=True` and GradScaler, the kernel unscales gradients and skips steps with overflown ones. A step waits for
    nothing, unless a learning rate is a tensor on another device.

    Raises what torch.optim.SGD raises for invalid arguments: ValueError for values out of range, and RuntimeError for
    arguments that exclude each other. A step raises TypeError for a momentum buffer that is not a tensor, and
    RuntimeError if its device, dtype or shape is wrong.

    Source: Sutskever, Martens, Dahl and Hinton, "On the importance of initialization and momentum in deep learning",
    2013, as PyTorch has it.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(4, device="mps"))
        >>> weight.grad = torch.ones_like(weight)
        >>> metalcore.optim.SGD([weight], lr=0.5).step()
        >>> weight.tolist()
        [0.5, 0.5, 0.5, 0.5]
    """

    def _step_by_kernel(self, group, params, grads):
        scalars = device_scalars(self, group, params[0].device)
        options = {name: float(group[name]) for name in ("momentum", "dampening", "weight_decay")}
        options |= {name: bool(group[name]) for name in ("nesterov", "maximize")}
        parts = {False: (params, grads, [])}
        if options["momentum"] != 0:
            states = [self.state[p] for p in params]
            ready = ready_states(params, states, ("momentum_buffer",), params[0].dtype)
            parts = _parts(params, grads, states) if ready is None else {False: (params, grads, *ready)}
        for first, (some_params, some_grads, buffers) in parts.items():
            ops.sgd_(*shards(some_params, some_grads, buffers), first=first, **options, **scalars)
        updated(params, grads, scalars["grad_scale"])

    def _step_by_torch(self, group):
        params, grads, buffers = [], [], []
        has_sparse = self._init_group(group, params, grads, buffers)
        names = ("weight_decay", "momentum", "lr", "dampening", "nesterov", "maximize", "foreach", "fused")
        torch_sgd(
            params,
            grads,
            buffers,
            has_sparse_grad=has_sparse,
            grad_scale=getattr(self, "grad_scale", None),
            found_inf=getattr(self, "found_inf", None),
            **{name: group[name] for name in names},
        )
        if group["momentum"] != 0:
            for p, buffer in zip(params, buffers):
                self.state[p]["momentum_buffer"] = buffer


def _parts(params, grads, states):
    """Divides parameters, gradients and buffers by whether a step is the buffer's first one, which is another one.
    Parameters join a group, or get gradients, at different times."""
    parts = {}
    for p, grad, state in zip(params, grads, states):
        first = state.get("momentum_buffer") is None
        if first:
            state.pop("momentum_buffer", None)
        buffer = make_state("SGD", p, state, "momentum_buffer", p.dtype)
        for list_, entry in zip(parts.setdefault(first, ([], [], [])), (p, grad, buffer)):
            list_.append(entry)
    return parts


@cpu_kernel("sgd_")
def _(
    params,
    grads,
    momentum_buffers,
    *,
    lr,
    momentum,
    dampening,
    weight_decay,
    nesterov,
    maximize,
    first,
    lr_tensor=None,
    grad_scale=None,
    found_inf=None,
):
    if found_inf is not None and found_inf.item() != 0:
        return
    wide_grads = unscaled(grads, grad_scale)
    wide = [p.float() for p in params]
    buffers = [None if first else buffer.float() for buffer in momentum_buffers] or [None] * len(params)
    torch_sgd(
        wide,
        wide_grads,
        buffers,
        weight_decay=weight_decay,
        momentum=momentum if momentum_buffers else 0.0,
        lr=lr if lr_tensor is None else float(lr_tensor),
        dampening=dampening,
        nesterov=nesterov,
        maximize=maximize,
        foreach=False,
    )
    for tensor, result in zip([*params, *momentum_buffers], [*wide, *buffers]):
        if result is not tensor:
            tensor.copy_(result)


@fake_kernel("sgd_")
def _(params, grads, momentum_buffers, **options):
    check_devices("sgd_", params=params, grads=grads, momentum_buffers=momentum_buffers)


class _OverrideSGD(Override, SGD):
    """metalcore.optim.SGD in the place of torch.optim.SGD."""


register(
    Op(
        "sgd",
        SGD,
        namesake="torch.optim.SGD",
        call=steps_of(("momentum_buffer",)),
        operators=("sgd_",),
        override=OptimizerOverride(torch.optim.SGD, _OverrideSGD, "_fused_sgd_"),
        backward=False,
        waits=True,
        samples=lambda: (
            sample_of_steps("three parameters"),
            sample_of_steps("momentum", momentum=0.9, dampening=0.1),
            sample_of_steps("nesterov", momentum=0.9, nesterov=True, maximize=True),
        ),
    )
)
