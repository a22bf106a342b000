"""Convolutions along time, such as causal_conv1d_fn and causal_conv1d_update in the files of transformers' models. A
file's functions are tried when a class of modules from it is met."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import types
from typing import Any

import torch

from ..._core.routing import accelerated, on_cuda
from ...sequence import causal_conv1d, causal_conv1d_update
from ...sequence._taps import WIDTHS
from .. import _report
from .formulas import agree, on_the_cpu
from .kinds import Kind
from .patches import Patch, full_name, run_counted

__all__ = ["SequenceFunctions"]

_ARGUMENTS = ("weight", "bias", "activation")
_NAMES = {"causal_conv1d_fn": "causal_conv1d", "causal_conv1d_update": "causal_conv1d_update"}


class SequenceFunctions(Kind):
    """Functions with the names and arguments of the package causal-conv1d, or of transformers' stand-ins for them."""

    def __init__(self):
        super().__init__(tuple(_NAMES.values()))

    def meet_class(self, cls):
        file = sys.modules.get(cls.__module__)
        if file is None or file in self.seen or cls.__module__.partition(".")[0] in ("torch", "metalcore"):
            return
        self.seen.add(file)
        for member, name in _NAMES.items():
            function = vars(file).get(member)
            if name not in self.active or not isinstance(function, types.FunctionType):
                continue
            state = ("conv_state",) if name == "causal_conv1d_update" else ()
            names = [each for each in inspect.signature(function).parameters if each in (*state, *_ARGUMENTS)]
            if names != [*state, *_ARGUMENTS] or not _convolves(inspect.unwrap(function), bool(state)):
                reason = "since their numbers are not those of a convolution that ends at the position"
                _report.never_replaced(name, full_name(function), reason)
                continue
            patch = self.patches[file, member] = Patch(file, member)
            take = _step if state else _sequence
            patch.install(_replacement(patch, take, _report.count_of(name, full_name(function))))


def _replacement(patch, take, count):
    packaged = importlib.util.find_spec("causal_conv1d") is not None  # its kernels are for NVIDIA GPUs
    names = tuple(inspect.signature(patch.original).parameters)

    def function(*args, **kwargs):
        if not patch.on:
            return patch.original(*args, **kwargs)

        def computed():
            given = dict(zip(names, args)) | kwargs
            x = given["x"] = given.pop(names[0])
            if not accelerated(x) or packaged and on_cuda(x):
                return None
            return take(given)

        return run_counted(count, computed, lambda: patch.original(*args, **kwargs))

    return function


def _convolution_fits(given):
    weight, activation = given["weight"], given.get("activation")
    return weight.dim() == 2 and weight.shape[1] in WIDTHS and activation in (None, "silu", "swish")


def _sequence(given):
    """Returns what causal_conv1d_fn does, or None."""
    numbers = given.get("seq_idx")
    if not _convolution_fits(given) or given.keys() & {"initial_states", "return_final_states", "final_states_out"}:
        return None
    # Models pass cu_seqlens on as well, which the package's function has not, for other ops.
    ends = given.get("cu_seqlens") if numbers is None and given["x"].shape[0] == 1 else None
    options = {"seq_idx": numbers, "activation": given.get("activation"), "cu_seqlens": ends}
    return causal_conv1d(given["x"], given["weight"], given.get("bias"), **options)


def _step(given):
    """Returns what causal_conv1d_update does, or None."""
    if not _convolution_fits(given):
        return None
    names = "x", "conv_state", "weight", "bias", "activation", "cache_seqlens", "conv_state_indices"
    return causal_conv1d_update(*(given.get(name) for name in names))


def _convolves(function, is_step):
    """Returns whether the function computes what ours does, on a few numbers."""
    generator = torch.Generator("cpu").manual_seed(1)
    shapes = (2, 3, 1 if is_step else 6), (2, 3, 4), (3, 4), (3,)
    with on_the_cpu():
        x, state, weight, bias = (torch.randn(s, generator=generator, dtype=torch.float32) for s in shapes)
        ours: Any = causal_conv1d_update if is_step else causal_conv1d
        for activation in (None, "silu"):
            states = [[state.clone()] if is_step else [] for _ in "ab"]
            options = {"activation": activation}
            if not agree(
                lambda: ours(x, *states[0], weight, bias, **options),
                lambda: function(x, *states[1], weight, bias, **options),
                64 * torch.finfo(torch.float32).eps,
                torch.float32,
                scale=x.abs().max() * weight.abs().sum(),
            ) or any(not torch.equal(a, b) for a, b in zip(*states)):
                return False
    return True
