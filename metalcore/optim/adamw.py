"""AdamW as one multi-tensor kernel."""

from __future__ import annotations

import inspect

import torch
from torch.optim.adamw import adamw as torch_adamw

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

__all__ = ["AdamW"]

MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


class AdamW(MultiTensor, torch.optim.AdamW):
    """torch.optim.AdamW whose step updates all parameters of a group with a few dispatches of one Metal kernel.

    It has the arguments of `torch.optim.AdamW`, and is an instance of it. Groups, closures, hooks, learning rate
    schedulers, GradScaler and checkpoints work as there, and each class loads a state_dict of the other.

    The kernel takes float32, float16 and bfloat16 parameters on `mps` and `cuda` devices, with dense gradients of the
    same dtype and any strides. PyTorch's own code updates all others (on the CPU, float64, complex, tensor subclasses,
    `differentiable=True`) in the same call. Parameters that share memory or state are updated one after the other.

    Differences from `torch.optim.AdamW` for parameters that the kernel takes:

    - The moments of float16 and bfloat16 parameters are float32 unless `state_dtype` says otherwise, and the update is
      computed in float32 and rounded once. In torch the moments have the parameter's dtype. Loading a state converts
      its moments to `state_dtype`.
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
        state_dtype: the dtype of the moments: float32, bfloat16, or None for the parameter's.
        stochastic_rounding: a seed, an integer. Then what is stored in bfloat16 (bfloat16 parameters, and their moments
            if these are bfloat16 too) is rounded up or down at random, with a mean that is exact: updates that are
            smaller than half of a bfloat16's last digit are not lost. The random numbers (Philox) depend on the seed,
            the step, the parameter's place in its group and the element, and on nothing else. Parameters and moments
            of other dtypes are rounded to nearest. It is for training without float32 copies of the weights.

    Raises what torch.optim.AdamW raises for invalid arguments: ValueError for values out of range, and RuntimeError for
    arguments that exclude each other and for sparse gradients. A step raises an error if the state does not fit:
    KeyError if an entry is missing, TypeError if one is not a tensor, RuntimeError if a device, dtype or shape is
    wrong.

    Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(4, device="mps"))
        >>> weight.grad = torch.ones_like(weight)
        >>> metalcore.optim.AdamW([weight], lr=0.5, weight_decay=0.0).step()
        >>> [round(element, 4) for element in weight.tolist()]
        [0.5, 0.5, 0.5, 0.5]
    """

    STATES = MOMENTS
    OPTIONS = ("state_dtype", "stochastic_rounding")
    COUNTS_ON_HOST = True
    stochastic_rounding: int | None = None

    def __init__(self, params, *args, state_dtype=torch.float32, stochastic_rounding=None, **options):
        self._set_state_dtype(state_dtype)
        if stochastic_rounding is not None and (
            isinstance(stochastic_rounding, bool) or not isinstance(stochastic_rounding, int)
        ):
            raise TypeError(f"stochastic_rounding must be a seed, an integer, or None, not {stochastic_rounding!r}")
        self.stochastic_rounding = stochastic_rounding
        super().__init__(params, *args, **options)
        if self.stochastic_rounding is not None and self.defaults["differentiable"]:
            raise ValueError("stochastic_rounding has no derivative: differentiable=True excludes it")

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
        scalars = device_scalars(self, group, device)
        in_memory = scalars["grad_scale"] is not None or scalars["found_inf"] is not None
        on_device = bool(group["capturable"] or group["fused"] or in_memory)
        if scalars["lr_tensor"] is not None and not on_device:
            scalars.update(lr=float(scalars["lr_tensor"]), lr_tensor=None)
        steps, exp_avgs, exp_avg_sqs, *max_exp_avg_sqs = self._state_lists(params, group["amsgrad"], on_device)
        beta1, beta2 = map(float, group["betas"])
        maxima = max_exp_avg_sqs[0] if group["amsgrad"] else []
        ops.adamw_(
            *shards(params, grads, exp_avgs, exp_avg_sqs, maxima),
            steps,
            beta1=beta1,
            beta2=beta2,
            weight_decay=float(group["weight_decay"]),
            eps=float(group["eps"]),
            maximize=bool(group["maximize"]),
            seed=self._seed(group, params[0].dtype),
            **scalars,
        )
        updated(params, grads, scalars["grad_scale"])

    def _seed(self, group, dtype):
        """Returns the seed of a group's stochastic rounding: groups have different random numbers."""
        if self.stochastic_rounding is None or dtype is not torch.bfloat16:
            return None
        place = next((i for i, each in enumerate(self.param_groups) if each is group), 0)
        seed = (self.stochastic_rounding + place * 0x9E3779B97F4A7C15) % 2**64
        return seed - 2**64 * (seed >= 2**63)

    def _state_lists(self, params, amsgrad, on_device):
        """Returns the lists of "step", "exp_avg" … of the parameters' states, in the form that the kernel takes."""
        moments = MOMENTS if amsgrad else MOMENTS[:2]
        states = [self.state[p] for p in params]
        dtype = self.state_dtype or params[0].dtype

        def ready():
            lists = ready_states(params, states, moments, dtype)
            if lists is None:
                return None
            try:
                steps = [state["step"] for state in states]
                # If steps are on the device, the kernel takes them like the moments.
                devices = set(map(torch.Tensor.get_device, steps))  # it takes half the time of `device`
            except (AttributeError, KeyError, TypeError):  # an entry that is missing or not a tensor
                return None
            if devices != {params[0].get_device() if on_device else -1}:
                return None
            return None if on_device and {step.dtype for step in steps} != {torch.float32} else [steps, *lists]

        lists = ready()
        if lists is None:
            for p, state in zip(params, states):
                _prepare(p, state, moments, on_device, dtype)
            lists = [[state[name] for state in states] for name in ("step", *moments)]
        return lists


