"""Lion as one multi-tensor kernel."""

from __future__ import annotations

import torch

from .._core.operators import cpu_kernel, fake_kernel, ops
from .._core.registry import Op, register
from ._multi_tensor import (
    MultiTensor,
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

__all__ = ["Lion"]


class Lion(MultiTensor, torch.optim.Optimizer):  # pyright: ignore[reportIncompatibleMethodOverride]
    """Lion: the sign of a mean of gradients, with decoupled weight decay. A step updates all parameters of a group with
    a few dispatches of one Metal kernel.

        direction = beta1 * exp_avg + (1 - beta1) * grad
        param     = param * (1 - lr * weight_decay) - lr * sign(direction)
        exp_avg   = beta2 * exp_avg + (1 - beta2) * grad

    The kernel takes float32, float16 and bfloat16 parameters on `mps` and `cuda` devices, with dense gradients of the
    same dtype and any strides. PyTorch's ops update all others in the same call.

    Args:
        params: parameters, named parameters or groups of them.
        lr: a float or a 1-element tensor. The kernel reads a tensor that is on the device.
        betas, weight_decay: as above.
        maximize: whether the objective is to grow.
        foreach: no effect, since the kernel takes many parameters at once, and others are updated one by one.
        capturable: no effect: a step depends on no value of the host except the group's options.
        differentiable: lets autograd differentiate the step, which PyTorch's ops then compute.
        fused: with GradScaler, the kernel unscales gradients and skips steps with overflown ones.
        state_dtype: the dtype of exp_avg: float32, bfloat16, or None for the parameter's.

    Raises:
        ValueError: a value is out of range.
        RuntimeError: `fused` and `differentiable` exclude each other; or a gradient is sparse or complex.

    Source: Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023, algorithm 2.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(4, device="mps"))
        >>> weight.grad = torch.ones_like(weight)
        >>> metalcore.optim.Lion([weight], lr=0.5, weight_decay=0.0).step()
        >>> weight.tolist()
        [0.5, 0.5, 0.5, 0.5]
    """

    STATES = ("exp_avg",)

    def __init__(
        self,
        params,
        lr=1e-4,
        betas=(0.9, 0.99),
        weight_decay=0.0,
        *,
        maximize=False,
        foreach=None,
        capturable=False,
        differentiable=False,
        fused=None,
        state_dtype=torch.float32,
    ):
        if isinstance(lr, torch.Tensor) and lr.numel() != 1:
            raise ValueError("Tensor lr must be 1-element")
        for name, value in (("learning rate", lr), ("weight_decay value", weight_decay)):
            if not value >= 0.0:
                raise ValueError(f"Invalid {name}: {value}")
        if len(betas) != 2:
            raise ValueError(f"Invalid betas: Lion has two, and not {len(betas)}")
        for index, beta in enumerate(betas):
            if not 0.0 <= beta < 1.0:
                raise ValueError(f"Invalid beta parameter at index {index}: {beta}")
        if fused and differentiable:
            raise RuntimeError("`fused` does not support `differentiable`")
        self._set_state_dtype(state_dtype)
        options = {"maximize": maximize, "foreach": foreach, "capturable": capturable}
        options |= {"differentiable": differentiable, "fused": fused}
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, **options})
        if fused:
            self._step_supports_amp_scaling = True  # GradScaler then gives it grad_scale and found_inf

    def _step_by_kernel(self, group, params, grads):
        states, dtype = [self.state[p] for p in params], self.state_dtype or params[0].dtype
        lists = ready_states(params, states, self.STATES, dtype)
        if lists is None:
            lists = [[make_state("Lion", p, state, "exp_avg", dtype) for p, state in zip(params, states)]]
        scalars = device_scalars(self, group, params[0].device)
        ops.lion_(*shards(params, grads, *lists), **_options(group), **scalars)
        updated(params, grads, scalars["grad_scale"])

    def _step_by_torch(self, group):
        found_inf, grad_scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        if found_inf is not None and found_inf.item() != 0:
            return
        for p in group["params"]:
            grad = p.grad
            if grad.is_sparse or p.is_complex():
                raise RuntimeError("Lion does not support sparse gradients or complex parameters")
            if grad_scale is not None:
                grad.div_(grad_scale.to(grad.device))
            state = self.state[p]
            if "exp_avg" not in state:
                state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
            _update(p, grad, state["exp_avg"], lr=group["lr"], **_options(group))


def _options(group):
    beta1, beta2 = map(float, group["betas"])
    options = {"weight_decay": float(group["weight_decay"]), "maximize": bool(group["maximize"])}
    return {"beta1": beta1, "beta2": beta2, **options}


def _update(param, grad, exp_avg, *, lr, beta1, beta2, weight_decay, maximize):
    grad = -grad if maximize else grad
    direction = (exp_avg * beta1).add(grad, alpha=1 - beta1)
    param.mul_(1 - lr * weight_decay).sub_(lr * direction.sign())
    exp_avg.mul_(beta2).add_(grad, alpha=1 - beta2)


@cpu_kernel("lion_")
def _(
    params,
    grads,
    exp_avgs,
    *,
    lr,
    beta1,
    beta2,
    weight_decay,
    maximize,
    lr_tensor=None,
    grad_scale=None,
    found_inf=None,
):
    if found_inf is not None and found_inf.item() != 0:
        return
    lr = lr if lr_tensor is None else float(lr_tensor)
    for param, grad, exp_avg in zip(params, unscaled(grads, grad_scale), exp_avgs):
        wide = param.float(), exp_avg.float()
        options = {"beta1": beta1, "beta2": beta2, "weight_decay": weight_decay, "maximize": maximize}
        _update(wide[0], grad, wide[1], lr=lr, **options)
        for tensor, result in zip((param, exp_avg), wide):
            if result is not tensor:
                tensor.copy_(result)


@fake_kernel("lion_")
def _(params, grads, exp_avgs, **options):
    check_devices("lion_", params=params, grads=grads, exp_avgs=exp_avgs)


class _Reference(torch.optim.Optimizer):
    """Lion as its authors wrote it down."""

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0, *, maximize=False):
        options = {"betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self):  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            (beta1, beta2), lr = group["betas"], group["lr"]
            for p in filter(lambda p: p.grad is not None, group["params"]):
                mean, grad = self.state[p].setdefault("exp_avg", torch.zeros_like(p)), p.grad
                if group["maximize"]:
                    grad = -grad
                update = (beta1 * mean + (1 - beta1) * grad).sign() + group["weight_decay"] * p
                p -= lr * update
                mean.copy_(beta2 * mean + (1 - beta2) * grad)


register(
    Op(
        "lion",
        Lion,
        reference=_Reference,
        call=steps_of(("exp_avg",)),
        operators=("lion_",),
        backward=False,
        waits=True,
        samples=lambda: (
            sample_of_steps("three parameters"),
            sample_of_steps("maximize", maximize=True, betas=(0.5, 0.75)),
        ),
    )
)
