"""One run of a function, recorded: refused where a replay would not do the same, or else made into a replay."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ..overrides.libraries.recording import as_captured
from . import _inductor
from ._graph import Graph
from ._loop import Loop
from ._tape import CaptureError, Tape, key_of, refuse_host_work, tensors_in

__all__ = ["device_of", "record"]


def device_of(tensors: Iterable[Tensor]) -> torch.device:
    """Returns where a function runs: on the device of the first tensor that is on one, or else on that of this
    machine."""
    for tensor in tensors:
        if tensor.device.type != "cpu":
            return tensor.device
    return torch.device("cuda" if torch.cuda.is_available() else "mps")


def record(
    what: str, function: Callable[..., Any], inputs: Sequence[Tensor], *, bind: bool, segments: bool
) -> tuple[Any, Loop | Graph]:
    """Runs a function once, and returns its result, with detached tensors, and its replay, which writes that result."""
    device = device_of(inputs)
    if device.type == "cuda" and not bind:
        with as_captured():
            return Graph.record(what, function, inputs)
    tape = Tape()
    try:
        with as_captured(), _inductor.refused(what):
            result = _detached(tape.record(device.type, lambda: function(*inputs)))
        _refuse(what, tape, bind, segments)
        return result, Loop(tape, inputs, _on_device(result))
    finally:
        tape.forget()


def _detached(result):
    return tree_map_only(Tensor, Tensor.detach, result)


def _on_device(result):
    """Returns the tensors of a result that are on a device, one for each storage."""
    return list({key_of(tensor): tensor for tensor in tensors_in(result) if not tensor.is_cpu}.values())


def _refuse(what, tape, bind, segments):
    refuse_host_work(what, tape)
    names = ", ".join(dict.fromkeys(tape.names))
    if names and not segments:
        raise CaptureError(
            f"{what}: PyTorch does a part of the work, which cannot be recorded on {tape.device}: {names}. "
            "segments=True calls these operators between the recorded parts"
        )
    if names and bind:
        raise CaptureError(f"{what}: bind=True needs a function of metalcore's ops alone; PyTorch does {names}")
