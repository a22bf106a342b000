"""The functions that a caller gives to attention, as graphs: what they capture, and their derivatives."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.fx.traceback as fx_traceback
from torch import Tensor
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex, mod_index
from torch._higher_order_ops.flex_attention import create_fw_bw_graph
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

from ..ir import one_tracer
from .decompositions import DECOMPOSITIONS, read_at, without_writes

__all__ = ["Captured", "derivative_of", "place_of_node", "returned_by", "trace_mod", "with_captures"]

_DERIVATIVE, _OWN = "metalcore_derivative", "metalcore_own"  # keys of a graph's meta
INDICES = 4  # the numbers of a batch item, a head, a query and a key


class Captured(NamedTuple):
    """A traced function and what it captures.

    Attributes:
        graph: its placeholders are the function's arguments, and then what is captured.
        captures: tensors and numbers.
    """

    graph: GraphModule
    captures: tuple[Tensor | int | float, ...]


def trace_mod(function: Callable, kind: str, score_dtype: torch.dtype | None, device, captures: Sequence = ()):
    """Traces a score_mod, or a mask_mod where there is no dtype of scores.

    Args:
        kind: what messages call it.
        captures: what the function takes after its own arguments.

    Returns:
        Captured, with the tensors that the function finds elsewhere after the given ones.

    Raises:
        RuntimeError: the function does what no kernel can, such as a branch that depends on a score.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        scores = [] if score_dtype is None else [torch.zeros((), dtype=score_dtype, device=device)]
        examples = [*scores, *(torch.zeros((), dtype=torch.int32, device=device) for _ in range(INDICES))]
        fakes = [mode.from_tensor(x.detach()) if isinstance(x, Tensor) else x for x in captures]
    tensors = [x for x in fakes if isinstance(x, Tensor)]

    def of_tensors(*arguments):
        own, others = arguments[: len(examples)], iter(arguments[len(examples) :])
        return function(*own, *(next(others) if isinstance(x, Tensor) else x for x in fakes))

    try:
        with (
            one_tracer,
            torch.no_grad(),
            torch._C._DisableAutocast(),
            mode,
            fx_traceback.preserve_node_meta(),
            _Places(),
        ):
            graph = without_writes(make_fx(of_tensors, DECOMPOSITIONS)(*examples, *tensors))
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        if "data-dependent" in str(error) or "DataDependent" in type(error).__name__ or "_local_scalar" in reason:
            reason = (
                "Python would need the number of a tensor, for a branch or a conversion; torch.where takes both sides"
            )
        place = _place_of_error(error) or _place_of_function(function)
        raise RuntimeError(f"metalcore.flex_attention: {kind}{place}: {reason}") from error
    returned = returned_by(graph)
    if not isinstance(returned, Node) or returned.meta["val"].dim():
        found = f"a {type(returned).__name__}"
        if isinstance(returned, Node):
            found = f"a tensor of the shape {[*returned.meta['val'].shape]}"
        raise RuntimeError(
            f"metalcore.flex_attention: {kind}{_place_of_function(function)} must return a tensor with one number "
            f"for a score, not {found}"
        )
    return _lifted(graph, [x for x in captures if isinstance(x, Tensor)], device)


def with_captures(graph: GraphModule, captures: Sequence) -> Captured | None:
    """Returns a graph that PyTorch has traced, or None where it has to be traced once more."""
    for node in graph.graph.nodes:
        if node.op == "output":
            continue
        is_known = isinstance(node.target, torch._ops.OpOverload) and node.target not in DECOMPOSITIONS
        if "val" not in node.meta or not (node.op == "placeholder" or node.op == "call_function" and is_known):
            return None
    return Captured(graph, tuple(captures))


def derivative_of(score: Captured, dtype: torch.dtype, device) -> GraphModule:
    """Returns the graph of (score, indices, gradient, captures …) -> (gradient of score, None …, gradients of
    captures)."""
    if known := score.graph.meta.get(_DERIVATIVE):
        return known
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        values = (
            torch.zeros((), dtype=dtype, device=device, requires_grad=True),
            *(torch.zeros((), dtype=torch.int32, device=device) for _ in range(INDICES)),
        )
    with one_tracer, torch.enable_grad(), TransformGetItemToIndex():
        joint: Any = create_fw_bw_graph(_Scattering(score.graph).run, values, score.captures)[1]  # pyright: ignore[reportArgumentType]
    if any(node.target in DECOMPOSITIONS for node in joint.graph.nodes):
        every = (*values, values[0].detach(), *score.captures)
        fakes = [mode.from_tensor(x.detach()) if isinstance(x, Tensor) else x for x in every]
        with one_tracer, torch.no_grad(), mode, fx_traceback.preserve_node_meta():
            joint = make_fx(Interpreter(joint).run, DECOMPOSITIONS)(*fakes)
    score.graph.meta[_DERIVATIVE] = without_writes(joint)
    return joint


