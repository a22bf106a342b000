"""torch.compile(model, backend="metalcore")."""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import RestartAnalysis
from torch._functorch.aot_autograd import make_boxed_func  # pyright: ignore[reportPrivateImportUsage]
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node

from .compiling import optimize
from .options import Options
from .patterns import choose
from .program import Program, finish
from .rewriting import Rewritten
from .tracing import NotTraceable, fake_inputs, higher_order, numbers_alone, to_aten

__all__ = ["Compiled", "backend", "observe"]

_observers: list[list] = []


class Compiled:
    """A record of what became of one graph of dynamo.

    Attributes:
        programs: the programs for forward and backward.
        notes: what was not done, and why.

    Example:
        >>> with metalcore.programs.observe() as graphs:
        ...     y = torch.compile(lambda x: x * metalcore.silu(x), backend="metalcore")(torch.ones(4, device="mps"))
        >>> len(graphs[0].programs)
        1
    """

    def __init__(self):
        self.programs: list[Program] = []
        self.fused: list[Rewritten] = []
        self.notes: list[str] = []


@contextlib.contextmanager
def observe():
    """Gives a list, to which each graph that torch.compile hands over inside the block adds its `Compiled`.

    Example:
        >>> with metalcore.programs.observe() as graphs:
        ...     y = torch.compile(lambda x: x * metalcore.silu(x), backend="metalcore")(torch.ones(4, device="mps"))
        >>> len(graphs)
        1
    """
    programs: list[Compiled] = []
    _observers.append(programs)
    try:
        yield programs
    finally:
        _observers.remove(programs)


def backend(module: GraphModule, inputs: Sequence[Any], options=None, mode=None):
    """Returns the backend as torch.compile calls it.

    Raises:
        ValueError, TypeError: an option is unknown, or has a value that it cannot have.
    """
    if mode not in (None, "default"):
        raise ValueError(f"the backend metalcore has no mode {mode!r}; its options are those of metalcore.programs")
    return _with_arguments(module, lambda: _compiled(module, inputs, Options.of(options)))


def _with_arguments(module, compile):
    """Returns what compile() makes of a graph, with the graph's arguments among the results where these are arguments
    themselves, as `self.count += 1` leaves them. compile() sees no such results: AOTAutograd (of PyTorch 2.13) returns
    one in the place of another result where a further argument that the graph writes to needs a gradient."""
    nodes = list(module.graph.nodes)
    inputs = [node.meta.get("example_value") for node in nodes if node.op == "placeholder"]
    places = {id(value): place for place, value in enumerate(inputs) if isinstance(value, Tensor)}
    results = nodes[-1].args[0]
    if not isinstance(results, (tuple, list)):
        return compile()
    argument_places = [
        places.get(id(node.meta.get("example_value"))) if isinstance(node, Node) else None for node in results
    ]
    if all(place is None for place in argument_places):
        return compile()
    nodes[-1].args = (tuple(node for node, place in zip(results, argument_places) if place is None),)
    module.recompile()
    function = compile()

    def call(*arguments):
        others = iter(function(*arguments))
        return tuple(next(others) if place is None else arguments[place] for place in argument_places)

    return call


def _compiled(module, inputs, options):
    is_symbolic = _is_symbolic(inputs)
    if is_symbolic and options.dynamic == "eager":
        return module.forward
    if is_symbolic or _numbers(module, inputs):
        return _Specialized(module, inputs, options)
    return _compile(module, inputs, options)


def _is_symbolic(inputs):
    if any(not isinstance(value, Tensor) for value in inputs):
        return True
    return any(isinstance(size, torch.SymInt) for value in inputs for size in (*value.shape, *value.stride()))


def _compile(module, inputs, options):
    compiled = Compiled()
    for observer in _observers:
        observer.append(compiled)
    try:
        fused = _fuse(module, inputs, options, compiled)
        return aot_autograd(
            fw_compiler=functools.partial(_program, compiled=compiled, options=options),
            bw_compiler=functools.partial(_program, compiled=compiled, options=options),
            partition_fn=min_cut_rematerialization_partition,
            # Writes to inputs belong to the program: a checkpoint saves buffers for backward after they are written.
            keep_inference_input_mutations=True,
        )(fused, list(inputs))
    except RestartAnalysis:  # dynamo traces once more, with a number that it had left open
        raise
    except Exception as error:
        if not options.fallback:
            raise
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        compiled.notes.append(f"PyTorch runs the graph: {reason}")
        warnings.warn(f"the backend metalcore leaves a graph to PyTorch: {reason}", stacklevel=2)
        return module.forward