# torch's, and what there is besides.
_torch_signature = inspect.signature(torch.optim.AdamW)
AdamW.__signature__ = _torch_signature.replace(  # pyright: ignore[reportAttributeAccessIssue]
    parameters=[
        *_torch_signature.parameters.values(),
        *(inspect.signature(AdamW.__init__).parameters[name] for name in ("state_dtype", "stochastic_rounding")),
    ]
)
_CPU = torch.device("cpu")


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
            make_state("AdamW", p, state, name, dtype)
    step = state["step"]
    if not isinstance(step, torch.Tensor):
        raise TypeError(f"AdamW: the state's 'step' must be a tensor, not {type(step).__name__}")
    for name in moments:
        if name not in state:
            raise KeyError(name)
        make_state("AdamW", p, state, name, dtype)
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
    seed=None,
):
    if found_inf is not None and found_inf.item() != 0:
        return
    wide_grads = unscaled(grads, grad_scale)
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
    random = None
    if seed is not None:  # random numbers that depend on the seed and the step, and are not those of the kernel
        random = torch.Generator(params[0].device).manual_seed((seed + 0x2545F491 * int(state_steps[0])) % 2**63)
    for tensor, result in zip(written, wide):
        if result is not tensor:
            tensor.copy_(result if random is None else rounded_at_random(result, tensor.dtype, random))


def rounded_at_random(value, dtype, generator):
    """Returns float32 values rounded to bfloat16 up or down at random, with an exact mean; other dtypes as they are."""
    if dtype is not torch.bfloat16:
        return value
    bits = torch.randint(0, 2**16, value.shape, generator=generator, device=value.device, dtype=torch.int32)
    # As in the kernel: what is cut off below a bfloat16's digits carries over with the probability of its size.
    carried = ((value.contiguous().view(torch.int32) + bits) & -(2**16)).view(torch.float32)
    return torch.where(value.isfinite(), carried, value)


@fake_kernel("adamw_")
def _(params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps, **options):
    check_devices(
        "adamw_",
        params=params,
        grads=grads,
        exp_avgs=exp_avgs,
        exp_avg_sqs=exp_avg_sqs,
        max_exp_avg_sqs=max_exp_avg_sqs,
        state_steps=state_steps,
    )


class _OverrideAdamW(Override, AdamW):
    """metalcore.optim.AdamW in the place of torch.optim.AdamW."""


register(
    Op(
        "adamw",
        AdamW,
        namesake="torch.optim.AdamW",
        call=steps_of(MOMENTS),
        operators=("adamw_",),
        override=OptimizerOverride(torch.optim.AdamW, _OverrideAdamW, "_fused_adamw_"),
        backward=False,
        waits=True,
        samples=lambda: (
            sample_of_steps("three parameters"),
            sample_of_steps("amsgrad", amsgrad=True),
            sample_of_steps("steps on the device", fused=True),
        ),
        production=lambda hidden_size=512, layers=2: sample_of_steps(
            "", ((hidden_size, hidden_size), (hidden_size,)) * layers
        ),
    )
)
