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
    """torch.optim.AdamW whose step updates all parameters of a group with a few dispatches of one Metal kernel.

    It has the arguments of `torch.optim.AdamW`, and is an instance of it. Groups, closures, hooks, learning rate
    schedulers, GradScaler and checkpoints work as there, and each class loads a state_dict of the other.

    The kernel takes float32, float16 and bfloat16 parameters on `mps` and `cuda` devices, with dense gradients of the
    same dtype and any strides. PyTorch's own code updates all others (on the CPU, float64, complex, tensor subclasses,
    `differentiable=True`) in the same call. Parameters that share memory or state are updated one after the other.

    Differences from `torch.optim.AdamW` for parameters that the kernel takes:

    - The moments of float16 and bfloat16 parameters are float32, and the update is computed in float32 and rounded
      once. In torch the moments have the parameter's dtype. Loading torch's 16-bit moments converts them to float32.
    - With a step in device memory, the bias corrections of the first steps too are accurate to float32's last digits.

    Args:
        params: parameters, named parameters or groups of them.
        lr: a float or a 1-element tensor. If the tensor and the step are on the device, the kernel reads the tensor.
            Otherwise the host reads it, and waits for it.
        betas, eps, weight_decay, amsgrad, maximize: as in torch. Weight decay is decoupled.
        foreach: chooses PyTorch's implementation for parameters that the kernel does not take. The kernel always takes
            many parameters at once.
        capturable: keeps `step` in device memory, where the kernel increments it. Then a step depends on no value of
            the host, except the group's options, and can be captured and replayed.
        differentiable: lets autograd differentiate the step, which is then PyTorch's own.
        fused: keeps `step` in device memory as `capturable` does. With GradScaler, the kernel unscales gradients and
            skips steps with overflown ones. Parameters that it does not take use PyTorch's fused implementation.

    Raises what torch.optim.AdamW raises for invalid arguments: ValueError for values out of range, and RuntimeError for
    arguments that exclude each other and for sparse gradients. A step raises an error if the state does not fit:
    KeyError if an entry is missing, TypeError if one is not a tensor, RuntimeError if a device, dtype or shape is
    wrong.

    Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019.
    """

    moments_dtype: torch.dtype | None = torch.float32  # None: the parameter's dtype, as in torch

    def step(self, closure=None):
        """Updates the parameters that have gradients, and returns the loss. `closure`, if given, computes the loss."""
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
        """Loads the state of an AdamW of metalcore or torch. Both have the same entries."""
        if self.moments_dtype is None:
            return super().load_state_dict(state_dict)
        # Optimizer.load_state_dict rounds floating-point state to the parameter's dtype. The pre-hook runs after all
        # other pre-hooks, and sees the state that will be loaded. The post-hook runs before all others.
        saved = {}
        record = self.register_load_state_dict_pre_hook(lambda _, loaded: saved.update(loaded))
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
        # A kind decides whether the kernel takes a parameter, and one call takes parameters of one kind. PyTorch makes
        # sure that a gradient is on its parameter's device.
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
        for_kernel, for_torch = [], []
        for params, grads in kinds.values():
            if not group["differentiable"] and _takes(params[0], grads[0]):
                for_kernel.append((params, grads))
            else:
                for_torch += params
        # PyTorch's code comes first, because it may refuse its parameters while nothing has changed.
        if for_torch:
            self._step_by_torch({**group, "params": for_torch})
        for params, grads in for_kernel:
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
        # Autograd then notices a backward pass through a graph that saved the old values.
        torch.autograd.graph.increment_version(params if grad_scale is None else params + grads)

    def _state_lists(self, params, amsgrad, on_device):
        """The lists of "step", "exp_avg" … of the parameters' states, in the form that the kernel takes."""
        moments = MOMENTS if amsgrad else MOMENTS[:2]
        states = [self.state[p] for p in params]
        dtype = self.moments_dtype or params[0].dtype

        def lists():
            return [[state[name] for state in states] for name in ("step", *moments)]

        try:
            existing = lists()
            # If steps are on the device, the kernel takes them like the moments.
            ready = (
                set(map(_device_index, existing[0])) == {params[0].get_device() if on_device else -1}
                and set(map(_dtype, chain(*existing[1:]))) == {dtype}
                and (not on_device or set(map(_dtype, existing[0])) == {torch.float32})
            )
        except (
            AttributeError,
            KeyError,
            TypeError,
        ):  # the first step, or an entry that is not a tensor, which _prepare refuses
            existing, ready = [], False
        if ready:
            return existing
        for p, state in zip(params, states):
            _prepare(p, state, moments, on_device, dtype)
        return lists()


