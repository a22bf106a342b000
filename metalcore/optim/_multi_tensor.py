"""What optimizers have in common whose step is one kernel over many parameters: the step itself, that of an
optimizer of torch.optim under enable_pytorch_overrides(), and how the registry runs them on samples."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING

import torch

from .._core.registry import Sample
from .._core.routing import FLOAT_DTYPES, accelerated
from .._core.tensors import is_dtensor

__all__ = [
    "MultiTensor",
    "Override",
    "by_kind",
    "check_devices",
    "device_scalars",
    "make_state",
    "ready_states",
    "sample_of_steps",
    "shards",
    "steps_of",
    "takes",
    "unscaled",
    "updated",
]

# PyTorch's check that a step inside torch.cuda.graph() can be replayed. It has a newer and an older name.
_check_capturable = getattr(torch.optim.Optimizer, "_accelerator_graph_capture_health_check", None) or (
    torch.optim.Optimizer._cuda_graph_capture_health_check
)
_STATE_DTYPES = (None, torch.float32, torch.bfloat16)


_Base = torch.optim.Optimizer if TYPE_CHECKING else object


class MultiTensor(_Base):
    """An optimizer, before PyTorch's class among the bases, whose step gives parameters to a kernel or to PyTorch.

    A class defines `_step_by_kernel(group, params, grads)`, `_step_by_torch(group)` and the names of the entries of
    a parameter's state that may have a dtype of their own.

    Attributes:
        OPTIONS: the names of the attributes of an optimizer that PyTorch's class does not have.
        state_dtype: the dtype of those entries; None is the parameter's dtype.
        COUNTS_ON_HOST: whether the host counts steps, except in groups with `capturable=True`. A CUDA graph cannot
            repeat that, so that a step refuses to be captured.
    """

    STATES: tuple[str, ...] = ()
    OPTIONS: tuple[str, ...] = ("state_dtype",)
    COUNTS_ON_HOST = False
    state_dtype: torch.dtype | None = None

    def _set_state_dtype(self, dtype):
        if dtype not in _STATE_DTYPES:
            raise ValueError(f"state_dtype must be float32, bfloat16 or None, the parameter's dtype, not {dtype}")
        self.state_dtype = dtype

    def __getstate__(self):
        own = {name: self.__dict__[name] for name in self.OPTIONS if name in self.__dict__}
        return {**super().__getstate__(), **own}

    def step(self, closure=None):  # pyright: ignore[reportIncompatibleMethodOverride]
        """Updates the parameters that have gradients, and returns the loss. `closure`, if given, computes the loss."""
        if self.COUNTS_ON_HOST:
            self._refuse_capture()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.set_grad_enabled(self.defaults.get("differentiable", False)):
            for group in self.param_groups:
                self._step_group(group)
        return loss

    def _refuse_capture(self):
        if "capturable" in self.defaults:
            _check_capturable(self)
        elif any(p.is_cuda for group in self.param_groups for p in group["params"]):
            if torch.cuda.is_current_stream_capturing():
                name = type(self).__name__
                raise RuntimeError(f"{name}.step() counts on the host, so that a CUDA graph cannot capture it")

    def load_state_dict(self, state_dict):
        """Loads the state of this optimizer, or of its namesake in torch. Both have the same entries."""
        if self.state_dtype is None:
            return super().load_state_dict(state_dict)
        # Optimizer.load_state_dict rounds floating-point state to the parameter's dtype. The pre-hook runs after all
        # other pre-hooks, and sees the state that will be loaded. The post-hook runs before all others.
        saved = {}
        record = self.register_load_state_dict_pre_hook(lambda _, loaded: saved.update(loaded))
        restore = self.register_load_state_dict_post_hook(lambda _: self._restore_states(saved), prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            record.remove()
            restore.remove()

    def _restore_states(self, saved):
        ids = [key for group in saved["param_groups"] for key in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for key, p in zip(ids, params):
            for name in self.STATES:
                value = saved["state"].get(key, {}).get(name)
                if value is not None and accelerated(p):
                    self.state[p][name] = value.to(device=p.device, dtype=self.state_dtype)

    def _step_group(self, group):
        for_kernel, for_torch = [], []
        for params, grads in by_kind((p, p.grad) for p in group["params"]):
            if not group.get("differentiable") and takes(params[0], grads[0]):
                for_kernel.append((params, grads))
            else:
                for_torch += params
        # PyTorch's code comes first, because it may refuse its parameters while nothing has changed.
        if for_torch:
            self._step_by_torch({**group, "params": for_torch})
        for params, grads in for_kernel:
            self._step_by_kernel(group, params, grads)

    def _step_by_kernel(self, group, params, grads):
        raise NotImplementedError

    def _step_by_torch(self, group):
        raise NotImplementedError


LEFT = "parameters on a device, or of a dtype or kind, that its kernel does not take"


_OverrideBase = MultiTensor if TYPE_CHECKING else object


class Override(_OverrideBase):
    """Steps an optimizer of torch.optim, whose class, attributes and checkpoints stay as they are. Its state has
    torch's dtypes. Counts which steps the kernel took."""

    __slots__ = ("_count",)

    @classmethod
    def step_of(cls, optimizer, count, closure=None):
        """Runs MultiTensor.step() for an optimizer of PyTorch's class, counted by an override's `count`."""
        stepper = object.__new__(cls)
        stepper.__dict__ = optimizer.__dict__  # the same state, groups and hooks, for as long as the step takes
        stepper._count = count  # a slot, beside that dictionary
        return MultiTensor.step(stepper, closure)

    def _step_by_kernel(self, group, params, grads):
        self._count.run(super()._step_by_kernel, group, params, grads)

    def _step_by_torch(self, group):
        self._count.left[LEFT] += 1
        super()._step_by_torch(group)


