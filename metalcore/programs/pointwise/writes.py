"""Operations that write elements of one tensor into a copy of another, at places that tensors of indices give.

Where two elements have one place, either may remain, as with PyTorch. A place that does not exist is not written to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from .lowering import Lowering
from .nodes import arguments_of, fake, name_of, plain, result_dtype
from .numbers import Unsupported
from .reads.lookups import advanced, looked_up, size_of, with_none
from .reads.views import dimension
from .source import coordinates, loader, one_thread_an_element, parameters, place_at, to_memory


class Write(NamedTuple):
    """What is written.

    Attributes:
        shape: of the elements.
        value: a node that broadcasts to the shape, or a number.
        place: of a lowering and coordinates in the shape: the coordinates in the result, None where a tensor gives the
            number; and these numbers with the conditions under which they exist.
    """

    shape: tuple[int, ...]
    value: Any
    place: Callable[[Lowering, Sequence[str]], tuple[list[str | None], list[tuple[str, str]]]]


def written(node: Node) -> Write:
    """Returns what a node writes. Raises Unsupported where the generator does not take it."""
    arguments, result = arguments_of(node), fake(node)
    if arguments.get("accumulate"):
        raise Unsupported("it adds elements of one place, in an order that is not known")
    value = next(arguments[name] for name in ("source", "src", "values", "value") if name in arguments)
    if isinstance(value, Node) and result_dtype(value) != result.dtype:
        raise Unsupported(f"it writes {fake(value).dtype} into {result.dtype}, which PyTorch refuses")
    if name_of(node) == "index_put.default":
        return _index_put(result, arguments)
    dim, index = dimension(node, arguments["dim"]), arguments["index"]
    by_element = name_of(node).startswith("scatter")
    wraps = name_of(node).startswith("index_fill")
    if by_element or not result.dim():
        shape = tuple(fake(index).shape)
    else:
        shape = (*result.shape[:dim], fake(index).numel(), *result.shape[dim + 1 :])

    def place(lowering, at):
        own = at if by_element else at[dim : dim + fake(index).dim()]
        return with_none(at, dim, node), [looked_up(lowering, index, own, size_of(node, dim), wraps=wraps)]

    return Write(shape, value, place)


def _index_put(result, arguments):
    indices = arguments["indices"]
    tensors = [(d, index) for d, index in enumerate(indices) if index is not None]
    common = torch.broadcast_shapes(*(fake(index).shape for _, index in tensors))
    others = [size for d, size in enumerate(result.shape) if d not in dict(tensors)]
    first = tensors[0][0] if tensors[-1][0] - tensors[0][0] == len(tensors) - 1 else 0
    shape = (*others[:first], *common, *others[first:])
    return Write(shape, arguments["values"], lambda lowering, at: advanced(lowering, indices, result.shape, at))


def leaves_of(node: Node) -> list[Node]:
    """Returns the nodes that say what is written and where."""
    leaves: list[Node] = []
    map_arg((node.args[1:], node.kwargs), leaves.append)
    return list(dict.fromkeys(leaves))


def writing(node: Node, inputs: Sequence[Node], strides: Sequence[Sequence[int]], *, keep_float32: bool = False) -> str:
    """Returns the kernel that writes into the copy.

    Args:
        inputs: the leaves that it reads.
        strides: of the result, then of the inputs.
    """
    lowering = Lowering(loader(inputs, strides[1:]), keep_float32=keep_float32)
    before, body = statements(lowering, node, strides[0])
    text = "\n".join(f"  {line}" for line in (*before, *body))
    return one_thread_an_element(parameters([node], inputs, "uint"), text)


def statements(lowering: Lowering, node: Node, strides: Sequence[int]) -> tuple[list[str], list[str]]:
    """Returns statements that find a thread's element, and those that write it."""
    write, dtype = written(node), result_dtype(node)
    dense = [0] * len(write.shape)
    for d in range(len(dense) - 1, -1, -1):
        dense[d] = dense[d + 1] * write.shape[d + 1] if d + 1 < len(dense) else 1
    before, at = coordinates(write.shape, dense)
    places, numbers = write.place(lowering, at)
    with lowering.scope(f"if ({' && '.join(inside for _, inside in numbers)})"):
        if isinstance(write.value, Node):
            value = lowering.stored(lowering.value(write.value, at[len(at) - fake(write.value).dim() :]))
        else:
            value = lowering.operand(plain(write.value), dtype)
        coordinates_left = iter([lowering.index(f"int({number})") for number, _ in numbers])
        place = place_at([next(coordinates_left) if c is None else c for c in places], strides)
        lowering.statements.append(f"out0[{place}] = {to_memory(value, dtype)};")
    return before, lowering.statements
