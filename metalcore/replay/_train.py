"""compile_train_step(): forward, backward, clipping and the optimizer's step as one replay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..optim import clip_grad_norm_
from ..optim._multi_tensor import MultiTensor
from ..recording import planned_for_another
from ._capture import record
from ._inputs import Inputs

__all__ = ["TrainStep", "compile_train_step"]


class TrainStep:
    """A training step: called with a batch, it updates the model's parameters and returns the loss.

    Attributes:
        replay: the recorded step, with what it is made of, or None before it is recorded.
        grad_norm: the norm of the last step's gradients before they were clipped; None without max_norm. The next step
            overwrites it.

    Example:
        >>> model = metalcore.nn.RMSNorm(4, device="mps")
        >>> optimizer = metalcore.optim.AdamW(model.parameters())
        >>> step = metalcore.compile_train_step(model, lambda y: y.sum(), optimizer, torch.ones(2, 4, device="mps"))
        >>> type(step).__name__, step(torch.ones(2, 4, device="mps")).shape
        ('TrainStep', torch.Size([]))
    """

    def __init__(self, model, loss_fn, optimizer, batch, *, max_norm, warmup, segments):
        if not isinstance(optimizer, MultiTensor) and not _is_overridden(type(optimizer)):
            raise TypeError(
                f"compile_train_step: the optimizer must be one of metalcore.optim's, not {type(optimizer).__name__}"
            )
        if isinstance(warmup, bool) or not isinstance(warmup, int) or warmup < 1:
            raise ValueError(f"compile_train_step: warmup must be at least one step, not {warmup!r}")
        self._model, self._loss_fn, self._optimizer = model, loss_fn, optimizer
        self._max_norm, self._segments, self._eager_steps = max_norm, segments, warmup
        self._inputs = Inputs("train step", (batch,) if isinstance(batch, Tensor) else tuple(batch), bind=False)
        if not self._inputs.tensors:
            raise ValueError("compile_train_step: the batch has no tensors")
        self._params = self._trained()
        if not self._params:
            raise ValueError("compile_train_step: the optimizer has no parameters that require gradients")
        for group in (optimizer.defaults, *optimizer.param_groups):
            if "capturable" in group:
                group["capturable"] = True
        self.replay = self.grad_norm = self._direction = None
        self._state = self._tensors()
        optimizer.register_load_state_dict_post_hook(self._forget)

    def __call__(self, *batch: Tensor) -> Tensor:
        self._inputs.check(batch)
        self._inputs.copy(batch)
        if self._tensors() != self._state:
            self._forget()
        if planned_for_another.is_set():  # a recording has this GPU's plans
            loss, self.grad_norm = self._step(*self._inputs.tensors)
            self._forget()
        elif self._eager_steps:
            self._eager_steps -= 1
            loss, self.grad_norm = self._step(*self._inputs.tensors)
            self._state = self._tensors()
        elif self.replay is None or self._options() != self._recorded_options:
            loss, self.grad_norm = self._record()
        else:
            self._set_rates()
            self.replay.run()
            torch.autograd.graph.increment_version(self._params)
            loss, self.grad_norm = self._result
        return loss.clone()

    def _trained(self) -> list[Tensor]:
        return [p for group in self._optimizer.param_groups for p in group["params"] if p.requires_grad]

    def _step(self, *batch):
        """Runs one step, on the batch's tensors where they are."""
        self._params = self._trained()
        with torch.enable_grad():
            loss = self._loss_fn(self._model(batch[0]), *batch[1:])
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                kind = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
                raise TypeError(f"train step: loss_fn must return a tensor of one number, not {kind}")
            if self._direction is None:  # autograd would make it anew at each step
                self._direction = torch.ones_like(loss, requires_grad=False)
            gradients = torch.autograd.grad(loss, self._params, self._direction, allow_unused=True)
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None  # also those that are frozen by now
        for parameter, gradient in zip(self._params, gradients):
            parameter.grad = gradient
        norm = None if self._max_norm is None else clip_grad_norm_(self._params, self._max_norm)
        self._optimizer.step()
        return loss.detach(), norm

    def _record(self):
        """Runs one step and records it. The recording reads the learning rates from memory."""
        self.replay = None  # its memory is free for the new one
        self._recorded_options = self._options()
        rates = [group["lr"] for group in self._optimizer.param_groups]
        self._rates = [torch.zeros((), device=self._params[0].device) for _ in rates]
        self._last_rates = [None] * len(rates)
        self._set_rates()
        for group, rate in zip(self._optimizer.param_groups, self._rates):
            if not isinstance(group["lr"], Tensor):
                group["lr"] = rate
        try:
            self._result, self.replay = record(
                "train step", self._step, self._inputs.tensors, bind=False, segments=self._segments
            )
        finally:
            for group, rate in zip(self._optimizer.param_groups, rates):
                group["lr"] = rate
        return self._result

    def _set_rates(self):
        for i, group in enumerate(self._optimizer.param_groups):
            rate = group["lr"]
            if not isinstance(rate, Tensor) and rate != self._last_rates[i]:
                self._rates[i].fill_(rate)
                self._last_rates[i] = rate

    def _options(self) -> list[dict[str, Any]]:
        """Returns what is fixed in a recording: the groups' options."""
        return [
            {name: _identity(value) if name == "lr" else value for name, value in group.items() if name != "params"}
            for group in self._optimizer.param_groups
        ]

    def _tensors(self) -> list[Any]:
        """Returns what tells whether the optimizer still has the same tensors of parameters and states, and trains
        them."""
        state = self._optimizer.state
        return [
            (id(p), p.requires_grad, p.data_ptr(), id(state.get(p)))
            for group in self._optimizer.param_groups
            for p in group["params"]
        ]

    def _forget(self, *_):
        """Forgets the recording: the optimizer has other tensors. The next step makes them ready, and the one after is
        recorded."""
        for group in self._optimizer.param_groups:
            if "capturable" in group:
                group["capturable"] = True
        self.replay, self._eager_steps = None, max(self._eager_steps, 1)

    def __str__(self):
        return "a train step that is not recorded yet" if self.replay is None else "\n".join(self.replay.lines())


