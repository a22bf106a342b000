"""AdamW as one multi-tensor kernel."""

from __future__ import annotations

from itertools import chain
from operator import attrgetter

import torch
from torch.optim.adamw import adamw as torch_adamw

from .._core.operators import cpu_kernel, fake_kernel, ops
from .._core.registry import Op, OptimizerOverride, Sample, register
from .._core.routing import FLOAT_DTYPES, accelerated

__all__ = ["AdamW"]

MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


class AdamW(torch.optim.AdamW):
    """torch.optim.AdamW with its step on all parameters of a group done by a few dispatches of one Metal kernel.

    Takes the arguments of `torch.optim.AdamW` and is an instance of it: groups, closures, hooks, learning rate
    schedulers, GradScaler and checkpoints work as they do there, and either loads a state_dict of the other.

    The kernel takes float32, float16 and bfloat16 parameters on `mps` and `cuda` devices, with dense gradients of the
    same dtype, whatever their strides. All others (on the CPU, float64, complex, tensor subclasses,
    `differentiable=True`) are updated by PyTorch's own code in the same call. Parameters that share memory or state are
    updated one after the other.

    Differences from `torch.optim.AdamW` for parameters that the kernel takes:

    - The moments of float16 and bfloat16 parameters are float32, and the update is one of float32, rounded once.
      (In torch the moments have the parameter's dtype.) Loading torch's 16-bit moments widens them.
    - With a step in device memory the bias corrections are accurate to float32's last digits also for the first steps.

    Args:
        params: parameters, named parameters or groups of them.
        lr: a float or a 1-element tensor. A tensor on the device is read by the kernel where the step is on the device
            too, and else by the host, which waits for it.
        betas, eps, weight_decay, amsgrad, maximize: as in torch. Weight decay is decoupled.
        foreach: has no effect on the kernel, which always takes many parameters at once; chooses PyTorch's
            implementation for the other parameters.
        capturable: keeps `step` in device memory, where the kernel increments it: a step then depends on no value of
            the host's but the group's options, and can be captured and replayed.
        differentiable: lets autograd run through the step, which is PyTorch's own then.
        fused: keeps `step` in device memory as `capturable` does, and lets GradScaler leave unscaling and skipping
            steps with overflown gradients to the kernel. The other parameters take PyTorch's fused implementation.

    Raises what torch.optim.AdamW raises for invalid arguments: ValueError for values out of range, RuntimeError for
    arguments that exclude each other and for sparse gradients. A step raises for a state that does not fit: KeyError
    for a missing entry, TypeError for one that is no tensor, RuntimeError for a wrong device, dtype or shape.

    Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019.
    """

    moments_dtype: torch.dtype | None = torch.float32  # None: the parameter's, as in torch

    def step(self, closure=None):
        """Updates the parameters that have gradients. `closure` recomputes the loss, which is returned."""
        _refuse_capture(self)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            for group in self.param_groups:
                self._step_group(group)
        return loss

    def load_state_dict(self, state_dict):
        """Loads the state of an AdamW of metalcore's or torch's; both keep the same entries."""
        if self.moments_dtype is None:
            return super().load_state_dict(state_dict)
        # Optimizer.load_state_dict rounds floating-point state to the parameter's dtype. Of the hooks registered here
        # the first runs after all others, and sees the state that is loaded; the second runs before them.
        saved = {}
        record = self.register_load_state_dict_pre_hook(lambda _, given: saved.update(given))
        restore = self.register_load_state_dict_post_hook(lambda _: self._widen_moments(saved), prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            record.remove()
            restore.remove()

    def _widen_moments(self, saved):
        ids = [key for group in saved["param_groups"] for key in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for key, p in zip(ids, params):
            for name in MOMENTS:
                moment = saved["state"].get(key, {}).get(name)
                if moment is not None and accelerated(p):
                    self.state[p][name] = moment.to(device=p.device, dtype=torch.float32)

    def _step_group(self, group):
        # By what decides whether the kernel takes a parameter, and which of them one call takes. (PyTorch sees to it
        # that a gradient is on its parameter's device.)
        kinds, last, params, grads = {}, None, [], []
        for p in group["params"]:
            grad = p.grad
            if grad is not None:
                kind = type(p), p.device, p.dtype, grad.dtype, grad.layout
                if kind != last:
                    params, grads = kinds.setdefault(kind, ([], []))
                    last = kind
                params.append(p)
                grads.append(grad)
        taken, others = [], []
        for params, grads in kinds.values():
            if not group["differentiable"] and _takes(params[0], grads[0]):
                taken.append((params, grads))
            else:
                others += params
        # First, because it may refuse its parameters; then nothing has changed.
        if others:
            self._step_by_torch({**group, "params": others})
        for params, grads in taken:
            self._step_by_kernel(group, params, grads)

    def _step_by_torch(self, group):
        lists = [], [], [], [], [], []
        has_complex = self._init_group(group, *lists)
        beta1, beta2 = group["betas"]
        torch_adamw(
            *lists,
            has_complex=has_complex,
            beta1=beta1,
            beta2=beta2,
            grad_scale=getattr(self, "grad_scale", None),
            found_inf=getattr(self, "found_inf", None),
            **{
                name: group[name]
                for name in (
                    "lr",
                    "weight_decay",
                    "eps",
                    "amsgrad",
                    "maximize",
                    "foreach",
                    "capturable",
                    "differentiable",
                    "fused",
                )
            },
        )

    def _step_by_kernel(self, group, params, grads):
        device = params[0].device
        grad_scale, found_inf = (
            None if value is None else value.to(device, torch.float32)
            for value in (getattr(self, "grad_scale", None), getattr(self, "found_inf", None))
        )
        on_device = bool(group["capturable"] or group["fused"] or grad_scale is not None or found_inf is not None)
        steps, exp_avgs, exp_avg_sqs, *max_exp_avg_sqs = self._state_lists(params, group["amsgrad"], on_device)
        lr, lr_tensor = group["lr"], None
        if isinstance(lr, torch.Tensor):
            if on_device and lr.device == device:
                lr, lr_tensor = 0.0, lr.to(torch.float32)
            else:
                lr = float(lr)
        beta1, beta2 = map(float, group["betas"])
        ops.adamw_(
            params,
            grads,
            exp_avgs,
            exp_avg_sqs,
            max_exp_avg_sqs[0] if group["amsgrad"] else [],
            steps,
            lr=float(lr),
            beta1=beta1,
            beta2=beta2,
            weight_decay=float(group["weight_decay"]),
            eps=float(group["eps"]),
            maximize=bool(group["maximize"]),
            lr_tensor=lr_tensor,
            grad_scale=grad_scale,
            found_inf=found_inf,
        )
        # So that autograd notices a backward pass through a graph which saved the old values.
        torch.autograd.graph.increment_version(params if grad_scale is None else params + grads)

    def _state_lists(self, params, amsgrad, on_device):
        """ "step", "exp_avg" … of the parameters' states, a list of each, in the form that the kernel takes."""
        moments = MOMENTS if amsgrad else MOMENTS[:2]
        states = [self.state[p] for p in params]
        dtype = self.moments_dtype or params[0].dtype

        def lists():
            return [[state[name] for state in states] for name in ("step", *moments)]

        try:
            found = lists()
            # Where steps are on the device, the kernel takes them as it takes the moments.
            ready = (
                set(map(_device_index, found[0])) == {params[0].get_device() if on_device else -1}
                and set(map(_dtype, chain(*found[1:]))) == {dtype}
                and (not on_device or set(map(_dtype, found[0])) == {torch.float32})
            )
        except (AttributeError, KeyError, TypeError):  # first steps; what is not a tensor, _prepare refuses
            found, ready = [], False
        if ready:
            return found
        for p, state in zip(params, states):
            _prepare(p, state, moments, on_device, dtype)
        return lists()


_CPU = torch.device("cpu")
# PyTorch's check that a step inside torch.cuda.graph() is one that can be replayed, under its newer or its older name.
_refuse_capture = getattr(torch.optim.Optimizer, "_accelerator_graph_capture_health_check", None) or (
    torch.optim.Optimizer._cuda_graph_capture_health_check
)


_dtype = attrgetter("dtype")
_device_index = torch.Tensor.get_device  # -1 for the CPU; takes half of the time that `device` does


def _takes(p, grad):
    """Whether the kernel takes a parameter with its gradient."""
    plain = type(p) is torch.nn.Parameter or not hasattr(p, "__tensor_flatten__")
    return plain and p.dtype is grad.dtype and accelerated(p, grad)


def _prepare(p, state, moments, on_device, dtype):
    """Makes the state of p on its first step, and brings it to the form that the kernel takes. What is there and has no
    such form, the operator refuses."""
    where = p.device if on_device else _CPU
    if not state:
        # float64 where that is the default dtype, as in torch. On the device without a copy, so in a capture as well.
        wide = torch.get_default_dtype() is torch.float64 and not on_device
        state["step"] = torch.zeros((), dtype=torch.float64 if wide else torch.float32, device=where)
        for name in moments:
            state[name] = torch.zeros_like(p, dtype=dtype, memory_format=torch.preserve_format)
    for name in ("step", *moments):
        if not isinstance(state[name], torch.Tensor):
            raise TypeError(f"AdamW: the state's {name!r} must be a tensor, not {type(state[name]).__name__}")
    for name in moments:
        if state[name].dtype in FLOAT_DTYPES and state[name].dtype is not dtype:
            state[name] = state[name].to(dtype)
    step = state["step"]
    if step.is_meta:
        return
    if on_device and step.dtype is not torch.bool and not step.is_complex():
        state["step"] = step.to(where, torch.float32)
    elif step.device != where:
        state["step"] = step.to(where)


@cpu_kernel("adamw_")
def _(
    params,
    grads,
    exp_avgs,
    exp_avg_sqs,
    max_exp_avg_sqs,
    state_steps,
    *,
    lr,
    beta1,
    beta2,
    weight_decay,
    eps,
    maximize,
    lr_tensor=None,
    grad_scale=None,
    found_inf=None,
):
    if found_inf is not None and found_inf.item() != 0:
        return
    wide_grads = [grad.float() if grad_scale is None else grad.float() * (1.0 / grad_scale) for grad in grads]
    written = [*params, *exp_avgs, *exp_avg_sqs, *max_exp_avg_sqs]
    wide = [tensor.float() for tensor in written]
    count = len(params)
    torch_adamw(
        wide[:count],
        wide_grads,
        wide[count : 2 * count],
        wide[2 * count : 3 * count],
        wide[3 * count :],
        state_steps,
        foreach=False,
        amsgrad=bool(max_exp_avg_sqs),
        beta1=beta1,
        beta2=beta2,
        lr=lr if lr_tensor is None else float(lr_tensor),
        weight_decay=weight_decay,
        eps=eps,
        maximize=maximize,
    )
    for tensor, result in zip(written, wide):
        if result is not tensor:
            tensor.copy_(result)
    if grad_scale is not None:
        for grad, wide in zip(grads, wide_grads):
            grad.copy_(wide)


@fake_kernel("adamw_")
def _(
    params,
    grads,
    exp_avgs,
    exp_avg_sqs,
    max_exp_avg_sqs,
    state_steps,
    *,
    lr,
    beta1,
    beta2,
    weight_decay,
    eps,
    maximize,
    lr_tensor=None,
    grad_scale=None,
    found_inf=None,
):
    # A meta tensor among others brings a call here, and nothing would be updated.
    on = params[0].device if params else None
    for name, tensors in (
        ("params", params),
        ("grads", grads),
        ("exp_avgs", exp_avgs),
        ("exp_avg_sqs", exp_avg_sqs),
        ("max_exp_avg_sqs", max_exp_avg_sqs),
        ("state_steps", state_steps),
    ):
        for tensor in tensors:
            if tensor.device != on and not (name == "state_steps" and tensor.device == _CPU):
                raise RuntimeError(
                    f"metalcore::adamw_: {name} must be on the device of the other tensors, {on}, "
                    f"not on {tensor.device}"
                )


def _in_torchs_place():
    from ._override import OverrideAdamW  # not before it is needed

    return OverrideAdamW


_STEPS = 3


def _steps(optimizer, *tensors, **options):
    """The parameters, the first half of the tensors, and their moments after some steps, each with other gradients."""
    half = len(tensors) // 2
    params = [torch.nn.Parameter(tensor.detach().clone()) for tensor in tensors[:half]]
    made = optimizer(params, **options)
    for step in range(_STEPS):
        for param, grad in zip(params, tensors[half:]):
            param.grad = grad * 2**step  # exact in every dtype
        made.step()
    moments = [made.state[param][name] for param in params for name in MOMENTS if name in made.state[param]]
    return [param.detach() for param in params] + moments


def _sample(name, **options):
    shapes = ((300, 57), (5,), (2049,))
    # A learning rate so large that the steps, not the start, make the result.
    return Sample(name, (*shapes, *shapes), {"lr": 0.5, "weight_decay": 0.1, **options}, terms=_STEPS, roundings=_STEPS)


register(
    Op(
        "adamw",
        AdamW,
        namesake="torch.optim.AdamW",
        call=_steps,
        operators=("adamw_",),
        override=OptimizerOverride(torch.optim.AdamW, _in_torchs_place),
        backward=False,
        waits=True,
        samples=lambda: (
            _sample("three parameters"),
            _sample("amsgrad", amsgrad=True),
            _sample("steps on the device", fused=True),
        ),
    )
)
