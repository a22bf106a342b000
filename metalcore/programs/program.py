"""A program: a graph that is traced, fused and planned, for one set of shapes."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from .._core.tensors import may_share_memory
from .ir import mutated_storages, storage_of, tensors_of, value
from .options import Options
from .passes.clean import clean, loosen_views, renew_views
from .passes.functional import join_writes
from .passes.groups import build_kernel, group_pointwise, kernel_names
from .passes.transfers import put_on_cpu
from .planning import bind_arena, make_plan
from .profiling import Profile, profile
from .report import Report, steps_of
from .rewriting import Rewritten
from .source import Source, program_device

if TYPE_CHECKING:
    from ..replay import Capture

__all__ = ["Program", "finish"]


class Program:
    """A callable with fixed shapes, dtypes and devices, which returns what the module that it was made of returns.

    `program(*args, **kwargs)` takes arguments like the examples. A wrong one raises a ValueError before anything runs.

    Example:
        >>> x = torch.ones(2, 4, device="mps")
        >>> program = metalcore.compile(metalcore.nn.RMSNorm(4, device="mps").eval(), (x,))
        >>> program(x).shape
        torch.Size([2, 4])
    """

    def __init__(self, module: GraphModule, report: Report, arena: Tensor | None, source: Source | None = None):
        self._module, self._report, self._arena, self.source = module, report, arena, source
        self._in_spec: TreeSpec | None
        self._in_spec, self._out_spec = source.specs if source else (None, None)
        self._lock = threading.Lock()
        inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
        self._expected = [(node.target, value(node)) for node in inputs]
        mutated = mutated_storages(module.graph)
        self._written = [i for i, node in enumerate(inputs) if any(storage_of(t) in mutated for t in tensors_of(node))]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        passed = self._given(args, kwargs)
        flat = self._checked(passed)
        with torch.no_grad():
            results = self.run(*flat)
            for at in self._written:  # the caller's tensor may have other strides, and a copy took its place
                if flat[at] is not passed[at]:
                    passed[at].copy_(flat[at])
        return tree_unflatten(results, self._out_spec)  # pyright: ignore[reportArgumentType]

    def _flat(self, args, kwargs):
        return self._checked(self._given(args, kwargs))

    def _given(self, args, kwargs):
        """Returns the flat arguments. Keywords may have any order, as in every call, and so may the keys of a dict."""
        flat, spec = tree_flatten((args, kwargs))
        if spec == self._in_spec:
            return flat
        try:
            return self._in_spec.flatten_up_to((args, kwargs))  # pyright: ignore[reportOptionalMemberAccess]
        except ValueError:
            message = f"this program takes arguments like {self._in_spec}, and these are like {spec}"
            raise ValueError(message) from None

    def run(self, *flat: Any) -> Any:
        """Runs it on flat arguments, which are not checked, and returns flat results."""
        if self._arena is None:
            return self._module.forward(*flat)
        with self._lock:  # the memory of values in between is the program's own
            return self._module.forward(*flat)

    def _checked(self, flat):
        if len(flat) != len(self._expected):
            raise ValueError(f"this program takes {len(self._expected)} values, and not {len(flat)}")
        return [_check(argument, name, expected) for argument, (name, expected) in zip(flat, self._expected)]

    @property
    def inputs(self) -> dict[str, Any]:
        """The flat arguments by name: a tensor without memory for each, of its shape, dtype and device, or a number."""
        return dict(self._expected)

    def arguments(self, tensors: Mapping[str, Tensor] | None = None, seed: int = 0) -> tuple[tuple, dict[str, Any]]:
        """Returns positional and keyword arguments for a call: tensors by the names of `inputs`, and for those that are
        not given random ones. Random whole numbers are 0 or 1.

        Raises:
            ValueError: there is no input of a name.
        """
        tensors = tensors or {}
        if unknown := [name for name in tensors if name not in self.inputs]:
            raise ValueError(f"there is no input {unknown[0]}; there are {', '.join(self.inputs)}")
        generator = torch.Generator().manual_seed(seed)
        flat = [
            tensors[name].to(like.device) if name in tensors else _random(like, generator)
            for name, like in self._expected
        ]
        return tree_unflatten(flat, self._in_spec)  # pyright: ignore[reportArgumentType]

    def capture(
        self,
        *args: Any,
        warmup: int = 2,
        bind: bool = False,
        clone_outputs: bool = False,
        segments: bool = False,
        **kwargs: Any,
    ) -> Capture:
        """Records what a call submits, to be run again as one replay, as `metalcore.capture` does.

        Args:
            args, kwargs: arguments for a call.
            warmup, bind, clone_outputs, segments: as `metalcore.capture` has them.

        Returns:
            A function of the tensors among the arguments, in the order of `inputs`. It uses the program's memory: no
            other thread may run the program meanwhile.
        """
        from ..replay import capture

        flat = self._flat(args, kwargs)
        tensors = [argument for argument in flat if isinstance(argument, Tensor)]

        def program(*own: Tensor) -> Any:
            remaining = iter(own)
            with torch.no_grad():
                results = self.run(
                    *(next(remaining) if isinstance(argument, Tensor) else argument for argument in flat)
                )
            return tree_unflatten(results, self._out_spec)  # pyright: ignore[reportArgumentType]

        options = {"warmup": warmup, "bind": bind, "clone_outputs": clone_outputs, "segments": segments}
        return capture(program, *tensors, **options)

    def profile(self, *args: Any, repeats: int = 10, **kwargs: Any) -> Profile:
        """Times the operations one by one, and the whole program. Static values are afterwards as they were.

        Args:
            args, kwargs: arguments for a call; by default random ones.
            repeats: how often each is timed. The medians count.
        """
        if not args and not kwargs:
            args, kwargs = self.arguments()
        flat = self._flat(args, kwargs)
        with torch.no_grad(), self._lock, self.static_values_kept():
            return profile(self._module, self._report.steps, flat, lambda: self._module.forward(*flat), repeats)

    @contextlib.contextmanager
    def static_values_kept(self) -> Iterator[None]:
        """Restores static values, behind the block, to what they were before it."""
        written = {planned.name for planned in self._report.plan.values if planned.kind == "static"}
        statics = [getattr(self._module, str(n.target)) for n in self.graph.nodes if n.name in written]
        before = [tensor.clone() for tensor in statics]
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, saved in zip(statics, before):
                    tensor.copy_(saved)

    @property
    def graph(self) -> Graph:
        """The operations that it runs."""
        return self._module.graph

    @property
    def device(self) -> torch.device:
        """Where its kernels run."""
        return program_device(self.graph) or torch.device("cpu")

    @property
    def arena(self) -> Tensor | None:
        """The memory of its temporaries, where it keeps that."""
        return self._arena

    def report(self) -> Report:
        """Reports where each operation runs and what it costs, what was fused, and how much memory it takes."""
        return self._report

    def generated_kernels(self) -> list[str]:
        """Returns the names of the generated kernels, for arguments that begin at addresses that vectors can be read
        from. Each name ends in a digest of its source."""
        calls = [node for node in self._module.graph.nodes if node.meta.get("place") == "generated"]
        return list(dict.fromkeys(name for node in calls for name in kernel_names(node)))

    def save(self, path: str | os.PathLike, weights: str | os.PathLike = "inside", recordings: bool = False) -> None:
        """Writes the program to a file, which metalcore.load reads on any machine.

        Args:
            path: of the file, by custom "….mcore".
            weights: "inside": constants are in the file as the program needs them, folded. "apart": the module's
                parameters lie beside it, in a file of safetensors of the same name, or in the file of a given path, and
                the program's file has what is computed of them when it is loaded: it takes other parameters as well.
            recordings: also runs the program, and writes what it submits on its kind of device, which libmetalcore
                runs without Python and PyTorch. Then all of the program must be metalcore's.

        Raises:
            ValueError: something of the program has no form in a file; the message names it.
        """
        from .files.writing import save

        save(self, path, weights, recordings)

    def __reduce__(self):
        raise TypeError("a program is neither copied nor pickled: its memory is part of it; save() writes it to a file")

    def add_notes(self, notes: Sequence[str]) -> None:
        """Adds notes to the report."""
        self._report = self._report._replace(notes=(*self._report.notes, *notes))

    def describe(self) -> str:
        """Returns all operations with their places, and all values with their memory, in text."""
        lines = ["operations:"]
        lines += [f"  {s.name}: {s.operator}, {s.place}, {s.nbytes} bytes" for s in self._report.steps]
        lines.append("values:")
        for v in self._report.plan.values:
            where = f", arena at {v.offset}" if v.offset is not None else ""
            size = "×".join(map(str, v.shape)) or "scalar"
            dtype = str(v.dtype).removeprefix("torch.")
            lines.append(f"  {v.name}: {v.kind}, {dtype} {size}, operations {v.first} to {v.last}{where}")
        return "\n".join([*lines, str(self._report)])


def _check(argument, name, expected):
    if not isinstance(expected, Tensor):
        both_nan = type(argument) is type(expected) is float and argument != argument and expected != expected
        if type(argument) is not type(expected) and expected is not None or expected != argument and not both_nan:
            raise ValueError(f"{name}: this program is for {expected!r}, and not for {argument!r}")
        return argument
    if not isinstance(argument, Tensor):
        raise ValueError(f"{name} must be a tensor, and is of type {type(argument).__name__}")
    for what in ("shape", "dtype", "device"):
        wanted, actual = getattr(expected, what), getattr(argument, what)
        if wanted != actual:
            raise ValueError(f"{name}: this program is for {what} {_text(wanted)}, and not for {_text(actual)}")
    if argument.stride() == expected.stride():
        return argument
    if may_share_memory(expected.shape, expected.stride()):
        raise ValueError(
            f"{name}: this program is for strides {list(expected.stride())}, where elements share memory, and not for "
            f"{list(argument.stride())}; compile it for a contiguous() example"
        )
    return torch.empty_strided(expected.shape, expected.stride(), dtype=argument.dtype, device=argument.device).copy_(
        argument
    )


def _random(like, generator):
    if not isinstance(like, Tensor):
        return like
    if like.is_floating_point():
        tensor = torch.randn(like.shape, generator=generator)
    else:
        tensor = torch.randint(0, 2, like.shape, generator=generator)
    return tensor.to(like.device, like.dtype)


def _text(argument):
    return list(argument) if isinstance(argument, torch.Size) else argument


def finish(
    module: GraphModule,
    options: Options,
    fused: Sequence[Rewritten] = (),
    notes: Sequence[str] = (),
    source: Source | None = None,
) -> Program:
    """Cleans, partitions and plans a graph whose patterns are fused. The source is what it can be saved from."""
    clean(module)
    if options.generates:
        group_pointwise(module, build_kernel, single=options.generates_single)
    put_on_cpu(module)
    renew_views(module)
    loosen_views(module)
    join_writes(module)
    device = program_device(module.graph)
    arena_device = device if options.memory == "arena" else None
    plan = make_plan(module, arena_device)
    steps = steps_of(module)
    arena = bind_arena(module, plan, arena_device) if arena_device is not None else None
    module.graph.lint()
    module.recompile()
    return Program(module, Report(steps, tuple(fused), plan, tuple(notes)), arena, source)