def _identity(value):
    """Returns what tells whether a recording uses the right rate. The value of one that is a number may change."""
    return id(value) if isinstance(value, Tensor) else None


def _is_overridden(kind):
    """Returns whether an override steps optimizers of this very class (metalcore/overrides/_functions.py)."""
    return bool(getattr(vars(kind).get("step"), "metalcore_switch", False))


def compile_train_step(
    model: Callable[[Tensor], Any],
    loss_fn: Callable[..., Tensor],
    optimizer: torch.optim.Optimizer,
    batch: Tensor | Sequence[Tensor],
    *,
    max_norm: float | None = None,
    warmup: int = 2,
    segments: bool = True,
) -> TrainStep:
    """Makes one replay of a training step: forward, backward, clipping of the gradients, the optimizer's update.

    The step is called with a batch, as in `loss = step(x, y)`. It computes loss_fn(model(x), y, …) and the gradients of
    the optimizer's parameters, clips these to `max_norm`, and updates. The first `warmup` calls are ordinary steps; the
    next one is recorded, and later ones replay it. All of them count as steps, on their own batches.

    - Learning rates may change from step to step, as schedulers do: they are in device memory, where the recording
      reads them. Where another option of a group changes (weight decay, betas, the parameters), that step is recorded
      anew, and so is one after optimizer.load_state_dict(). `capturable` is set, so that steps are counted on the
      device.
    - Parameters may be frozen, added to the optimizer, or get other memory: the next step is an ordinary one then, and
      the one after is recorded.
    - state_dict() and load_state_dict() of the model and of the optimizer work at any time: the replay updates their
      tensors in place.
    - zero_grad() is not needed: gradients are computed anew, and not accumulated. `.grad` has the last ones, clipped.
      Hooks on parameters' gradients do not run.
    - The model's mode is the one that it had when the step was recorded, and so is every decision of Python's.
    - On `mps`, PyTorch's own operators (a linear layer's products where no kernel of metalcore takes them) run between
      the recorded parts, with the same tensors at each step, and random ones draw new numbers. str(step) names them
      and counts the parts. With segments=False they are refused with their names. On `cuda` they are in the graph.

    Args:
        model: is called with the first tensor of a batch.
        loss_fn: is called with the model's result and the batch's other tensors, and returns a scalar.
        optimizer: AdamW, SGD or Lion of metalcore.optim.
        batch: an example; later batches have its shapes, dtypes and device.
        max_norm: the largest norm of all gradients, as of clip_grad_norm_.
        warmup: ordinary steps before the recorded one, at least one: the optimizer makes its state in them.
        segments: lets PyTorch's operators run between recorded parts.

    Raises:
        CaptureError: by the step that is recorded, for what a replay cannot repeat (see capture).
        TypeError, ValueError: arguments do not fit, or a later batch does not, before anything runs; the loss is no
            tensor of one number.

    Example:
        >>> model = metalcore.nn.RMSNorm(4, device="mps")
        >>> optimizer = metalcore.optim.AdamW(model.parameters())
        >>> step = metalcore.compile_train_step(model, lambda y: y.sum(), optimizer, torch.ones(2, 4, device="mps"))
        >>> step(torch.ones(2, 4, device="mps")).shape
        torch.Size([])
    """
    return TrainStep(model, loss_fn, optimizer, batch, max_norm=max_norm, warmup=warmup, segments=segments)