_CPU = torch.device("cpu")
# PyTorch's check that a step inside torch.cuda.graph() can be replayed. It has a newer and an older name.
_refuse_capture = getattr(torch.optim.Optimizer, "_accelerator_graph_capture_health_check", None) or (
    torch.optim.Optimizer._cuda_graph_capture_health_check
)


_dtype = attrgetter("dtype")
_device_index = torch.Tensor.get_device  # -1 for the CPU; it takes half the time of `device`


def _takes(p, grad):
    """Whether the kernel takes a parameter with its gradient."""
    plain = type(p) is torch.nn.Parameter or not hasattr(p, "__tensor_flatten__")
    return plain and p.dtype is grad.dtype and accelerated(p, grad)


def _prepare(p, state, moments, on_device, dtype):
    """Makes the state of p on its first step, and converts it to the form that the kernel takes. The operator refuses a
    state that cannot be converted."""
    step_device = p.device if on_device else _CPU
    if not state:
        # The step is float64 if that is the default dtype, as in torch. It is made on the device, because a capture
        # cannot copy it there.
        wide = torch.get_default_dtype() is torch.float64 and not on_device
        state["step"] = torch.zeros((), dtype=torch.float64 if wide else torch.float32, device=step_device)
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
        state["step"] = step.to(step_device, torch.float32)
    elif step.device != step_device:
        state["step"] = step.to(step_device)


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
    # One meta tensor among others would bring a call here, where nothing is updated.
    device = params[0].device if params else None
    for name, tensors in (
        ("params", params),
        ("grads", grads),
        ("exp_avgs", exp_avgs),
        ("exp_avg_sqs", exp_avg_sqs),
        ("max_exp_avg_sqs", max_exp_avg_sqs),
        ("state_steps", state_steps),
    ):
        for tensor in tensors:
            if tensor.device != device and not (name == "state_steps" and tensor.device == _CPU):
                raise RuntimeError(
                    f"metalcore::adamw_: {name} must be on the device of the other tensors, {device}, "
                    f"not on {tensor.device}"
                )


def _override_class():
    from ._override import OverrideAdamW  # imported when it is needed

    return OverrideAdamW


_STEPS = 3


def _steps(optimizer, *tensors, **options):
    """The parameters and their moments after some steps. The first half of `tensors` are the parameters, and the second
    half their gradients, which differ from step to step."""
    half = len(tensors) // 2
    params = [torch.nn.Parameter(tensor.detach().clone()) for tensor in tensors[:half]]
    made = optimizer(params, **options)
    for step in range(_STEPS):
        for param, grad in zip(params, tensors[half:]):
            param.grad = grad * 2**step  # exact in every dtype
        made.step()
    moments = [made.state[param][name] for param in params for name in MOMENTS if name in made.state[param]]
    return [param.detach() for param in params] + moments


def _sample(name, shapes=((300, 57), (5,), (2049,)), **options):
    # With so large a learning rate the steps, and not the start, determine the result.
    return Sample(name, (*shapes, *shapes), {"lr": 0.5, "weight_decay": 0.1, **options}, terms=_STEPS, roundings=_STEPS)


register(
    Op(
        "adamw",
        AdamW,
        namesake="torch.optim.AdamW",
        call=_steps,
        operators=("adamw_",),
        override=OptimizerOverride(torch.optim.AdamW, _override_class),
        backward=False,
        waits=True,
        samples=lambda: (
            _sample("three parameters"),
            _sample("amsgrad", amsgrad=True),
            _sample("steps on the device", fused=True),
        ),
        production=lambda hidden_size=512, layers=2: _sample("", ((hidden_size, hidden_size), (hidden_size,)) * layers),
    )
)
