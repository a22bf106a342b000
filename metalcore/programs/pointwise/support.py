"""What the generator takes."""

from __future__ import annotations

import torch
from torch.fx import Node

from .lowering import OPERATIONS, Lowering, Value, fake, name_of, result_dtype
from .numbers import Unsupported

__all__ = ["OPERATIONS", "check", "supports"]


def supports(node: Node) -> str | None:
    """The reason why the generator does not take a node of a graph, or None where it takes it.

    The node and its operands must have their fake tensors as meta["val"].
    """
    try:
        check(node)
    except Unsupported as reason:
        return str(reason)
    return None


def check(node: Node) -> None:
    """Raises Unsupported where the generator does not take a node."""
    if node.op != "call_function" or name_of(node) not in OPERATIONS:
        raise Unsupported(f"{node.target} is no pointwise operation that the generator knows")
    device = fake(node).device
    for operand in node.all_input_nodes:
        result_dtype(operand)
        if fake(operand).device != device and fake(operand).dim():
            raise Unsupported(f"its operand {operand} is on {fake(operand).device}, and its result on {device}")
        _check_shape(node, operand)
    leaves = {operand: f"x{index}" for index, operand in enumerate(node.all_input_nodes)}
    alone = Lowering(leaves.__getitem__)
    alone.bind({operand: Value(name, result_dtype(operand)) for operand, name in leaves.items()})
    alone.value(node)


def _check_shape(node, operand):
    try:
        fits = torch.broadcast_shapes(fake(operand).shape, fake(node).shape) == fake(node).shape
    except RuntimeError:
        fits = False
    if not fits and not name_of(node).startswith(("full_like", "ones_like", "zeros_like", "new_")):
        shapes = f"{tuple(fake(operand).shape)} to {tuple(fake(node).shape)}"
        raise Unsupported(f"its operand {operand} does not broadcast from {shapes}")
