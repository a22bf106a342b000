"""Estimates of how long dispatches take on a chip, with intervals from the errors of measured kernels of their kind."""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..recording import Recording, record
from . import chips
from .chips import Chip
from .counts import Counted, counting
from .model import Parameters, Times, cycles_of, kind_of, times

# A kind of which nine in ten measured kernels do not lie within this factor gets no figure, nor one of fewer rows.
MOST = 1.0
LEAST_ROWS = 4


@functools.cache
def fitted() -> tuple[Parameters, dict[str, dict[str, float]]]:
    """Returns the model's parameters and the errors by kind, which benchmarks/apple wrote."""
    content = json.loads((Path(__file__).parent / "fitted.json").read_text(encoding="utf-8"))
    return Parameters(**content["parameters"]), content["errors"]


class Step(NamedTuple):
    """An estimated dispatch.

    Attributes:
        counted: what it does.
        times: seconds by resource, and in all.
        kind: the kind of measured kernels that it is like.
        low, high: between which nine in ten of its kind lie; None where there is no figure.
        why: why there is none, or "".
    """

    counted: Counted
    times: Times
    kind: str
    low: float | None
    high: float | None
    why: str


def step(counted: Counted, chip: Chip) -> Step:
    """Returns the estimate of a dispatch."""
    parameters, errors = fitted()
    parts = times(counted, chip, parameters)
    kind = kind_of(counted, parts, chip)
    known = errors.get(kind)
    if known is None or known["rows"] < LEAST_ROWS:
        why = f"fewer than {LEAST_ROWS} public measurements of kernels like it ({kind})"
    elif known["ninth"] > MOST:
        why = f"estimates of kernels like it ({kind}) are wrong by {known['ninth']:.0%} and more"
    else:
        factor = 1 + known["ninth"]
        return Step(counted, parts, kind, parts.total / factor, parts.total * factor, "")
    return Step(counted, parts, kind, None, None, why)


class Estimate:
    """Estimated times of a call's dispatches on a chip that none of them has run on.

    Attributes:
        chip: the chip.
        steps: the dispatches, in order.
        seconds: the estimate, or None where one of the dispatches has none.
        low, high: its interval.
        why: why there is no estimate, or "".
        by_torch: the names of PyTorch's operators in between, which are not in the estimate.

    Example:
        >>> found = metalcore.estimate(metalcore.relu, torch.ones(64, device="mps"), gpu="m2-pro")
        >>> found.steps[0].times.bound
        'launch'
    """

    def __init__(self, chip: Chip, counted: Sequence[Counted], recording: Recording | None = None):
        self.chip = chip
        self.steps = tuple(step(each, chip) for each in counted)
        self.recording = recording
        self.by_torch = tuple(name for _, name in recording.torch_steps) if recording else ()
        # A dispatch without a figure that takes no part of the time to speak of does not keep the others from theirs.
        total = sum(each.times.total for each in self.steps)
        unsure = [each for each in self.steps if each.why and each.times.total > 0.05 * total]
        self.why = "; ".join(dict.fromkeys(f"{each.counted.kernel}: {each.why}" for each in unsure))
        self.seconds = self.low = self.high = None
        if not self.why:
            self.seconds = total
            self.low = sum(each.times.total / 2 if each.low is None else each.low for each in self.steps)
            self.high = sum(each.times.total * 2 if each.high is None else each.high for each in self.steps)

    @property
    def lines(self) -> Counter:
        """The part of the arithmetic, by (file, line) of the kernels."""
        found: Any = Counter()
        parameters = fitted()[0]
        for each in self.steps:
            for place, kinds in each.counted.lines.items():
                found[place] += sum(n * cycles_of(kind, self.chip, parameters) for kind, n in kinds.items())
        total = sum(found.values()) or 1.0
        shares: Any = {place: cycles / total for place, cycles in found.items()}
        return Counter(shares)

    def as_dict(self) -> dict[str, Any]:
        """Returns the estimate as lists, dicts, strings and numbers, for JSON. Times are in seconds."""
        steps = [
            {
                "kernel": each.counted.kernel,
                "threads": each.counted.threads,
                "threadgroup": each.counted.group,
                "registers": each.counted.registers,
                "sampled": [each.counted.sampled, each.counted.groups],
                "kind": each.kind,
                "bound": each.times.bound,
                "resources": each.times._asdict(),
                "interval": [each.low, each.high],
                "why": each.why,
                "instructions": {kind: round(n) for kind, n in each.counted.instructions.most_common()},
            }
            for each in self.steps
        ]
        lines = [[*place, round(part, 4)] for place, part in self.lines.most_common(20)]
        return {
            "estimate": self.seconds,
            "interval": [self.low, self.high],
            "why": self.why,
            "gpu": self.chip._asdict(),
            "by_torch": [*self.by_torch],
            "steps": steps,
            "lines": lines,
        }

    def __str__(self):
        from .picture import text

        return text(self)

    def svg(self) -> str:
        """Returns a picture of the times by resource and by line."""
        from .picture import svg

        return svg(self)


def estimate(function: Callable, *arguments: Any, gpu: str = "m1", **options: Any) -> Estimate:
    """Estimates how long the kernels of a call take on one of Apple's GPUs, which need not be there.

    The call runs on the simulated device, where a sample of each kernel's threadgroups is counted; tables of tuning are
    those of the chip's family. Estimates are no measurements: their interval says how far nine in ten lie off for
    kernels of others that were measured. The host's time and PyTorch's own operators are not in them.

    Args:
        function: anything that calls metalcore's ops or kernels of compile_shader(): an op, a module, a program, what
            was captured, a train step. What was captured is planned anew for the chip; a train step makes a step.
        arguments: its arguments; tensors are on the simulated `mps` device.
        gpu: "m1" to "m5", with -pro, -max or -ultra behind it, and the number of cores behind that where it is not the
            largest: "m3-max-30".
        options: its keyword arguments.

    Returns:
        An Estimate. `print` shows it.

    Raises:
        ValueError: there is no such GPU.
        RuntimeError: this is no simulated device.
        CompilerNotFoundError: there is no Clang to compile kernels that count.

    Example:
        >>> x = torch.ones(512, 512, device="mps")
        >>> found = metalcore.estimate(metalcore.matmul, x, x, gpu="m1-max")
        >>> found.low < found.seconds < found.high
        True
    """
    chip = chips.find(gpu)
    # Backward runs on this thread, so that its operators of PyTorch are seen.
    plans = counting(family=chip.family, cores=chip.cores, registers=True)
    with plans as counted, torch.autograd.set_multithreading_enabled(False):
        _, recording = record(function, *arguments, **options)
    return Estimate(chip, counted, recording)