def by_kind(pairs):
    """Returns lists of parameters and of their gradients, with one list of each for every kind. A kind decides whether
    a kernel takes a parameter, and one call takes parameters of one kind: placed alike, if they are DTensors.
    Parameters without gradient are left out. PyTorch makes sure that a gradient is on its parameter's device."""
    kinds, last, params, grads = {}, None, [], []
    cls, placed = None, False  # a type, and whether it is DTensor's
    for p, grad in pairs:
        if grad is not None:
            if type(p) is not cls:
                cls, placed = type(p), is_dtensor(p)
            kind = cls, p.device, p.dtype, grad.dtype, grad.layout
            if placed:
                kind = *kind, p.device_mesh, p.placements
            if kind != last:
                params, grads = kinds.setdefault(kind, ([], []))
                last = kind
            params.append(p)
            grads.append(grad)
    return list(kinds.values())


def takes(p, grad):
    """Returns whether the kernels take a parameter with its gradient. Of DTensors they take each rank's shard."""
    plain = type(p) is torch.nn.Parameter or not hasattr(p, "__tensor_flatten__") or is_dtensor(p)
    return plain and p.dtype is grad.dtype and accelerated(p, grad)


def shards(params, grads, *states):
    """Returns the lists for a kernel: of DTensors, this rank's shards. Gradients are placed as their parameters are."""
    if not is_dtensor(params[0]):
        return params, grads, *states
    for p, tensor in ((p, tensor) for tensors in states for p, tensor in zip(params, tensors)):
        if not (is_dtensor(tensor) and tensor.placements == p.placements):
            raise RuntimeError(f"the state of a parameter placed {p.placements} must be placed so, too")
    grads = [grad.redistribute(p.device_mesh, p.placements) for p, grad in zip(params, grads)]
    return tuple([tensor.to_local() for tensor in tensors] for tensors in (params, grads, *states))


