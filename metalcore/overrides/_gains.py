"""Which overrides are on without having been asked for by name, from what was measured and from what PyTorch has.

On NVIDIA GPUs and on the simulated device these are all that were not measured to be slower than PyTorch's own. On a
Mac nobody has measured any. There an override is on by default where PyTorch has no Metal kernel of its own: where it
computes the operator by several others or by a graph of MPSGraph's, as most derivatives, or where public reports say
that its kernel fails (metalcore/mac_kernels.py has the facts). `python -m metalcore tune` measures each override
on the machine at hand, and what it finds decides there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from .. import mac_kernels
from .._core.registry import OPS, Override
from ..mac_kernels import Release
from ..tuning import store
from .libraries import NAMES as MODULES

__all__ = [
    "GAINS",
    "LEAST",
    "NOT_MEASURED",
    "SLOWER",
    "Measured",
    "by_default",
    "gain",
    "kind_of",
    "left_calls",
    "measured_gains",
    "why_off",
]

# PyTorch's time over ours, by type of device: the geometric mean of the cases of the op in benchmarks/results, forward
# and backward, of all dtypes. The figures of `cuda` are from one H100. Nobody has measured an Apple GPU.
GAINS: dict[str, dict[str, float]] = {
    "cuda": {
        "silu": 1.05,
        "gelu": 1.01,
        "softmax": 1.58,
        "log_softmax": 1.2,
        "rms_norm": 1.52,
        "adamw": 1.52,
        "solve_triangular": 2.01,
        "qr": 38.76,
        "cholesky": 2.79,
        "lu_factor": 2.16,
        "lu_solve": 2.47,
        "solve": 2.6,
        "inv": 3.12,
        "det": 3.82,
        "slogdet": 3.36,
        "eigh": 8.83,
        "svd": 25.33,
    },
}
LEAST = 0.95  # below, PyTorch's own is on: means differ by a few per cent from run to run
SLOWER = "slower there than PyTorch's own, and so not on by default"
NOT_MEASURED = (
    "PyTorch has a kernel of its own there, and nobody has measured which is faster (`python -m metalcore tune` does)"
)

# PyTorch's time over ours on this machine: in inference, and in a derivative (None where there is none). By name.
Measured = Mapping[str, tuple[float, float | None]]


def gain(name: str, device: str) -> float | None:
    """Returns PyTorch's time over ours in the built-in figures, or None where it was not measured."""
    return GAINS.get(device, {}).get(name)


def kind_of(device: str) -> str:
    """Returns the device's type, or "simulator" for the simulated `mps`."""
    return "simulator" if device == "mps" and getattr(torch._C, "_metalcore_simulates_mps", False) else device


def why_off(name: str, override: Any, kind: str, release: Release, measured: Measured) -> str | None:
    """Returns why a part of an override is not on by default, or None where it is.

    Args:
        name: the override's.
        override: one of its Overrides, or else what stands for the whole: an override of Python's functions, of an
            optimizer, or of libraries' modules (None).
        kind: of the device, as kind_of() gives it.
        release: PyTorch's.
        measured: what was measured on this machine.
    """
    figure = (
        _figure(override, measured[name]) if name in measured else gain(name, "mps" if kind == "simulator" else kind)
    )
    if figure is not None:
        return None if figure >= LEAST else SLOWER
    if kind != "mps" or not isinstance(override, Override) or override.own_calls:
        return None
    operator = override.operator
    own = mac_kernels.has_own(operator, release) and not mac_kernels.fault(operator, release)
    return NOT_MEASURED if own else None


def _figure(override, measured):
    """Returns the gain that decides about an operator: that of its pass, or of both where it serves both."""
    inference, training = measured
    if training is not None and isinstance(override, Override) and override.own_calls:
        return max(measured)  # left_calls() decides about inference
    if training is None or isinstance(override, Override) and not (override.at_autograd or override.is_backward):
        return inference
    return training if isinstance(override, Override) and override.is_backward else (inference * training) ** 0.5


def left_calls(name: str, override: Override, kind: str, measured: Measured) -> bool:
    """Returns whether an override that is on leaves those calls to PyTorch for which that has a kernel of its own
    (Override.own_calls)."""
    if override.own_calls is None or kind != "mps":
        return False
    return name not in measured or measured[name][0] < LEAST


def by_default(name: str, kinds: Mapping[str, str], release: Release, measured: Mapping[str, Measured]) -> str | None:
    """Returns why an override is off as a whole, or None where a part of it is on for one of the devices that are
    there.

    Args:
        kinds: of the devices, by their types.
        measured: as for why_off(), by the type of device.
    """
    override = OPS[name].override
    reasons = []
    for device, kind in kinds.items():
        parts: list[Any] = list(override) if isinstance(override, tuple) else [override]
        parts = [part for part in parts if not isinstance(part, Override) or device in part.devices]
        parts += [None] if name in MODULES or not parts else []
        reasons.append([why_off(name, part, kind, release, measured.get(device, {})) for part in parts])
    off = [reason for of_device in reasons for reason in of_device]
    return None if not off or any(reason is None for reason in off) else off[0]


def measured_gains(devices: Iterable[str]) -> dict[str, Measured]:
    """Returns what `python -m metalcore tune` measured of overrides on this machine, by type of device."""
    if not store.is_on():
        return {}
    return {device: store.gains(device) for device in devices}
