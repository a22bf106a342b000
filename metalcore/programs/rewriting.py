"""Puts metalcore's operators in the place of what patterns find."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg
from torch.utils._pytree import tree_flatten, tree_map

from .ir import is_barrier, mutated_storages, name_of, one_tracer, segments, storage_of, tensors_of, value
from .matching import Match
from .passes.functional import propagate

__all__ = ["Emitter", "Pattern", "Rewritten", "rewrite"]


class Rewritten(NamedTuple):
    """A place where a pattern was applied.

    Example:
        >>> x = torch.ones(2, 4, device="mps")
        >>> report = metalcore.compile(torch.nn.RMSNorm(4, device="mps").eval(), (x,)).report()
        >>> [rewritten.pattern for rewritten in report.fused]
        ['rms_norm']
    """

    pattern: str
    place: str  # the name of the node that was replaced
    removed: tuple[str, ...]  # the operators that it consisted of
    made: tuple[str, ...]  # the operators that replace them


class Pattern:
    """A kind of computation for which metalcore has an operator. Each is a class in a file of its own.

    Attributes:
        name: what switches it off and on.
        summary: what it replaces, for the table of patterns.
        anchors: the names of operators with which such a computation ends.
        exclusive: whether the values in between must not be used by anything else.
        by_name_on: types of devices on which PyTorch's own kernels are faster, or may be. There the pattern is applied
            only if it is asked for by its name.
        needs_constants: whether it computes new values of parameters, which only a program of fixed parameters can.

    Example:
        >>> [pattern.name for pattern in metalcore.programs.PATTERNS][:2]
        ['conv_batch_norm', 'layer_norm']
    """

    name = ""
    summary = ""
    anchors: frozenset[str] = frozenset()
    exclusive = True
    by_name_on: frozenset[str] = frozenset()
    needs_constants = False

    def match(self, node: Node) -> Match | None:
        """Returns the match that ends with the node, if there is one that metalcore's operators can compute."""
        raise NotImplementedError

    def is_faster(self, match: Match, device_type: str) -> bool:
        """Returns whether a match is replaced on a type of device without being asked for by name."""
        return device_type not in self.by_name_on

    def outputs(self, node: Node, match: Match) -> Sequence[Node]:
        """Returns the nodes that are replaced. By default it is the node alone."""
        return (node,)

    def emit(self, match: Match, emit: Emitter) -> Sequence[Node] | Node | None:
        """Makes the nodes that replace the outputs, or returns None where it finds that it cannot."""
        raise NotImplementedError


