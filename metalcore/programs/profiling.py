"""How long the operations of a program take."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter

from ..recording import record
from .report import PLACES, Step

__all__ = ["Profile", "Timing", "profile"]

_COLORS = {
    "metalcore": "#3b7dd8",
    "generated": "#38a169",
    "torch": "#d69e2e",
    "cpu": "#c53030",
    "transfer": "#805ad5",
    "view": "#a0aec0",
}


class Timing(NamedTuple):
    """The time that an operation took.

    Attributes:
        step: the operation.
        kernels: the names of metalcore's kernels that it runs.
        seconds: the median of its times. The device is waited for after each operation.

    Example:
        >>> x = torch.ones(2, 4, device="mps")
        >>> profile = metalcore.compile(metalcore.nn.RMSNorm(4, device="mps").eval(), (x,)).profile(x)
        >>> profile.timings[0].seconds > 0
        True
    """

    step: Step
    kernels: tuple[str, ...]
    seconds: float

    @property
    def bandwidth(self) -> float:
        """Bytes a second, of those that it reads and writes at least."""
        return self.step.nbytes / self.seconds if self.seconds else 0.0


class Profile(NamedTuple):
    """The profile of a program: how long each of its operations took.

    Attributes:
        timings: of its operations, in order.
        total: the median time of whole runs in seconds, in which nobody waits between operations.
        device: where it ran.

    Example:
        >>> x = torch.ones(2, 4, device="mps")
        >>> profile = metalcore.compile(metalcore.nn.RMSNorm(4, device="mps").eval(), (x,)).profile(x)
        >>> profile.total > 0
        True
    """

    timings: tuple[Timing, ...]
    total: float
    device: str

    def seconds(self, place: str) -> float:
        """Returns the sum of the times of one of the places of a report."""
        return sum(timing.seconds for timing in self.timings if timing.step.place == place)

    def __str__(self):
        alone = sum(timing.seconds for timing in self.timings)
        lines = [
            f"a run on {self.device}: {_ms(self.total)}; its {len(self.timings)} operations one by one: {_ms(alone)}"
        ]
        for place, words in PLACES.items():
            if any(timing.step.place == place for timing in self.timings):
                lines.append(f"  {_ms(self.seconds(place)):>10}  {_share(self.seconds(place), alone):>4}  {words}")
        lines += ["", f"{'time':>10}  {'':4}  {'GB/s':>8}  operation"]
        for timing in sorted(self.timings, key=lambda timing: -timing.seconds):
            if timing.step.place != "view":
                lines.append(
                    f"{_ms(timing.seconds):>10}  {_share(timing.seconds, alone):>4}  {timing.bandwidth / 1e9:8.3g}  "
                    f"{timing.step.name}: {timing.step.operator}{_listed(timing.kernels)}"
                )
        return "\n".join(lines)

    def to_json(self) -> str:
        """Returns the profile as a text in JSON."""
        rows = [
            {**timing.step._asdict(), "kernels": list(timing.kernels), "seconds": timing.seconds}
            for timing in self.timings
        ]
        return json.dumps({"device": self.device, "total": self.total, "operations": rows}, indent=1)

    def trace(self) -> str:
        """Returns the operations one after the other, in the format of Chrome's tracing, which Perfetto shows."""
        events, begin = [], 0.0
        for timing in self.timings:
            step = timing.step
            events.append(
                {
                    "name": step.operator,
                    "cat": step.place,
                    "ph": "X",
                    "ts": begin * 1e6,
                    "dur": timing.seconds * 1e6,
                    "pid": 0,
                    "tid": 0,
                    "args": {"value": step.name, "bytes": step.nbytes, "kernels": list(timing.kernels)},
                }
            )
            begin += timing.seconds
        return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})

    def picture(self) -> str:
        """Returns a timeline, as SVG. Each operation shows its name where the pointer is."""
        width, whole = 1200, sum(timing.seconds for timing in self.timings) or 1.0
        parts, begin = [], 0.0
        for timing in self.timings:
            step, size = timing.step, timing.seconds / whole * width
            title = f"{step.name}: {step.operator}{_listed(timing.kernels)}, {_ms(timing.seconds)}"
            label = step.operator if size > 7 * len(step.operator) else ""
            parts.append(
                f'<g><title>{escape(title)}</title><rect x="{begin:.2f}" y="30" width="{max(size, 0.1):.2f}" '
                f'height="40" fill="{_COLORS[step.place]}" stroke="white" stroke-width="0.2"/>'
                f'<text x="{begin + 3:.2f}" y="54">{escape(label)}</text></g>'
            )
            begin += size
        legend, place_at = [], 0
        for place, words in PLACES.items():
            if seconds := self.seconds(place):
                text = f"{words}, {_ms(seconds)}"
                legend.append(
                    f'<rect x="{place_at}" y="80" width="10" height="10" fill="{_COLORS[place]}"/>'
                    f'<text x="{place_at + 14}" y="89">{escape(text)}</text>'
                )
                place_at += 30 + 7 * len(text)
        head = f'<text x="0" y="18">{escape(self.device)}: {_ms(whole)} one by one, {_ms(self.total)} as a whole</text>'
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {max(width, place_at)} 100" '
            f'font-family="sans-serif" font-size="11">{head}{"".join(parts)}{"".join(legend)}</svg>\n'
        )

    def save(self, path: str | os.PathLike) -> None:
        """Writes a file: a picture as ….svg, a trace as ….trace.json, and all numbers as another ….json.

        Raises:
            ValueError: the name has another ending.
        """
        name = Path(path).name
        kinds = ((".svg", self.picture), (".trace.json", self.trace), (".json", self.to_json))
        text = next((make() for ending, make in kinds if name.endswith(ending)), None)
        if text is None:
            raise ValueError(f"{name} must end in .svg, .trace.json or .json")
        Path(path).write_text(text)


