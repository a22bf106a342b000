"""A program: a graph that is traced, fused and planned, for one set of shapes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from .._core.routing import DEVICES
from . import generated
from .ir import tensors_of, value
from .options import Options
from .passes.clean import clean
from .passes.groups import group_pointwise
from .passes.transfers import put_on_cpu
from .planning import bind_arena, make_plan
from .report import Report, steps_of
from .rewriting import Rewritten

__all__ = ["Program", "finish"]


class Program:
    """A callable with fixed shapes, dtypes and devices, which returns what the module that it was made of returns.

    `program(*args, **kwargs)` takes arguments like the examples. A wrong one raises a ValueError before anything runs.
    """

    def __init__(self, module: GraphModule, report: Report, arena: Tensor | None, specs=None):
        self._module, self._report, self._arena = module, report, arena
        self._in_spec: TreeSpec | None
        self._in_spec, self._out_spec = specs or (None, None)
        self._lock = threading.Lock()
        self._expected = [(node.target, value(node)) for node in module.graph.nodes if node.op == "placeholder"]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        flat, spec = tree_flatten((args, kwargs))
        if spec != self._in_spec:
            raise ValueError(f"this program takes arguments like {self._in_spec}, and these are like {spec}")
        with torch.no_grad():
            results = self.run(*self._checked(flat))
        return tree_unflatten(results, self._out_spec)  # pyright: ignore[reportArgumentType]

    def run(self, *flat: Any) -> Any:
        """Runs it on flat arguments, which are not checked, and returns flat results."""
        if self._arena is None:
            return self._module.forward(*flat)
        with self._lock:  # the memory of values in between is the program's own
            return self._module.forward(*flat)

    def _checked(self, flat):
        if len(flat) != len(self._expected):
            raise ValueError(f"this program takes {len(self._expected)} values, and not {len(flat)}")
        return [_check(given, name, expected) for given, (name, expected) in zip(flat, self._expected)]

    def report(self) -> Report:
        """Where each operation runs and what it costs, what was fused, and how much memory it takes."""
        return self._report

    def describe(self) -> str:
        """All operations with their places, and all values with their memory, in text."""
        lines = ["operations:"]
        lines += [f"  {s.name}: {s.operator}, {s.place}, {s.nbytes} bytes" for s in self._report.steps]
        lines.append("values:")
        for v in self._report.plan.values:
            where = f", arena at {v.offset}" if v.offset is not None else ""
            size = "×".join(map(str, v.shape)) or "scalar"
            dtype = str(v.dtype).removeprefix("torch.")
            lines.append(f"  {v.name}: {v.kind}, {dtype} {size}, operations {v.first} to {v.last}{where}")
        return "\n".join([*lines, str(self._report)])


def _check(given, name, expected):
    if not isinstance(expected, Tensor):
        if type(given) is not type(expected) and expected is not None or expected != given:
            raise ValueError(f"{name}: this program is for {expected!r}, and not for {given!r}")
        return given
    if not isinstance(given, Tensor):
        raise ValueError(f"{name} must be a tensor, and is of type {type(given).__name__}")
    for what in ("shape", "dtype", "device"):
        wanted, found = getattr(expected, what), getattr(given, what)
        if wanted != found:
            raise ValueError(f"{name}: this program is for {what} {_text(wanted)}, and not for {_text(found)}")
    if given.stride() == expected.stride():
        return given
    return torch.empty_strided(expected.shape, expected.stride(), dtype=given.dtype, device=given.device).copy_(given)


def _text(thing):
    return list(thing) if isinstance(thing, torch.Size) else thing


def finish(module: GraphModule, options: Options, fused: Sequence[Rewritten] = (), notes=(), specs=None) -> Program:
    """Cleans, partitions and plans a graph whose patterns are fused."""
    clean(module)
    if options.generates:
        group_pointwise(module, generated.build)
    put_on_cpu(module)
    device = _device_of(module)
    arena_device = device if options.memory == "arena" else None
    plan = make_plan(module, arena_device)
    steps = steps_of(module)
    arena = bind_arena(module, plan, arena_device) if arena_device is not None else None
    module.graph.lint()
    module.recompile()
    return Program(module, Report(steps, tuple(fused), plan, tuple(notes)), arena, specs)


def _device_of(module):
    devices = [t.device for node in module.graph.nodes for t in tensors_of(node)]
    return next((d for d in devices if d.type in DEVICES), devices[0] if devices else None)