def device_scalars(optimizer, group, device):
    """Returns the arguments lr, lr_tensor, grad_scale and found_inf of a kernel that reads all of them from device
    memory if they are there. What GradScaler gave the optimizer is its attributes."""
    lr, lr_tensor = group["lr"], None
    if isinstance(lr, torch.Tensor):
        if lr.device == device:
            lr, lr_tensor = 0.0, lr.to(torch.float32)
        else:
            lr = float(lr)
    grad_scale, found_inf = (
        None if value is None else value.to(device, torch.float32)
        for value in (getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None))
    )
    return {"lr": float(lr), "lr_tensor": lr_tensor, "grad_scale": grad_scale, "found_inf": found_inf}


def updated(params, grads, grad_scale):
    """Lets autograd notice a backward pass through a graph that saved the old values."""
    torch.autograd.graph.increment_version(params if grad_scale is None else params + grads)


def make_state(what, p, state, name, dtype):
    """Returns a parameter's state entry in the form that a kernel takes: zeros at first, converted where it has another
    float dtype. The operator refuses what cannot be converted."""
    if name not in state:
        state[name] = torch.zeros_like(p, dtype=dtype, memory_format=torch.preserve_format)
    value = state[name]
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{what}: the state's {name!r} must be a tensor, not {type(value).__name__}")
    if value.dtype in FLOAT_DTYPES and value.dtype is not dtype:
        state[name] = value.to(dtype)
    return state[name]


_dtype = attrgetter("dtype")


def ready_states(params, states, names, dtype):
    """Returns lists of the states' entries of these names, if all are of this dtype, or else None."""
    try:
        lists = [[state[name] for state in states] for name in names]
        ready = all(set(map(_dtype, entries)) == {dtype} for entries in lists)
    except (AttributeError, KeyError):
        return None
    return lists if ready else None


def unscaled(grads, grad_scale):
    """Returns the gradients in float32 without their scale, for kernels of PyTorch's ops. They are divided by it in
    place, as the Metal kernels do."""
    if grad_scale is None:
        return [grad.float() for grad in grads]
    wide = [grad.float() * (1.0 / grad_scale) for grad in grads]
    for grad, value in zip(grads, wide):
        grad.copy_(value)
    return wide


def check_devices(what, *, state_steps=(), **lists):
    """Refuses lists on several devices, for fake kernels: one meta tensor among others would bring a call there,
    where nothing is updated."""
    device = next((tensors[0].device for tensors in lists.values() if tensors), None)
    for name, tensors in {**lists, "state_steps": state_steps}.items():
        for tensor in tensors:
            if tensor.device != device and not (name == "state_steps" and tensor.device.type == "cpu"):
                raise RuntimeError(
                    f"metalcore::{what}: {name} must be on the device of the other tensors, {device}, "
                    f"not on {tensor.device}"
                )


STEPS = 3


def sample_of_steps(name: str, shapes=((300, 57), (5,), (2049,)), **options) -> Sample:
    """Returns a sample of parameters of these shapes, and of their gradients, for `steps_of`. With so large a learning
    rate the steps, and not the start, determine the result."""
    return Sample(name, (*shapes, *shapes), {"lr": 0.5, "weight_decay": 0.1, **options}, terms=3, roundings=3)


def steps_of(states):
    """Returns a function for Op.call: the parameters, and the entries `states` of their state, after three steps.

    The first half of its tensors are the parameters, and the second half their gradients, which differ from step to
    step."""

    def run(optimizer, *tensors, **options):
        half = len(tensors) // 2
        params = [torch.nn.Parameter(tensor.detach().clone()) for tensor in tensors[:half]]
        instance = optimizer(params, **options)
        for step in range(STEPS):
            for param, grad in zip(params, tensors[half:]):
                param.grad = (grad * 2**step).roll(step)  # exact in every dtype
            instance.step()
        entries = [instance.state[param][name] for param in params for name in states if name in instance.state[param]]
        return [param.detach() for param in params] + entries

    return run