class Emitter:
    """A maker of nodes at one place of a graph, with their fake values. Autograd will differentiate with respect to the
    nodes in `with_gradient`.

    Example:
        >>> traced = metalcore.programs.trace(torch.nn.ReLU(), (torch.ones(4, device="mps"),))
        >>> x, *_ = traced.module.graph.nodes
        >>> emit = metalcore.programs.Emitter(traced.module, x.meta["val"].fake_mode)
        >>> with traced.module.graph.inserting_after(x):
        ...     emit(torch.ops.aten.neg.default, x).meta["val"].shape
        torch.Size([4])
    """

    def __init__(self, module: GraphModule, mode, with_gradient: set[Node] | None = None):
        self.module, self.graph, self.mode, self.made = module, module.graph, mode, []
        self.with_gradient = with_gradient or set()

    def __call__(self, operator, *args: Any, **kwargs: Any) -> Node:
        """Returns a call of an operator."""
        node = self.graph.call_function(operator, args, kwargs)
        fake_args, fake_kwargs = map_arg((args, kwargs), value)
        with self.mode, torch.no_grad():
            node.meta["val"] = operator(*fake_args, **fake_kwargs)
        self.made.append(node)
        return node

    def item(self, node: Node, index: int) -> Node:
        """Returns one of several results."""
        import operator

        got = self.graph.call_function(operator.getitem, (node, index))
        got.meta["val"] = value(node)[index]
        self.made.append(got)
        return got

    def constant(self, name: str, function: Callable, *nodes: Node) -> Node:
        """Returns what a function computes from parameters alone: constant folding does that, however large the result
        is, and gives it this name."""
        first = len(self.made)
        with one_tracer, self.mode, torch.no_grad():
            traced = make_fx(function)(*[value(node).detach() for node in nodes])
        result: Any = self._inline(traced, nodes)
        for node in self.made[first:]:
            node.meta["constant"] = name
        return result

    def parameter(self, name: str, tensor: torch.Tensor) -> Node:
        """Returns a new parameter of the program."""
        while hasattr(self.module, name):
            name += "_"
        self.module.register_buffer(name, tensor)
        node = self.graph.get_attr(name)
        node.meta["val"] = self.mode.from_tensor(tensor, static_shapes=True)
        node.meta["path"] = name
        self.made.append(node)
        return node

    def traced(self, function: Callable, *args: Any) -> Any:
        """Returns the operators that a function of nodes and other values calls, and its results. Returns None if
        PyTorch's operators alone do the work."""
        flat, spec = tree_flatten(args)
        nodes = [leaf for leaf in flat if isinstance(leaf, Node)]

        def call(*tensors):
            remaining = iter(tensors)
            leaves = [next(remaining) if isinstance(leaf, Node) else leaf for leaf in flat]
            return function(*spec.unflatten(leaves) if hasattr(spec, "unflatten") else tree_map(lambda x: x, leaves))

        with one_tracer, self.mode, torch.set_grad_enabled(bool(self.with_gradient)):
            traced = make_fx(call)(*[self._leaf(node) for node in nodes])
        if not any((name_of(node) or "").startswith("metalcore.") for node in traced.graph.nodes):
            return None
        return self._inline(traced, nodes)

    def _leaf(self, node):
        tensor = value(node).detach()
        return tensor.requires_grad_() if node in self.with_gradient else tensor

    def _inline(self, traced, nodes):
        placeholders = [node for node in traced.graph.nodes if node.op == "placeholder"]
        copies = dict(zip(placeholders, nodes))
        for node in traced.graph.nodes:
            if node.op == "output":
                return map_arg(node.args[0], lambda n: copies[n])
            if node.op == "placeholder":
                continue
            if node.op == "get_attr":
                raise RuntimeError(f"a fused operator needs {node.target}, a constant that is no part of the graph")
            copies[node] = self.graph.node_copy(node, lambda n: copies[n])
            self.made.append(copies[node])
        return None

    def undo(self) -> None:
        for node in reversed(self.made):
            self.graph.erase_node(node)
        self.made.clear()


def rewrite(
    module: GraphModule,
    patterns: Sequence[Pattern],
    limit: dict[str, int] | None = None,
    leaves: Collection[Node] = (),
    by_name: bool = False,
) -> list[Rewritten]:
    """Applies patterns, one after the other, wherever they are found.

    Args:
        by_name: whether the patterns were asked for by their names.
        leaves: the inputs with respect to which autograd will differentiate the graph.
        limit: for names of patterns, how often each is applied at most. Patterns may share a name.
    """
    done: list[Rewritten] = []
    mode = _mode_of(module.graph)
    if mode is None:
        return done
    remaining = dict(limit or {})
    for pattern in patterns:
        facts = _Facts(module.graph)
        with_gradient = _differentiated(module.graph, leaves)
        for node in list(module.graph.nodes):
            if node._erased or name_of(node) not in pattern.anchors or remaining.get(pattern.name) == 0:
                continue
            match = pattern.match(node)
            if match is None or not by_name and not pattern.is_faster(match, _device_type(node)):
                continue
            applied = _apply(module, pattern, node, match, facts, Emitter(module, mode, with_gradient))
            if applied is not None:
                done.append(applied)
                if pattern.name in remaining:
                    remaining[pattern.name] -= 1
    if done:  # with other strides, a reshape may be a view where it was a copy
        propagate(module)
    return done


def _device_type(node):
    return next((tensor.device.type for tensor in tensors_of(node)), "")


