"""What a graph's nodes say: their operators, arguments, and the tensors that stand for their results."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from ..ir import ancestors
from .numbers import Unsupported, check_dtype

REDUCTIONS = (
    *("sum.default", "sum.dim_IntList", "mean.default", "mean.dim", "prod.default", "prod.dim_int"),
    *("amax.default", "amin.default", "max.default", "min.default", "argmax.default", "argmin.default"),
    *("any.default", "any.dim", "any.dims", "all.default", "all.dim", "all.dims"),
    *("var.correction", "std.correction", "var_mean.correction", "std_mean.correction"),
)


WRITES = ("index_copy.default", "index_put.default", "scatter.src", "scatter.value", "index_fill.int_Scalar")
SCANS = ("cumsum.default", "cumprod.default")
WHOLE = frozenset((*REDUCTIONS, *WRITES, *SCANS))  # what has kernels of its own
STORED = "stored"  # the mark of a node that has a kernel of its own


class Value(NamedTuple):
    """A register, or a number of the graph."""

    text: str
    dtype: torch.dtype


def name_of(node: Node) -> str:
    """Returns an overload's name, such as "add.Tensor"; "" for what is no overload of aten."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace not in ("aten", "prims"):
        return ""
    prefix = "" if target.namespace == "aten" else "prims."
    return f"{prefix}{target.overloadpacket.__name__}.{target._overloadname}"


def fake(node: Any) -> torch.Tensor:
    """Returns the tensor without memory that stands for a node's result."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        raise Unsupported("its result is no tensor" if value is not None else "it has no shape (meta['val'])")
    if not all(isinstance(size, int) for size in value.shape):
        raise Unsupported(f"its shape {tuple(value.shape)} is symbolic")
    return value


def result_dtype(node: Node) -> torch.dtype:
    dtype = fake(node).dtype
    check_dtype(dtype)
    return dtype


def arguments_of(node: Node) -> dict[str, Any]:
    """Returns all arguments of a call, by name, with the schema's defaults."""
    schema = node.target._schema.arguments  # pyright: ignore[reportAttributeAccessIssue, reportFunctionMemberAccess]
    bound = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    bound |= {argument.name: value for argument, value in zip(schema, node.args)}
    return bound | node.kwargs


def plain(value):
    if isinstance(value, numbers.Complex) and not isinstance(value, numbers.Real):
        raise Unsupported("it has a complex number")
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        raise Unsupported("it has a symbolic number")
    return value


def shape_of(node: Node) -> tuple[int, ...]:
    """Returns the shape of a node's results, which is one."""
    value = node.meta.get("val")
    first = value[0] if isinstance(value, (tuple, list)) and value else value
    if not isinstance(first, torch.Tensor):
        return tuple(fake(node).shape)
    return tuple(first.shape)


def split(nodes: Sequence[Node], kernel_nodes: Sequence[Node] = ()) -> tuple[list[Node], list[Node]]:
    """Returns the leaves that nodes are computed from, and the nodes from there to them, each once, in the graph's
    order. Those in `kernel_nodes`, which the kernel computes, are no leaves."""

    def is_read(node):
        return is_leaf(node) and node not in kernel_nodes

    nodes_above = ancestors(nodes, is_read)
    return [node for node in nodes_above if is_read(node)], [node for node in nodes_above if not is_read(node)]


def is_leaf(node: Node) -> bool:
    """Returns whether a node's result is in memory: an input of the graph, a result of a reduction, or what is stored
    because it would be computed too often otherwise."""
    if node.target is operator.getitem:
        return is_leaf(node.args[0]) or STORED in node.meta  # type: ignore[arg-type]
    return node.op == "placeholder" or name_of(node) in WHOLE or STORED in node.meta
