"""From a module, an exported program or a graph of dynamo to the intermediate representation.

The graph has ATen's operators as the program called them: `linear`, `layer_norm` and the like are not taken apart, and
autograd has not seen them yet. So patterns are found in what people write, and fused operators bring their derivatives.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.graph import CodeGen
from torch.utils._pytree import TreeSpec

from .ir import changes_shape, nodes_named, one_tracer, storage_of, value

__all__ = ["NotTraceable", "Traced", "fake_inputs", "higher_order", "numbers_alone", "to_aten", "trace"]


class NotTraceable(RuntimeError):
    """The error of a graph that has no representation here, with the reason.

    Example:
        >>> norm = torch.nn.BatchNorm1d(4, momentum=None)  # in training, with the average of all batches
        >>> try:
        ...     metalcore.programs.trace(norm, (torch.randn(2, 4),))
        ... except metalcore.programs.NotTraceable as error:
        ...     print(str(error).split(",")[0])
        the module is a BatchNorm1d in training with momentum=None
    """


class Traced(NamedTuple):
    """A graph with flat inputs and outputs, how the arguments and results of the program become flat, and the module's
    parameters and buffers, as its state_dict names them."""

    module: GraphModule
    in_spec: TreeSpec
    out_spec: TreeSpec
    state: dict[str, Tensor]


def trace(program: torch.nn.Module | torch.export.ExportedProgram, args: tuple = (), kwargs: dict | None = None):
    """Traces a module's graph for arguments like these, or an exported program's.

    Returns:
        Traced

    Raises:
        NotTraceable: shapes are dynamic, the graph has operators with graphs inside, or a batch norm in training
            averages all batches.
        What torch.export raises for modules that it cannot export.

    Example:
        >>> x = torch.ones(2, 4, device="mps")
        >>> traced = metalcore.programs.trace(torch.nn.Linear(4, 3, device="mps"), (x,))
        >>> [node.op for node in traced.module.graph.nodes]
        ['placeholder', 'get_attr', 'get_attr', 'call_function', 'output']
    """
    exported = program
    if not isinstance(program, torch.export.ExportedProgram):
        _check_averages(program)
        with torch.no_grad():
            exported = torch.export.export(program, args, kwargs or {})
    if getattr(exported, "range_constraints", None):
        raise NotTraceable("the exported program has dynamic shapes; a Program is for one set of shapes")
    module = exported.module()  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
    spec = exported.call_spec  # pyright: ignore[reportAttributeAccessIssue]
    for node in list(module.graph.nodes):
        if node.op == "call_module" and not node.users:
            module.graph.erase_node(node)  # what checks the inputs: a Program does so itself
    module.graph.set_codegen(CodeGen())
    module.recompile()
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    inputs = [node.meta["val"] for node in placeholders]
    with torch.no_grad():
        traced = to_aten(module, inputs)
        for node, named in zip((node for node in traced.graph.nodes if node.op == "placeholder"), placeholders):
            node._rename(named.name)
            node.target = node.name
        traced.recompile()
        state: Any = exported.state_dict  # pyright: ignore[reportAttributeAccessIssue]
        return Traced(traced, spec.in_spec, spec.out_spec, dict(state))  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]


def _check_averages(module):
    """Refuses averages over all batches: torch.export cannot read their count, and its message names no module."""
    for name, norm in module.named_modules() if isinstance(module, torch.nn.Module) else ():
        counts = isinstance(norm, torch.nn.modules.batchnorm._BatchNorm) and norm.num_batches_tracked is not None
        if counts and norm.training and norm.momentum is None:
            raise NotTraceable(
                f"{name or 'the module'} is a {type(norm).__name__} in training with momentum=None, which reads the "
                "count of batches from the device in each call: call eval() first, or give it a momentum. "
                'torch.compile(model, backend="metalcore") takes it'
            )


def fake_inputs(inputs: Sequence[Any], mode: FakeTensorMode) -> list:
    """Returns inputs as fake tensors of a mode. Other values stay."""

    def fake(value):
        if not isinstance(value, Tensor):
            return value
        if isinstance(value, torch._subclasses.FakeTensor):
            copy, other = (
                torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
                for _ in range(2)
            )
            if not value.requires_grad:
                return copy
            copy.requires_grad_()
            return copy if value.is_leaf else other.copy_(copy)  # autograd refuses writes to a leaf
        return mode.from_tensor(value, static_shapes=True)

    with mode:
        return [fake(value) for value in inputs]


def higher_order(module: GraphModule) -> list[str]:
    """Returns the operators of a graph, if any, that run graphs of their own (checkpoint, cond, flex_attention), and
    modes."""
    names = []
    for node in module.graph.nodes:
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            names.append(str(node.target))
        elif node.op == "call_function" and getattr(node.target, "__name__", "") == "_enter_autocast":
            names.append("autocast")
        elif getattr(node.target, "__module__", "") == "torch._functorch.predispatch":
            names.append("vmap")
    return list(dict.fromkeys(names))


def to_aten(module: GraphModule, inputs: Sequence[Any]) -> GraphModule:
    """Traces a graph with flat inputs once more, with fake tensors: ATen's operators before autograd and decomposition.

    Parameters and buffers of the module stay its get_attr nodes, with the same tensors. Numbers that the graph reads
    from tensors are symbols; these must be floating-point numbers on the CPU, as dynamo passes numbers that change.
    """
    if obstacles := higher_order(module):
        raise NotTraceable(f"the graph has {', '.join(obstacles)}")
    lifted, names, tensors = _lift(module)
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=numbers_alone())
    fakes = fake_inputs([*inputs, *tensors], mode)
    if any(isinstance(value, torch.SymInt) for value in inputs):
        raise NotTraceable("the graph has symbolic sizes")
    with one_tracer, mode:
        traced = make_fx(lifted, pre_dispatch=True)(*fakes)
    _check_items(traced.graph)
    _check_shapes(traced.graph)
    for node, example in zip([node for node in traced.graph.nodes if node.op == "placeholder"], inputs):
        if not isinstance(example, Tensor):
            node.meta["val"] = example  # the graph is for this value alone
    return _unlift(traced, names, tensors)


def numbers_alone() -> ShapeEnv:
    """Returns the environment of a fake mode in which numbers that a graph reads from tensors are symbols, and shapes
    depend on no data."""
    return ShapeEnv(allow_dynamic_output_shape_ops=False)


def _check_items(graph):
    for node in nodes_named(graph, "item", "_local_scalar_dense"):
        tensor = value(node.args[0])
        if tensor.device.type != "cpu" or not tensor.is_floating_point():
            raise RuntimeError(f"the graph reads a number from {node.args[0]}, {tensor.dtype} on {tensor.device.type}")


def _check_shapes(graph):
    inputs = {
        storage_of(value(node)) for node in graph.nodes if node.op == "placeholder" and isinstance(value(node), Tensor)
    }
    for node in filter(changes_shape, graph.nodes):
        if storage_of(value(node)) in inputs:
            raise NotTraceable(f"{node.name} changes the shape of an argument in place")


def _lift(module):
    """Returns the module with a placeholder for each tensor that it gets by a name, at the end of its inputs."""
    graph, owner = copy.deepcopy(module.graph), module
    lifted = GraphModule(owner, graph)
    for node in graph.nodes:
        # What is written to x.data would leave no trace.
        if node.target is torch._C._autograd._get_data_attr:  # pyright: ignore[reportAttributeAccessIssue]
            node.op, node.target = "call_method", "detach"
    last = next((node for node in reversed(graph.nodes) if node.op == "placeholder"), None)
    by_name, tensors = {}, []
    for node in list(graph.nodes):
        if node.op != "get_attr":
            continue
        tensor = owner
        for part in str(node.target).split("."):
            tensor = getattr(tensor, part)
        if not isinstance(tensor, Tensor):
            raise NotTraceable(f"the graph has {node.target}, a {type(tensor).__name__}")
        if node.target not in by_name:
            # After the placeholders, which come first in the graph wherever get_attr nodes were.
            with graph.inserting_before(next(iter(graph.nodes))) if last is None else graph.inserting_after(last):
                last = by_name[node.target] = graph.placeholder(f"attribute_{len(tensors)}")
            tensors.append(tensor)
        node.replace_all_uses_with(by_name[node.target])
        graph.erase_node(node)
    lifted.recompile()
    return lifted, [str(name) for name in by_name], tensors


def _unlift(traced, names, tensors):
    graph = traced.graph
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    attributes = {}
    lifted = placeholders[len(placeholders) - len(names) :] if names else []
    first_call = next(node for node in graph.nodes if node.op != "placeholder")
    for node, name, tensor in zip(lifted, names, tensors):
        flat = name.replace(".", "_")
        while hasattr(traced, flat):
            flat += "_"
        traced.register_buffer(flat, tensor) if not isinstance(tensor, torch.nn.Parameter) else (
            traced.register_parameter(flat, tensor)
        )
        attributes[flat] = name
        with graph.inserting_before(first_call):
            got = graph.get_attr(flat)
        got.meta.update(val=node.meta["val"], path=name)
        node.replace_all_uses_with(got)
        graph.erase_node(node)
    for node in list(graph.nodes):  # constants that tracing met, which come before what uses them
        if node.op == "get_attr" and "val" not in node.meta:
            _hoist(graph, node, traced, placeholders)
    traced.recompile()
    return traced


def _hoist(graph, node, traced, placeholders):
    tensor = getattr(traced, node.target)
    if not isinstance(tensor, Tensor):
        raise NotTraceable(f"the graph has {node.target}, a {type(tensor).__name__}")
    mode = next((p.meta["val"].fake_mode for p in placeholders if hasattr(p.meta.get("val"), "fake_mode")), None)
    node.meta["val"] = (mode or FakeTensorMode()).from_tensor(tensor, static_shapes=True)
