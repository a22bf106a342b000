"""Times each override beside PyTorch's own op. enable_pytorch_overrides() without names reads what is found."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .. import overrides
from .._core.registry import OPS, Op, Sample
from ..tuning.search import Clock
from . import libraries

__all__ = ["Gain", "measure", "names"]

MOST = 1000.0  # the gain where PyTorch's op fails


@dataclass(frozen=True)
class Gain:
    """What was measured of an override.

    Attributes:
        inference, training: PyTorch's time over ours; training is None for an op without a derivative.
    """

    name: str
    inference: float
    training: float | None

    def __str__(self):
        training = "" if self.training is None else f", {self.training:.2f} times in training"
        return f"{self.inference:.2f} times as fast as PyTorch's in inference{training}"


def names() -> list[str]:
    """Returns the overrides of ops that can be called, in the registry's order."""
    return [name for name in overrides.NAMES if name in OPS]


def measure(name: str, device_type: str, clock: Clock) -> Gain:
    """Times an op's production sample with PyTorch's function, without the override and with it. Where the override
    replaces libraries' modules, PyTorch's operators that they are written in are timed beside our function."""
    op = OPS[name]
    sample = op.production()

    def gain(training):
        theirs = _seconds(clock, op, sample, device_type, op.reference, training)
        if op.override is None or name in libraries.NAMES and op.namesake is None:
            ours = _seconds(clock, op, sample, device_type, op.function, training)
        else:
            with overrides.request([name]):
                ours = _seconds(clock, op, sample, device_type, op.reference, training)
        return MOST if theirs is None else 0.0 if ours is None else min(theirs / ours, MOST)

    return Gain(name, gain(False), gain(True) if op.backward and sample.backward else None)


def _seconds(clock, op: Op, sample: Sample, device_type, function, training):
    try:
        return clock.time(_call(op, sample, device_type, function, training)).seconds
    except RuntimeError:  # PyTorch may lack the op, or memory
        return None


def _call(op: Op, sample: Sample, device_type, function, training) -> Callable[[], object]:
    tensors = sample.make(device_type, torch.float32)
    if not training:
        arguments = sample.arguments(*tensors)
        return torch.no_grad()(functools.partial(op.call, function, *arguments, **sample.options))
    tensors = [tensor.requires_grad_() for tensor in tensors]
    ones: list = []

    def call():
        outputs = [output for output in op.compute(sample, tensors, function) if output.requires_grad]
        if not ones:
            ones.extend(torch.ones_like(output) for output in outputs)
        return torch.autograd.grad(outputs, tensors, ones, allow_unused=True)

    return call