class _Scattering(Interpreter):
    """Runs a graph for its derivative. That of a read of a captured tensor adds to elements, as vmap knows it."""

    def call_function(self, target, args, kwargs):
        if target is torch.ops.aten.index.Tensor and all(index is not None for index in tree_leaves(args[1])):
            return mod_index(*args)
        if target is torch.ops.prims.convert_element_type.default:  # of Inductor's graphs; it has no derivative
            return torch.ops.aten._to_copy.default(args[0], dtype=args[1])
        return super().call_function(target, args, kwargs)


def returned_by(graph: GraphModule) -> Any:
    """Returns the node of a graph's one result."""
    returned = next(node for node in graph.graph.nodes if node.op == "output").args[0]
    return returned[0] if isinstance(returned, (tuple, list)) and len(returned) == 1 else returned


def _lifted(module: GraphModule, captures: list[Tensor], device) -> Captured:
    """Returns the graph with placeholders for the tensors that it has itself. Numbers that the function made tensors of
    stay; the graph keeps what else it made of lists."""
    graph, tensors = module.graph, list(captures)
    own = module.meta[_OWN] = []
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    places: dict[str, Node] = {}
    for node in list(graph.nodes):
        if node.op != "get_attr":
            continue
        tensor = getattr(module, node.target)
        if tensor.is_cpu and not tensor.dim() and not tensor.requires_grad:
            continue
        if node.target not in places:
            with graph.inserting_after(last):
                last = places[node.target] = graph.placeholder(f"captured_{len(tensors)}")
            last.meta = dict(node.meta)
            copies = [*node.users]
            if all(copy.target is torch.ops.aten.lift_fresh_copy.default for copy in copies):
                tensor = tensor.to(device)
                own.append(tensor)
                last.meta["val"] = copies[0].meta["val"].to(device)
                for copy in copies:
                    copy.replace_all_uses_with(last)
            tensors.append(tensor)
        node.replace_all_uses_with(places[node.target])
        graph.erase_node(node)
    for name in places:
        delattr(module, name)  # so that the graph does not keep the tensor alive
    graph.eliminate_dead_code()
    module.recompile()
    return Captured(module, tuple(tensors))


_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')


class _Places(TransformGetItemToIndex):
    """Notes for each node of a traced graph which line has made it."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        frame = sys._getframe(1)
        while frame is not None and not _is_callers(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is not None:
            place = f'File "{frame.f_code.co_filename}", line {frame.f_lineno}, in {frame.f_code.co_name}'
            fx_traceback.current_meta["stack_trace"] = place
        if func is torch.Tensor.__getitem__:
            found = read_at(*args)  # pyright: ignore[reportArgumentType]
            if found is not None:
                return found
        return super().__torch_function__(func, types, args, kwargs)


def place_of_node(node: Node) -> str:
    """Returns where a caller's function has made a node, or ""."""
    frames = [frame for frame in _FRAME.findall(node.meta.get("stack_trace") or "") if _is_callers(frame[0])]
    if not frames:
        return ""
    path, line, function = frames[-1]
    return f" ({path}, line {line}, in {function})"


def _place_of_function(function):
    """Returns where a caller has written a function, or ""."""
    code = getattr(function, "__code__", None)
    return f" ({code.co_filename}, line {code.co_firstlineno}, in {code.co_name})" if code else ""


def _place_of_error(error):
    traceback, place = error.__traceback__, ""
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if _is_callers(code.co_filename):
            place = f" ({code.co_filename}, line {traceback.tb_lineno}, in {code.co_name})"
        traceback = traceback.tb_next
    return place


def _is_callers(path):
    return not ("/torch/" in path or "/metalcore/programs/" in path or path.startswith("<"))
