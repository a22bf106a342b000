"""Inductor's graphs on `mps`: in the place of PyTorch's operators they call ours, which hold the functions as text.

Inductor writes programs that another process can load, so that a graph's code is an argument here. It is traced when
the operator first runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.graph import _custom_builtins

from . import launches
from .graphs import Captured, derivative_of, trace_mod
from .running import flex_backward, flex_forward, marked

__all__ = ["lower"]

# Captured tensors and numbers of both functions, and which are which: "tn" is a tensor and then a number.
_CAPTURED = "Tensor?[] tables, Tensor[] tensors, SymInt[] numbers, str score_captures, str mask_captures"
_MODS = "str score_mod, str mask_mod, float scale, SymInt q_block, SymInt k_block"

_library = torch.library.Library("metalcore", "FRAGMENT")
_library.define(
    f"_flex_attention(Tensor query, Tensor key, Tensor value, {_CAPTURED}, {_MODS}) -> (Tensor, Tensor, Tensor)"
)
_library.define(
    "_flex_attention_backward(Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, Tensor grad_out,"
    f" Tensor? grad_logsumexp, {_CAPTURED}, {_MODS}, bool[] wanted) -> (Tensor, Tensor, Tensor, Tensor[])"
)
ops = torch.ops.metalcore


_graphs: dict[tuple, GraphModule] = {}
_MOST = 256


def _traced(text: str, kind: str, query, captures, wanted=()) -> GraphModule:
    """Returns the graph of a code, with numbers for those that it captures. The same code, for captured tensors of
    which others need gradients, is another graph, since it has another derivative."""
    forms = tuple((x.shape, x.dtype) if isinstance(x, Tensor) else x for x in captures)
    key = text, kind, query.dtype, query.device, forms, wanted
    if key not in _graphs:
        if len(_graphs) >= _MOST:
            _graphs.clear()
        names: dict[str, Any] = {name: builtin.obj for name, builtin in _custom_builtins.items()}
        exec(text, names)
        function, dtype = functools.partial(names["forward"], None), query.dtype if kind == "score_mod" else None
        _graphs[key] = trace_mod(function, kind, dtype, query.device, captures).graph
    return _graphs[key]


def _functions(query, key, captured, blocks, wanted=()):
    """Returns the graph of score_mod, the block mask, and the tensors that the functions capture."""
    tables, tensors, numbers, of_score, of_mask, score_mod, mask_mod = captured
    found = {"t": iter(tensors), "n": iter(numbers)}
    of_score, of_mask = (tuple(next(found[kind]) for kind in kinds) for kinds in (of_score, of_mask))
    score = _traced(score_mod, "score_mod", query, of_score, wanted)
    mask = _traced(mask_mod, "mask_mod", query, of_mask)
    block_mask = (query.shape[2], key.shape[2], *tables, *(None,) * 4, *blocks, mask)
    return score, block_mask, *(tuple(x for x in of if isinstance(x, Tensor)) for of in (of_score, of_mask))


@torch.library.impl(_library, "_flex_attention", "CompositeExplicitAutograd")
def _forward(query, key, value, *more) -> tuple[Tensor, Tensor, Tensor]:
    *captured, scale, q_block, k_block = more
    score, block_mask, *captures = _functions(query, key, captured, (q_block, k_block))
    return flex_forward(query, key, value, score, block_mask, scale, {}, *captures)


@torch.library.impl(_library, "_flex_attention_backward", "CompositeExplicitAutograd")
def _backward(query, key, value, out, lse, d_out, d_lse, *more) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    *captured, scale, q_block, k_block, wanted = more
    wanted = tuple(wanted)
    score, block_mask, of_score, of_mask = _functions(query, key, captured, (q_block, k_block), wanted)
    joint = derivative_of(Captured(score, marked(of_score, wanted)), query.dtype, query.device)
    tensors, options = (query, key, value, out, lse, d_out, d_lse), {}
    dq, dk, dv, of_captures = flex_backward(
        *tensors, score, joint, block_mask, scale, options, of_score, of_mask, wanted=wanted
    )
    return dq, dk, dv, [x.contiguous() for x in of_captures if isinstance(x, Tensor)]


@torch.library.register_fake("metalcore::_flex_attention", lib=_library)
def _(query, key, value, *_):
    numbers = query.new_empty(query.shape[:3], dtype=torch.float32)
    return launches.like(query, value.shape[3]), numbers, torch.empty_like(numbers)


@torch.library.register_fake("metalcore::_flex_attention_backward", lib=_library)
def _(query, key, value, out, lse, d_out, d_lse, tables, tensors, *more):
    of_captures = [x.new_empty(x.shape) for x, want in zip(tensors, more[-1]) if want]
    return *(launches.like(x, x.shape[3]) for x in (query, key, value)), of_captures


def lower() -> None:
    """Lets Inductor call the operators on `mps`. It has been imported when this is called."""
    from torch._inductor import lowering

    for operator, call in (
        (torch.ops.higher_order.flex_attention, _call_forward),
        (torch.ops.higher_order.flex_attention_backward, _call_backward),
    ):
        lowering.lowerings[operator] = _lowered(lowering.lowerings[operator], call, lowering.fallback_handler)


def _lowered(previous: Callable, call: Callable, handler: Callable) -> Callable:
    @functools.wraps(previous)
    def lowered(*args, **kwargs):
        query, captures, block_mask = args[0], (*args[-2], *args[-1]), args[-5]
        mods = (x.graph_module for x in (next(x for x in args if hasattr(x, "graph_module")), block_mask[-1]))
        is_text = not any(_constants(mod) is None for mod in mods)
        if query.get_device().type == "mps" and is_text and all(_is_tensor(x) or _is_integer(x) for x in captures):
            return call(handler, *args)
        return previous(*args, **kwargs)

    return lowered


def _constants(module: GraphModule) -> dict[Node, Tensor] | None:
    """Returns the numbers that a function made tensors of, or None where it has other tensors of its own."""
    nodes = [node for node in module.graph.nodes if node.op == "get_attr"]
    found = {node: getattr(module, str(node.target)) for node in nodes}
    return found if all(isinstance(x, Tensor) and not x.dim() for x in found.values()) else None


def _text(module: GraphModule) -> str:
    """Returns a graph's code, in which such numbers are arguments of operators."""
    constants = _constants(module)
    if not constants:
        return module.code
    names = {node.name: constant for node, constant in constants.items()}
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for node in list(graph.nodes):
        if node.op == "get_attr":
            constant = names[node.name]
            with graph.inserting_before(node):
                number = graph.call_function(
                    torch.ops.aten.scalar_tensor.default, (constant.item(),), {"dtype": constant.dtype}
                )
            node.replace_all_uses_with(number)
            graph.erase_node(node)
    return GraphModule(torch.nn.Module(), graph).code


