"""Gradients of what a score_mod captures: the kernel of queries' gradients adds up what each score gives an element.

The derivative's graph scatters a number for each score to a place of a captured tensor. Where the place depends on the
batch item, the head and the query alone, a row has one sum. Other places are elements of tables in memory: one for each
simdgroup of a dispatch, or one for all of them where a dimension is the query's number itself. Sums of rows and tables
are added up, and only they are scattered to the tensor, so that no time goes by the number of all scores but that of
the visited blocks. Every order is fixed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from ..._core.operators import ops
from ..pointwise.nodes import fake
from ..pointwise.numbers import Unsupported
from .graphs import INDICES

__all__ = ["Place", "Plan", "Scatter", "gradients_of", "plan_of", "scatters_of"]

_B, _H, _Q, _K, _SCORE = 1, 2, 4, 8, 16  # what a number depends on
_FIRST = INDICES + 2  # arguments of the derivative's graph before what is captured
# Bytes of tables: as many of them as this allows work at once, and no more than `_MOST_BYTES` in all.
_BYTES, _MOST_BYTES = 1 << 28, 1 << 31


class Scatter(NamedTuple):
    """A node that scatters a number to an element.

    Attributes:
        node: the scatter.
        value: the number's node.
        indices: the nodes of the element's indices, one for each of `sizes`.
    """

    node: Node
    value: Node
    indices: tuple[Node, ...]
    sizes: tuple[int, ...]


class Place(NamedTuple):
    """How sums of a scatter are kept.

    Attributes:
        dims: of a table: "q" and "k" are the numbers themselves, and numbers are dimensions of the captured tensor.
        extents: of these dimensions.
        is_row: a row of scores has one sum, and `dims` is ("q",).
        is_shared: no two simdgroups add to one element.
    """

    dims: tuple[Any, ...]
    extents: tuple[int, ...]
    is_row: bool
    is_shared: bool


class Plan(NamedTuple):
    """Attributes:
    scatters, places: of the same length.
    batches, heads: that have tables of their own; all others share one.
    parts: threadgroups of a head that a dispatch has, each with tables of its own.
    """

    scatters: tuple[Scatter, ...]
    places: tuple[Place, ...]
    batches: int
    heads: int
    parts: int

    def bases(self) -> list[tuple[int, int]]:
        """Returns for each table the first element of its first copy, and elements from one copy to the next."""
        shared, own = (sum(math.prod(x.extents) for x in self.tables if x.is_shared == kind) for kind in (True, False))
        at = {True: 0, False: self.batches * self.heads * shared}
        found = []
        for place in self.tables:
            found.append((at[place.is_shared], shared if place.is_shared else own))
            at[place.is_shared] += math.prod(place.extents)
        return found

    def elements(self, simds: int) -> int:
        """Returns how many elements the tables have in all."""
        copies = {True: 1, False: self.parts * simds}
        return self.batches * self.heads * sum(copies[x.is_shared] * math.prod(x.extents) for x in self.tables)

    @property
    def tables(self) -> list[Place]:
        return [place for place in self.places if not place.is_row]

    @property
    def rows(self) -> list[Place]:
        return [place for place in self.places if place.is_row]


def _dependence(graph: GraphModule) -> dict[Node, int]:
    bits: dict[Node, int] = {}
    own = iter((_SCORE, _B, _H, _Q, _K, _SCORE))
    for node in graph.graph.nodes:
        bits[node] = next(own, 0) if node.op == "placeholder" else 0
        for other in node.all_input_nodes:
            bits[node] |= bits[other]
    return bits


def _is_scatter(node) -> bool:
    return isinstance(node, Node) and node.target is torch.ops.flex_lib.zeros_and_scatter.default


def scatters_of(joint: GraphModule, wanted: Sequence[bool]) -> tuple[Scatter, ...]:
    """Returns the scatters of a derivative's graph that gradients of captured tensors are made of.

    Raises:
        Unsupported: a gradient is no sum of them.
    """
    bits, found = _dependence(joint), {}
    returned = next(node for node in joint.graph.nodes if node.op == "output").args[0]
    waiting = [node for node, want in zip(_captured_of(returned, wanted), wanted) if want and node is not None]
    while waiting:
        node = waiting.pop()
        if node in found or not bits[node]:
            continue
        if _is_scatter(node):
            found[node] = _scatter(node)
        elif node.op == "placeholder" or not any(bits[other] for other in node.all_input_nodes):
            raise Unsupported("the gradient of a captured tensor is no sum of numbers at its elements")
        else:
            waiting.extend(node.all_input_nodes)
    return tuple(found.values())


def _captured_of(returned, wanted):
    return returned[_FIRST - 1 :][: len(wanted)]


def _scatter(node):
    sizes, indices, value = node.args
    sizes, indices = tuple(sizes), tuple(indices)
    if _is_scatter(value) and tuple(fake(value).shape) == sizes[len(indices) :]:
        inner = _scatter(value)  # table[b][q]
        indices, value = (*indices, *inner.indices), inner.value
    if (
        fake(value).dim()
        or len(indices) != len(sizes)
        or not all(isinstance(size, int) for size in sizes)
        or any(fake(index).dim() or fake(index).dtype not in (torch.int32, torch.int64) for index in indices)
    ):
        raise Unsupported("a captured tensor is read by more than one number for each of its dimensions")
    return Scatter(node, value, indices, sizes)


def _place(joint, scatter, bits, length, keys):
    numbers = [node for node in joint.graph.nodes if node.op == "placeholder"][3:5]
    kinds = [bits[index] & (_Q | _K | (bits[index] & _SCORE)) for index in scatter.indices]
    if any(kind & _SCORE for kind in kinds):
        raise Unsupported("the place in a captured tensor depends on a score")
    if not any(kind & _K for kind in kinds):
        return Place(("q",), (length,), True, True)
    dims: list[Any] = []
    for name, bit, extent in (("q", _Q, length), ("k", _K, keys)):
        of = [d for d, kind in enumerate(kinds) if kind == bit]
        if not of:
            continue
        elements = math.prod(scatter.sizes[d] for d in of)
        is_number = any(scatter.indices[d] is numbers[name == "k"] for d in of)
        dims += [name] if is_number or elements >= extent else of
    dims += [d for d, kind in enumerate(kinds) if kind == _Q | _K]
    extents = tuple({"q": length, "k": keys}.get(d) or scatter.sizes[d] for d in dims)
    return Place(tuple(dims), extents, False, "q" in dims)


def plan_of(joint: GraphModule, wanted, call, simds: int, pieces: int) -> Plan | None:
    """Returns how the sums of a call are kept, or None where no gradient is wanted.

    Args:
        simds: simdgroups of a threadgroup.
        pieces: threadgroups of a head.
    """
    scatters = scatters_of(joint, wanted)
    if not scatters:
        return None
    bits = _dependence(joint)
    batches, heads, length, _ = call.q.shape
    places = tuple(_place(joint, scatter, bits, length, call.k.shape[2]) for scatter in scatters)
    shared = 4 * sum(math.prod(place.extents) for place in places if place.is_shared and not place.is_row)
    own = 4 * simds * sum(math.prod(place.extents) for place in places if not place.is_shared)
    needs = 0
    for scatter, place in zip(scatters, places):
        if not place.is_row:
            for d, index in enumerate(scatter.indices):
                needs |= 0 if d in place.dims else bits[index] & (_B | _H)
    if batches * heads * (shared + own) > _BYTES:
        batches, heads = batches if needs & _B else 1, heads if needs else 1
    items = batches * heads
    parts = max(1, min(pieces, (_BYTES // items - shared) // own)) if own else pieces
    if items * (shared + own * parts) > _MOST_BYTES or max(shared, own) >= 1 << 34:
        raise Unsupported("the tables of a captured tensor's gradient take too much memory")
    return Plan(scatters, places, batches, heads, parts)


class _Part(Interpreter):
    """Runs what some nodes of a graph need."""

    def values(self, arguments, known: dict[Node, Any], nodes) -> list[Any]:
        graph: Any = self.module.graph
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        self.env: dict[Node, Any] = {**dict(zip(placeholders, arguments)), **known}
        needed, waiting = set(), [node for node in nodes if node is not None]
        while waiting:
            node = waiting.pop()
            if node not in needed and node not in self.env:
                needed.add(node)
                waiting.extend(node.all_input_nodes)
        for node in graph.nodes:
            if node in needed:
                self.env[node] = self.run_node(node)
        return [None if node is None else self.env[node] for node in nodes]


def _numbers(joint, node, captures, batches, heads, axis, extent, device):
    """Returns an index for all batch items, heads, and queries or keys: (batches, heads, extent)."""

    def run(b, h, q, k):
        nothing = torch.zeros((), device=device)
        return _Part(joint).values((nothing, b, h, q, k, nothing, *captures), {}, [node])[0].long()

    for dims in ((None, None, 0, 0), (None, 0, None, None), (0, None, None, None)):
        run = torch.vmap(run, in_dims=dims, out_dims=0)
    b, h, at = (torch.arange(n, dtype=torch.int32, device=device) for n in (batches, heads, extent))
    zero = torch.zeros_like(at)
    return run(b, h, *((at, zero) if axis == "q" else (zero, at)))


def _scattered(joint, scatter, place, sums, captures):
    """Returns the tensor that a scatter makes, from sums (batches, heads, *extents)."""
    bits = _dependence(joint)
    b, h, q, k = [node for node in joint.graph.nodes if node.op == "placeholder"][1 : INDICES + 1]
    axes = {d: 2 + i for i, d in enumerate(place.dims)}
    of_bits = ((0, _B, b), (1, _H, h), (axes.get("q"), _Q, q), (axes.get("k"), _K, k))
    own, used = {}, set()  # dimensions whose number is that of an axis of the sums; axes that any depends on
    for d, index in enumerate(scatter.indices):
        if d in axes:
            own[d] = axes[d]
        for axis, bit, number in of_bits:
            if d not in axes and bits[index] & bit:
                used.add(axis)
                if index is number:
                    own[d] = axis
    used |= set(own.values())
    unused = [axis for axis in range(sums.dim()) if axis not in used]
    total = sums.sum(unused, keepdim=True) if unused else sums
    if scatter.sizes and len(own) == len(set(own.values())) == len(scatter.sizes):
        left = sorted(used)
        moved = total.squeeze(unused).permute([left.index(own[d]) for d in range(len(own))])
        part = tuple(slice(min(extents)) for extents in zip(moved.shape, scatter.sizes))
        result = sums.new_zeros(scatter.sizes)
        result[part] = moved[part]
        return result
    at = torch.zeros((1,) * total.dim(), dtype=torch.int64, device=sums.device)
    inside = torch.ones_like(at, dtype=torch.bool)
    for d, (index, size) in enumerate(zip(scatter.indices, scatter.sizes)):
        shape = [1] * total.dim()
        if d in own:
            shape[own[d]] = total.shape[own[d]]
            number = torch.arange(shape[own[d]], device=sums.device).view(shape)
        else:
            axis = "k" if bits[index] & _K else "q"
            last = axes.get(axis) if bits[index] & (_Q | _K) else None
            extent = 1 if last is None else total.shape[last]
            number: Any = _numbers(joint, index, captures, total.shape[0], total.shape[1], axis, extent, sums.device)
            shape[:2] = total.shape[:2]
            if last is not None:
                shape[last] = extent
            number = number.reshape(shape)
        number = torch.where(number < 0, number + size, number)
        inside = inside & (number >= 0) & (number < size)
        at = at * size + number
    values = torch.where(inside, total, 0).reshape(-1, 1)
    places = torch.where(inside, at, 0).expand_as(total).reshape(-1)
    added = ops.embedding_backward(values, places, math.prod(scatter.sizes), -1, False)
    return added.view(scatter.sizes)


def gradients_of(
    joint: GraphModule, plan: Plan, captures, wanted, rows: Tensor | None, tables: Tensor | None, simds: int
):
    """Returns the gradients of captured tensors, or None where none is wanted.

    Args:
        rows: (scatters with sums of rows, batch, heads, length).
        tables: of all items: first what is shared, and then for each part and simdgroup what is not.
    """
    known, row, items = {}, 0, (plan.batches, plan.heads)
    bases = iter(plan.bases())
    for scatter, place in zip(plan.scatters, plan.places):
        if place.is_row:
            assert rows is not None
            sums, row = rows[row], row + 1
        else:
            assert tables is not None
            (base, step), copies = next(bases), 1 if place.is_shared else plan.parts * simds
            extent = math.prod(place.extents)
            every = tables.as_strided(
                (*items, copies, extent), (items[1] * copies * step, copies * step, step, 1), base
            )
            sums = every.sum(2).view(*items, *place.extents)
        known[scatter.node] = _scattered(joint, scatter, place, sums, captures)
    for scatter in plan.scatters:
        known[scatter.node] = known[scatter.node].to(fake(scatter.node).dtype)
    returned: Any = next(node for node in joint.graph.nodes if node.op == "output").args[0]
    nodes = [node if want else None for node, want in zip(_captured_of(returned, wanted), wanted)]
    found = _Part(joint).values((*(None,) * _FIRST, *captures), known, nodes)
    return tuple(
        torch.zeros_like(x) if want and gradient is None else None if gradient is None else gradient.to(x.dtype)
        for x, want, gradient in zip(captures, wanted, found)
    )