def _fuse(module, inputs, options, compiled):
    """Returns the graph with metalcore's operators in place of patterns. Autograd takes it apart afterwards."""
    if any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda", "mps")):
        compiled.notes.append("no patterns are fused under autocast")
        return module
    try:
        traced = to_aten(module, inputs)
    except NotTraceable as reason:
        compiled.notes.append(f"no patterns are fused: {reason}")
        return module
    placeholders = [node for node in traced.graph.nodes if node.op == "placeholder"]
    leaves = {node for node, t in zip(placeholders, inputs) if t.requires_grad} if torch.is_grad_enabled() else ()
    compiled.fused, _ = optimize(
        traced, choose(options.fusions), constants=False, leaves=leaves, by_name=options.fusions is not None
    )
    for node in traced.graph.nodes:
        for key in ("val", "unbacked_bindings"):  # autograd's tracing has values of its own
            node.meta.pop(key, None)
    return traced


def _program(module, inputs, *, compiled, options):
    if any("flex_attention" in name for name in higher_order(module)):
        from .flex import use_kernels  # it imports what other graphs do not need

        use_kernels(module)
    program = finish(module, options, compiled.fused, compiled.notes)
    compiled.programs.append(program)
    return make_boxed_func(program.run)


class _Specialized:
    """A graph with sizes or numbers that may change: it is compiled for each set of sizes with which it is called.

    Other numbers come in tensors. One that never changes, such as a norm's eps, is fixed in the programs; one that does
    is a symbol there.
    """

    def __init__(self, module: GraphModule, inputs: Sequence[Any], options: Options):
        self.module, self.options = module, options
        self.programs: OrderedDict = OrderedDict()
        self.warned = False
        # By the place of the argument; nan for one that has changed.
        self.numbers: dict[int, float | None] = dict.fromkeys(_numbers(module, inputs))

    def __call__(self, *args):
        values = [self._fixed(place, value) if place in self.numbers else value for place, value in enumerate(args)]
        key = (*map(_key, values), torch.is_grad_enabled())
        program = self.programs.get(key)
        if program is None:
            if len(self.programs) >= self.options.cache_size:
                return self._run_by_torch(args)
            program = self.programs[key] = self._compile(values)
        return program(*[value for value in values if isinstance(value, Tensor)])

    def _fixed(self, place, tensor):
        number = tensor.item()
        if self.numbers[place] is None:
            self.numbers[place] = number
        elif self.numbers[place] != number:
            self.numbers[place] = math.nan
        return number if self.numbers[place] == number else tensor

    def _run_by_torch(self, args):
        if not self.warned:
            self.warned = True
            warnings.warn(
                f"the backend metalcore has programs for {self.options.cache_size} sets of sizes of a graph, as its "
                "option cache_size says; PyTorch runs the graph for others",
                stacklevel=3,
            )
        return self.module.forward(*args)

    def _compile(self, values):
        fixed = _with_numbers(self.module, values)
        mode = FakeTensorMode(shape_env=numbers_alone())
        with tracing(TracingContext(mode)):
            inputs = fake_inputs([value for value in values if isinstance(value, Tensor)], mode)
            return _compile(fixed, inputs, self.options)


def _numbers(module, inputs):
    """Returns the places of the inputs that are tensors in which dynamo passes a number."""

    def is_number(value):
        return isinstance(value, Tensor) and not value.dim() and value.is_cpu and value.is_floating_point()

    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    pairs = enumerate(zip(placeholders, inputs))
    return [place for place, (node, value) in pairs if is_number(value) and all(map(_is_item, node.users))]


def _is_item(node):
    return node.op == "call_method" and node.target == "item"


def _key(value):
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.device, value.requires_grad
    return type(value), value


def _with_numbers(module, values):
    """Returns the graph with numbers in place of the inputs that are none of its tensors."""
    graph = torch.fx.Graph()
    copies: dict = {}
    remaining = iter(values)
    for node in module.graph.nodes:
        if node.op == "placeholder":
            value = next(remaining)
            copies[node] = graph.node_copy(node) if isinstance(value, Tensor) else value
        elif _is_item(node) and not isinstance(copies[node.args[0]], Node):
            copies[node] = copies[node.args[0]]
        elif node.op == "output":
            graph.output(torch.fx.node.map_arg(node.args[0], lambda n: copies[n]))  # pyright: ignore[reportAttributeAccessIssue]
        else:
            copies[node] = graph.node_copy(node, lambda n: copies[n])
    for node in graph.nodes:  # dynamo's symbols belong to the graph of all sizes
        node.meta.clear()
    return GraphModule(module, graph)


def register() -> None:
    """Gives the backend its name in a process where no entry point of the installed package does."""
    from torch._dynamo import register_backend
    from torch._dynamo.backends.registry import _BACKENDS

    if "metalcore" not in _BACKENDS:
        register_backend(backend, name="metalcore")


register()
