"""Gradients of what a score_mod captures: the kernel of queries' gradients adds up what each score gives an element.

The derivative's graph scatters a number, or a vector, for each score to a place of a captured tensor. Where a number's
place depends on the batch item, the head and the query alone, a row has one sum. Other places are elements of tables in
memory: one for each simdgroup of a dispatch, or one for all of them where a dimension is the query's number itself. The
lanes of a simdgroup share the elements of a vector. Sums of rows and tables are added up, and only they are scattered
to the tensor, so that no time goes by the number of all scores but that of the visited blocks. Every order is fixed.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from ..._core.operators import ops
from ..pointwise.nodes import fake
from ..pointwise.numbers import Unsupported
from .graphs import INDICES
from .scatters import FIRST, SCORE, B, D, H, K, Q, Scatter, captured_of, dependence, differences_of, scatters_of

__all__ = ["KINDS", "Place", "Plan", "gradients_of", "plan_of"]

KINDS = ("row", "pair", "key", "diagonal", "table", "vector")  # see kernels/attention/flex_captured.h

# Bytes of tables: as many of them as this allows work at once, and in all no more than `_MOST_BYTES` beyond what the
# gradients have.
_BYTES, _MOST_BYTES = 1 << 29, 1 << 31
_FEW = 4096  # elements of a table that all heads have, where an index is that of a head


class Place(NamedTuple):
    """How sums of a scatter are kept.

    Attributes:
        dims: of a table: "q" and "k" are the numbers themselves, "d" is their difference, and numbers are dimensions of
            the captured tensor.
        extents: of these dimensions.
        elements: of the vector that each place has.
        kind: of `KINDS`.
        is_shared: no two simdgroups add to one element.
    """

    dims: tuple[Any, ...]
    extents: tuple[int, ...]
    elements: int
    kind: str
    is_shared: bool

    @property
    def is_row(self) -> bool:
        return self.kind == "row"

    @property
    def size(self) -> int:
        return math.prod(self.extents) * self.elements


class Plan(NamedTuple):
    """Attributes:
    scatters, places: of the same length.
    shared_items, own_items: batches and heads that have tables of their own, for places that are shared and for those
        that are not. All others have the one of their number modulo these.
    parts: threadgroups of a head that a dispatch has, each with tables of its own.
    at_once: heads that work at once.
    is_once: no two heads have a table that is shared.
    """

    scatters: tuple[Scatter, ...]
    places: tuple[Place, ...]
    shared_items: tuple[int, int]
    own_items: tuple[int, int]
    parts: int
    at_once: int
    is_once: bool

    def bases(self) -> list[tuple[int, int]]:
        """Returns for each table the first element of its first copy, and elements from one copy to the next."""
        shared, own = (sum(x.size for x in self.tables if x.is_shared == kind) for kind in (True, False))
        at = {True: 0, False: math.prod(self.shared_items) * shared}
        found = []
        for place in self.tables:
            found.append((at[place.is_shared], shared if place.is_shared else own))
            at[place.is_shared] += place.size
        return found

    def elements(self, simds: int) -> int:
        """Returns how many elements the tables have in all."""
        copies = {True: math.prod(self.shared_items), False: math.prod(self.own_items) * self.parts * simds}
        return sum(copies[x.is_shared] * x.size for x in self.tables)

    @property
    def tables(self) -> list[Place]:
        return [place for place in self.places if not place.is_row]

    @property
    def rows(self) -> list[Place]:
        return [place for place in self.places if place.is_row]


def _place(joint, scatter, length, keys, may_be_diagonal):
    bits = dependence(joint)
    numbers = [node for node in joint.graph.nodes if node.op == "placeholder"][3:5]
    kinds = [bits[index] & (Q | K | (bits[index] & SCORE)) for index in scatter.indices]
    if any(kind & SCORE for kind in kinds):
        raise Unsupported("the place in a captured tensor depends on a score")
    if scatter.elements == 1 and not any(kind & K for kind in kinds):
        return Place(("q",), (length,), 1, "row", True)
    by_difference = dependence(joint, of_differences=True)
    if scatter.elements == 1 and may_be_diagonal and not any(by_difference[x] & (Q | K) for x in scatter.indices):
        return Place(("d",), (length + keys - 1,), 1, "diagonal", False)
    dims: list[Any] = []
    for name, bit, extent in (("q", Q, length), ("k", K, keys)):
        of = [d for d, kind in enumerate(kinds) if kind == bit]
        if not of:
            continue
        elements = math.prod(scatter.sizes[d] for d in of)
        is_number = any(scatter.indices[d] is numbers[name == "k"] for d in of)
        dims += [name] if is_number or elements >= extent else of
    dims += [d for d, kind in enumerate(kinds) if kind == Q | K]
    kind = {("q", "k"): "pair", ("k",): "key"}.get(tuple(dims), "table") if scatter.elements == 1 else "vector"
    of_items = [d for d, number in enumerate(kinds) if not number]
    few = scatter.elements * math.prod(scatter.sizes[d] for d in of_items) <= _FEW
    if kind in ("table", "vector") and "q" not in dims and few:
        dims += of_items  # so that heads may have the same table
    extents = tuple({"q": length, "k": keys}.get(d) or scatter.sizes[d] for d in dims)
    return Place(tuple(dims), extents, scatter.elements, kind, "q" in dims)


def plan_of(joint: GraphModule, wanted, call, simds: int, pieces: int) -> Plan | None:
    """Returns how the sums of a call are kept, or None where no gradient is wanted.

    Args:
        simds: simdgroups of a threadgroup.
        pieces: threadgroups of a head.
    """
    scatters = scatters_of(joint, wanted)
    if not scatters:
        return None
    bits = dependence(joint)
    every, length = tuple(call.q.shape[:2]), call.q.shape[2]
    places: list[Place] = []
    for scatter in scatters:
        has_diagonal = any(place.kind == "diagonal" for place in places)  # threadgroup memory has numbers of one
        places.append(_place(joint, scatter, length, call.k.shape[2], not has_diagonal))
    sizes, needs = {True: 0, False: 0}, {True: 0, False: 0}  # bytes of shared and other tables of an item
    for scatter, place in zip(scatters, places):
        if not place.is_row:
            sizes[place.is_shared] += 4 * place.size * (1 if place.is_shared else simds)
            for d, index in enumerate(scatter.indices):
                needs[place.is_shared] |= 0 if d in place.dims else bits[index] & (B | H)

    def items(needs):
        return (every[0] if needs & B else 1, every[1] if needs else 1)

    shared, own, total = every, every, math.prod(every)
    if total * sizes[True] > 2 * _BYTES:  # heads with the same table do not work at once
        shared = own = items(needs[True] | needs[False])
    elif total * sizes[False] * pieces > _BYTES:
        own = items(needs[False])
        if own == (1, 1):
            most = max(1, _BYTES // (sizes[False] * pieces))
            own = 1, next(n for n in range(min(most, total), 0, -1) if total % n == 0)
    parts = max(1, min(pieces, _BYTES // math.prod(own) // sizes[False])) if sizes[False] else pieces
    in_all = math.prod(shared) * sizes[True] + math.prod(own) * parts * sizes[False]
    of_gradients = 4 * sum(math.prod(scatter.sizes) for scatter in scatters)
    if in_all > _MOST_BYTES + of_gradients or in_all >= 1 << 34:  # 32 bits count the elements
        raise Unsupported("the tables of a captured tensor's gradient take too much memory")
    at_once = math.prod(own) if sizes[False] else math.prod(shared)
    return Plan(scatters, tuple(places), shared, own, parts, at_once, shared == every)


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


def _numbers(joint, node, element, captures, items, axis, extent, keys, device):
    """Returns an element of an index for all batch items, heads, and queries, keys or differences, as (batches, heads,
    extent)."""

    def run(b, h, q, k):
        nothing = torch.zeros((), device=device)
        known = {} if axis != "d" else {x: sign * q for x, sign in differences_of(joint).items()}
        return _Part(joint).values((nothing, b, h, q, k, nothing, *captures), known, [node])[0][element].long()

    for dims in ((None, None, 0, 0), (None, 0, None, None), (0, None, None, None)):
        run = torch.vmap(run, in_dims=dims, out_dims=0)
    b, h, at = (torch.arange(n, dtype=torch.int32, device=device) for n in (*items, extent))
    zero = torch.zeros_like(at)
    if axis == "d":
        at = at - (keys - 1)
    return run(b, h, *((zero, at) if axis == "k" else (at, zero)))


def _scattered(joint, scatter, place, sums, keys, captures):
    """Returns the tensor that a scatter makes, from sums (batches, heads, *extents, elements)."""
    bits = dependence(joint, of_differences="d" in place.dims)
    b, h, q, k = [node for node in joint.graph.nodes if node.op == "placeholder"][1 : INDICES + 1]
    axes = {d: 2 + i for i, d in enumerate(place.dims)}
    of_bits = ((0, B, b), (1, H, h), (axes.get("q"), Q, q), (axes.get("k"), K, k), (axes.get("d"), D, None))
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
    unused = [axis for axis in range(sums.dim() - 1) if axis not in used]
    total = sums.sum(unused, keepdim=True) if unused else sums
    indexed = scatter.sizes[: len(scatter.indices)]
    if len(own) == len(set(own.values())) == len(indexed):
        kept = [*sorted(used), sums.dim() - 1]
        moved = total.squeeze(unused).permute([*(kept.index(own[d]) for d in range(len(own))), -1])
        if moved.shape[:-1] == indexed:
            return moved.reshape(scatter.sizes)
        part = tuple(slice(min(extents)) for extents in zip(moved.shape, indexed))
        result = sums.new_zeros(*indexed, scatter.elements)
        result[part] = moved[part]
        return result.view(scatter.sizes)
    at = torch.zeros((1,) * (total.dim() - 1), dtype=torch.int64, device=sums.device)
    inside = torch.ones_like(at, dtype=torch.bool)
    for d, (index, size) in enumerate(zip(scatter.indices, indexed)):
        shape = [1] * at.dim()
        if d in own:
            shape[own[d]] = total.shape[own[d]]
            number = torch.arange(shape[own[d]], device=sums.device).view(shape)
        else:
            axis = next((name for name, bit in (("k", K), ("d", D)) if bits[index] & bit), "q")
            last = axes.get(axis) if bits[index] & (Q | K | D) else None
            extent = 1 if last is None else total.shape[last]
            element, items = scatter.index_at(index), (total.shape[0], total.shape[1])
            number: Any = _numbers(joint, index, element, captures, items, axis, extent, keys, sums.device)
            shape[:2] = items
            if last is not None:
                shape[last] = extent
            number = number.reshape(shape)
        number = torch.where(number < 0, number + size, number)
        inside = inside & (number >= 0) & (number < size)
        at = at * size + number
    values = torch.where(inside.unsqueeze(-1), total, 0).reshape(-1, scatter.elements)
    places = torch.where(inside, at, 0).expand(total.shape[:-1]).reshape(-1)
    added = ops.embedding_backward(values, places, math.prod(indexed), -1, False)
    return added.view(scatter.sizes)


def gradients_of(
    joint: GraphModule, plan: Plan, captures, wanted, rows: Tensor | None, tables: Tensor | None, simds: int, keys: int
):
    """Returns the gradients of captured tensors, or None where none is wanted.

    Args:
        rows: (scatters with sums of rows, batch, heads, length).
        tables: of all items: first what is shared, and then for each part and simdgroup what is not.
        keys: of a head.
    """
    known, row = {}, 0
    bases = iter(plan.bases())
    for scatter, place in zip(plan.scatters, plan.places):
        if place.is_row:
            assert rows is not None
            sums, row = rows[row].unsqueeze(-1), row + 1
        else:
            assert tables is not None
            (base, step), copies = next(bases), 1 if place.is_shared else plan.parts * simds
            items = plan.shared_items if place.is_shared else plan.own_items
            every = tables.as_strided(
                (*items, copies, place.size), (items[1] * copies * step, copies * step, step, 1), base
            )
            sums = (every.sum(2) if copies > 1 else every.squeeze(2)).view(*items, *place.extents, place.elements)
        added = _scattered(joint, scatter, place, sums, keys, captures)
        known[scatter.node] = known[scatter.node] + added if scatter.node in known else added
    for scatter in plan.scatters:
        known[scatter.node] = known[scatter.node].to(fake(scatter.node).dtype)
    returned: Any = next(node for node in joint.graph.nodes if node.op == "output").args[0]
    nodes = [node if want else None for node, want in zip(captured_of(returned, wanted), wanted)]
    found = _Part(joint).values((*(None,) * FIRST, *captures), known, nodes)
    return tuple(
        torch.zeros_like(x) if want and gradient is None else None if gradient is None else gradient.to(x.dtype)
        for x, want, gradient in zip(captures, wanted, found)
    )