def profile(
    module: GraphModule, steps: Sequence[Step], inputs: Sequence[Any], run: Callable[[], Any], repeats: int
) -> Profile:
    """Times the operations of a planned graph, for flat inputs. `run` runs all of it."""
    if type(repeats) is not int or repeats < 1:
        raise ValueError(f"repeats must be a number of 1 and more, not {repeats!r}")
    tensors = [value for value in [*inputs, *module.buffers(), *module.parameters()] if isinstance(value, Tensor)]
    device = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), torch.device("cpu"))
    wait = _nothing if device.type == "cpu" else getattr(torch, device.type).synchronize
    run()
    totals = []
    for _ in range(repeats):
        wait()
        begin = time.perf_counter()
        run()
        wait()
        totals.append(time.perf_counter() - begin)
    named = _Named(module)
    named.run(*inputs)
    timed = _Timed(module, wait)
    for _ in range(repeats):
        timed.run(*inputs)
    timings = (
        Timing(step, named.kernels.get(step.name, ()), statistics.median(timed.seconds[step.name])) for step in steps
    )
    return Profile(tuple(timings), statistics.median(totals), str(device))


class _Named(Interpreter):
    """Notes the kernels of each operation."""

    def __init__(self, module):
        super().__init__(module)
        self.kernels: dict[str, tuple[str, ...]] = {}

    def run_node(self, n):
        if n.op != "call_function":
            return super().run_node(n)
        result, recording = record(super().run_node, n)
        self.kernels[n.name] = tuple(recording.kernels)
        return result


class _Timed(Interpreter):
    """Notes how long each operation takes, until the device is done with it."""

    def __init__(self, module, wait):
        super().__init__(module)
        self.wait = wait
        self.seconds: dict[str, list[float]] = {}

    def run_node(self, n):
        if n.op != "call_function":
            return super().run_node(n)
        begin = time.perf_counter()
        result = super().run_node(n)
        self.wait()
        self.seconds.setdefault(n.name, []).append(time.perf_counter() - begin)
        return result


def _nothing():
    pass


def _ms(seconds):
    return f"{seconds * 1e3:.3f} ms"


def _share(part, whole):
    return f"{100 * part / whole:.0f}%" if whole else ""


def _listed(kernels):
    return f" ({', '.join(dict.fromkeys(kernels))})" if kernels else ""