def _is_tensor(captured):
    return hasattr(captured, "get_dtype")


def _is_integer(captured):
    return isinstance(captured, int) or isinstance(captured, sympy.Expr) and captured.is_integer


def _mods(block_mask, scale, score_captures, mask_captures, score_mod):
    every = *score_captures, *mask_captures
    tensors, numbers = [x for x in every if _is_tensor(x)], [x for x in every if not _is_tensor(x)]
    kinds = ("".join("t" if _is_tensor(x) else "n" for x in of) for of in (score_captures, mask_captures))
    mods = _text(score_mod.graph_module), _text(block_mask[-1].graph_module)
    return [*block_mask[2:10]], tensors, numbers, *kinds, *mods, float(scale), *block_mask[-3:-1]


def _call_forward(handler, query, key, value, score_mod, block_mask, scale, _, score_captures, mask_captures):
    run = handler(ops._flex_attention.default, add_to_fallback_set=False)
    return run(query, key, value, *_mods(block_mask, scale, score_captures, mask_captures, score_mod))


def _call_backward(handler, *arguments):
    *tensors, score_mod, joint, block_mask, scale, _, score_captures, mask_captures = arguments
    # The derivative's graph returns the gradients of the score, of the numbers of its place, and of what is captured.
    returned = next(node for node in joint.graph_module.graph.nodes if node.op == "output").args[0]
    wanted = [gradient is not None for gradient, x in zip(returned[5:], score_captures) if _is_tensor(x)]
    run = handler(ops._flex_attention_backward.default, add_to_fallback_set=False)
    mods = _mods(block_mask, scale, score_captures, mask_captures, score_mod)
    dq, dk, dv, found = run(*tensors, *mods, wanted)
    found = iter(found)
    return dq, dk, dv, tuple(None if gradient is None else next(found) for gradient in returned[5:])