class _Facts:
    """What decides whether operations may move."""

    def __init__(self, graph: Graph):
        self.stretch = segments(graph)
        self.mutated = mutated_storages(graph)
        self.starts: dict[int, Node] = {}  # the first node of each stretch
        for node in graph.nodes:
            self.starts.setdefault(self.stretch[node], node)

    def is_mutated(self, node: Node) -> bool:
        """Returns whether some operation of the graph writes to a value's memory."""
        return any(storage_of(tensor) in self.mutated for tensor in tensors_of(node))


def _differentiated(graph, leaves):
    """Returns the nodes that depend on the leaves, where gradients are not switched off."""
    nodes, enabled = set(leaves), True
    if not leaves:
        return nodes
    for node in graph.nodes:
        if node.target is torch._C._set_grad_enabled:
            enabled = node.args[0]
        elif enabled and name_of(node) != "detach" and any(source in nodes for source in node.all_input_nodes):
            if any(t.is_floating_point() or t.is_complex() for t in tensors_of(node)):
                nodes.add(node)
    return nodes


def _mode_of(graph):
    return next((t.fake_mode for node in graph.nodes for t in tensors_of(node) if hasattr(t, "fake_mode")), None)  # pyright: ignore[reportAttributeAccessIssue]


def _apply(module, pattern, anchor, match, facts, emitter):
    outputs = list(pattern.outputs(anchor, match))
    inside = set(match.nodes)
    inputs = [thing for thing in match.values() if isinstance(thing, Node) and thing not in inside]
    if not _may_replace(pattern, outputs, inside, inputs, facts):
        return None
    place = _place(outputs, inside, inputs, facts)
    if place is None:
        return None
    with module.graph.inserting_before(place):
        replacements = pattern.emit(match, emitter)
    replacements = [replacements] if isinstance(replacements, Node) else replacements
    # In y + y, the residual is the product itself, which is about to go.
    reads_inside = pattern.exclusive and any(not inside.isdisjoint(node.all_input_nodes) for node in emitter.made)
    if replacements is None or reads_inside or not all(_fits(old, new) for old, new in zip(outputs, replacements)):
        emitter.undo()
        return None
    for node in emitter.made:
        facts.stretch[node] = facts.stretch[anchor]
        if any(source in emitter.with_gradient for source in node.all_input_nodes):
            emitter.with_gradient.add(node)
    removed = tuple(name_of(node) or str(node.target) for node in match.nodes)
    name = anchor.name
    for old, new in zip(outputs, replacements):
        old.replace_all_uses_with(new, delete_user_cb=lambda user: user not in emitter.made)
    for node in sorted(inside | set(outputs), reverse=True):
        if not node._erased and not node.users:
            module.graph.erase_node(node)
    names = tuple(name_of(node) or "" for node in emitter.made if "constant" not in node.meta)
    return Rewritten(pattern.name, name, removed, tuple(name for name in names if name))


def _may_replace(pattern, outputs, inside, inputs, facts):
    stretch = facts.stretch[outputs[-1]]
    if any(is_barrier(node) or facts.stretch[node] != stretch for node in outputs):
        return False
    if any(map(facts.is_mutated, outputs)):
        return False
    # What is written to is read where the new operation stands: no write may lie between there and where it was read.
    if any(facts.stretch[node] != stretch for node in inside) and any(map(facts.is_mutated, [*inside, *inputs])):
        return False
    if pattern.exclusive:
        allowed = inside | set(outputs)
        return all(node in outputs or all(user in allowed for user in node.users) for node in inside)
    return True


def _place(outputs, inside, inputs, facts):
    """Returns the node before which new ones can stand: after all inputs, in the outputs' stretch, before all users."""
    start = facts.starts[facts.stretch[outputs[-1]]]
    while start._erased:
        start = start._next
    place = max([start, *(node._next for node in inputs)])
    while place.op in ("placeholder", "get_attr"):
        place = place._next
    users = [user for node in outputs for user in node.users if user not in inside]
    return place if all(not user < place for user in users) else None


def _fits(old, new):
    a, b = value(old), value(new)
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device
