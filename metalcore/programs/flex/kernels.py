"""Kernels that are made of templates and the caller's functions, and how they are launched."""

from __future__ import annotations

import functools
import math
from pathlib import Path

import torch
from torch import Tensor

from ..._core import generated_kernels
from ..._core.operators import ops
from ..._core.routing import device_type
from ...msl.language.inline_headers import inline_headers
from ..pointwise.functions import used
from ..pointwise.numbers import MEMORY, Unsupported
from ..pointwise.parts import MOST_BUFFERS
from ..pointwise.source import HEAD
from .lowering import float_bits

_PACKAGE = Path(__file__).parents[2]
# The headers of kernels: in a wheel's package, or beside it in a checkout.
_KERNELS = next(path for path in (_PACKAGE / "kernels", _PACKAGE.parent / "kernels") if path.exists())

__all__ = ["Launch"]

# What a dispatch may do where the system aborts long ones: 0.2 s of the slowest GPU (csrc/gpu/cost.h).
_MOST_FLOPS = 0.2 * 0.23e12
# Threadgroups of the heads that take turns: as many as a large GPU runs at once. Keys and values of more do not fit its
# cache. Lists of blocks have many lengths: with a table, heads take turns whose keys and values have so many bytes.
_IN_TURN, _IN_CACHE = 128, 64 << 20
_MOST_NUMBERS = 448  # Metal takes 512 by value, and FlexParams are fewer than 64
_MADE, _KEPT = "metalcore_kernels", 64  # the key of a graph's meta, and how many kernels are kept there
_STRIDES = ("q", "k", "v", "out", "d_out", "dq", "dk", "dv")


class Launch:
    """A kernel and what it is launched with.

    Args:
        tensors: by the names of their strides, beside queries, keys and values.
        outputs, inputs: types of elements and tensors, in the order of the template's parameters.
        blocks: rows of the blocks of a threadgroup's own rows, and of those that it visits; () where it visits parts.
        more: template arguments after the tiles.
        tall: the tiles of a kernel that takes whole tiles alone, or None: see kernels/attention/flex_forward_tall.h.
    """

    def __init__(self, kernel, call, tables, tiles, functions, tensors, outputs, inputs, blocks, more="", tall=None):
        self.kernel, self.call, self.tables, self.tiles = kernel, call, tables, tiles
        self.outputs, self.inputs = outputs, inputs
        self.plan = functions.plan
        self.tensors = {"q": call.q, "k": call.k, "v": call.v, **tensors}
        self.vectors = all(_has_vectors(x) for name, x in self.tensors.items() if name not in ("dq", "dk", "dv"))
        if tall and blocks and self._is_whole(tall, *blocks):
            self.kernel, self.tiles = f"{kernel}_tall", tall
        self.whole = bool(blocks) and self._is_whole(self.tiles, *blocks)
        more = f", {str(self.whole).lower()}{more}"
        self.name, self.numbers, self.captured = self._made(functions, more)

    def _is_whole(self, tiles, own_block, other_block):
        """Returns whether no row and no element of a tile is missing."""
        call = self.call
        packs, threads = tiles.size * call.q.element_size() // 16, 32 * tiles.simds
        own, others = (call.k, call.q) if self.kernel.startswith("dkv") else (call.q, call.k)
        return (
            not tiles.is_narrow
            and self.vectors
            and call.q.shape[3] == call.v.shape[3] == tiles.size
            and threads % packs == tiles.across * packs % threads == 0
            and all(n % tiles.rows == 0 for n in (own.shape[2], min(own_block, own.shape[2])))
            and all(n % tiles.across == 0 for n in (others.shape[2], min(other_block, others.shape[2])))
        )

    def _made(self, functions, more):
        """Returns the kernel's name, the functions' numbers, and the captured tensors. Functions that are traced once
        and capture tensors of one form have them at hand."""
        captures = functions.captures
        owner = next((graph for graph in functions.graphs if graph is not None), None)
        known = {} if owner is None else owner.meta.setdefault(_MADE, {})
        forms = tuple((x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) else (type(x), repr(x)) for x in captures)
        same = tuple(next(i for i, other in enumerate(captures) if other is x) for x in captures)
        types = tuple(type_ for type_, _ in (*self.outputs, *self.inputs))
        key = self.kernel, self.call.q.dtype, self.tiles, more, types, tuple(map(id, functions.graphs)), forms, same
        key = *key, functions.packed
        rows = math.prod(self.call.q.shape[:3])
        if plan := functions.plan:
            key = *key, plan.scatters, plan.places, plan.is_once, plan.shared_items, rows
        if key not in known:
            mods = functions.mods(rows, self.kernel.removesuffix("_tall"))
            places = [next(i for i, x in enumerate(captures) if x is tensor) for tensor in mods.tensors]
            buffers = _buffers(mods.tensors, MOST_BUFFERS - 1 - len(types))
            source = self._source(mods, buffers, more)
            name = generated_kernels.add(f"flex_{self.kernel}", source, convergent=True)
            if len(known) >= _KEPT:
                known.clear()
            places = [[places[i] for i in buffer] for buffer in buffers]
            known[key] = name, mods.numbers, places, functions.graphs  # whose ids nothing else has as long as they live
        name, numbers, places, _ = known[key]
        return name, numbers, [_joined([captures[place] for place in buffer]) for buffer in places]

    def _source(self, mods, captured, more):
        tiles, buffers = self.tiles, [*self.outputs, *self.inputs]
        names = [f"x{i}" for i in range(len(buffers))]
        declared = [
            f"device {'' if i < len(self.outputs) else 'const '}{type_}* {name}"
            for i, (name, (type_, _)) in enumerate(zip(names, buffers))
        ]
        members = {}
        for i, buffer in enumerate(captured):
            declared.append(f"device const {MEMORY[mods.tensors[buffer[0]].dtype]}* c{i}")
            first = 0
            for place in buffer:
                at = f" + {mods.number(first)}" if first else ""
                members[place], first = f"c{i}{at}", first + _span(mods.tensors[place])
        declared.append("constant ulong* all_numbers")
        if len(mods.numbers) > _MOST_NUMBERS:
            raise Unsupported(
                f"metalcore.flex_attention: score_mod and mask_mod have {len(mods.numbers)} numbers in all, with the "
                f"sizes and strides of {len(mods.tensors)} captured tensors, and a kernel takes {_MOST_NUMBERS}"
            )
        signature = ",\n    ".join(f"{text} [[buffer({i})]]" for i, text in enumerate(declared))
        # A kernel of gradients that adds up those of captured tensors has sums behind its own two results.
        sums = names[2 : len(self.outputs)] if self.kernel == "dq" else []
        template = f"T, {tiles.arguments}{more}"
        has_diagonal = self.plan is not None and any(place.kind == "diagonal" for place in self.plan.places)
        of_dq = f"flex_dq_numbers<{tiles.across}, {tiles.simds}>()" if has_diagonal else "1"
        count = {"dkv": str(2 * tiles.across), "dkv_tall": str(4 * tiles.across), "dq": of_dq}.get(self.kernel)
        numbers = f"  threadgroup float numbers[{count}];\n" if count else ""
        passed = [
            *(name for name in names if name not in sums),
            "tile",
            *(["numbers"] if numbers else []),
            "p",
            "mods",
            "group",
            "thread_index",
            "simd",
            "lane",
        ]
        methods = mods.text()
        return (
            f"{_header(self.kernel)}\n{HEAD}{used(methods)}\n"
            f"typedef {MEMORY[self.call.q.dtype]} T;\n{methods}\n"
            f"[[kernel]] [[max_total_threads_per_threadgroup({32 * tiles.simds})]] void {generated_kernels.MARK}(\n"
            f"    {signature},\n"
            "    uint group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]],\n"
            "    uint simd [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {\n"
            f"  constexpr uint kElements = flex_{self.kernel}_tile<{template}>();\n"
            f"  alignas(16) threadgroup T tile[kElements];\n{numbers}"
            "  constant FlexParams& p = *reinterpret_cast<constant FlexParams*>(all_numbers);\n"
            "  constant ulong* n = all_numbers + sizeof(FlexParams) / sizeof(ulong);\n"
            f"  const Mods mods = {{{', '.join([*(members[i] for i in sorted(members)), 'n', *sums])}}};\n"
            f"  flex_{self.kernel}<{template}>({', '.join(passed)});\n}}\n"
        )

    def run(self, block, length, heads, others, has_lse=False, split=(1, 0, 1)):
        """Launches the kernel.

        Args:
            block: rows of a block, of `length` rows that a head has.
            others: rows of products that a row takes part in, for the time that a dispatch takes.
            split: threadgroups that share the keys, from the results of one to those of the next, and cuts of blocks.
        """
        call, tables, tiles = self.call, self.tables, self.tiles
        batch, q_heads, q_length, head_size = call.q.shape
        strides = [
            stride
            for name in _STRIDES
            for stride in (self.tensors[name].stride()[:3] if name in self.tensors else (0, 0, 0))
        ]
        pieces = -(-min(block, length) // tiles.rows)
        group = q_heads // call.k.shape[1]
        sizes = [q_heads, group, q_length, call.k.shape[2], head_size, call.v.shape[3], pieces]
        walks = chunk = tables.numbers[2] * pieces
        items = batch * heads
        if self.plan is not None and self.plan.tables:
            chunk, items = self.plan.parts, self.plan.at_once
        longest = walks * batch * heads * split[0]
        if device_type(call.q) == "mps":
            longest = max(1, int(_MOST_FLOPS / (2.0 * tiles.rows * others * tiles.size)))
        outs, ins = [t for _, t in self.outputs], [*(t for _, t in self.inputs), *self.captured]
        heads_in_cache = 0
        if tables.numbers[2] > 1:
            rows = call.k.shape[2] * (call.k.shape[3] + call.v.shape[3]) * call.k.element_size()
            heads_in_cache = _IN_CACHE // max(rows, 1) * (1 if self.kernel.startswith("dkv") else group)
        dispatches = []
        for piece in range(0, walks, chunk):
            now = min(chunk, walks - piece)
            count, most = batch * heads * now * split[0], min(longest, items * now * split[0])
            dispatches += [(piece, now, first, min(most, count - first)) for first in range(0, count, most)]
        for piece, now, first, groups in dispatches:
            # Heads that have the same tables do not work at once.
            in_turn = items if items < batch * heads else max(-(-_IN_TURN // now), heads_in_cache)
            flags = [self.vectors, now, piece, chunk, items, batch * heads, in_turn, tables.full is not None]
            flags += [tables.order is not None, has_lse]
            numbers = [
                *strides,
                *tables.numbers,
                *sizes,
                first,
                *split,
                *flags,
                float_bits(call.scale),
                *self.numbers,
            ]
            threads = 32 * tiles.simds
            grid = (groups * threads, 1, 1)
            why = f"{tiles.rows} rows for a threadgroup, head size {head_size} in tiles for {tiles.size}"
            variant = "narrow_flash" if tiles.is_narrow else "flash"
            ops._run_generated(
                self.name,
                outs,
                ins,
                [int(n) for n in numbers],
                True,
                grid,
                (threads, 1, 1),
                f"flex_{self.kernel}",
                variant,
                why,
            )


def _has_vectors(tensor):
    size = tensor.element_size()
    strides = [stride for extent, stride in zip(tensor.shape[:3], tensor.stride()) if extent != 1]
    return tensor.data_ptr() % 16 == 0 and all(n * size % 16 == 0 for n in (*strides, tensor.shape[3]))


def _span(tensor):
    """Returns how many elements of memory a tensor has from its first to its last."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))


def _buffers(tensors, most):
    """Returns the numbers of the tensors of each buffer: one, or where there are too few buffers, the smallest of each
    dtype."""
    if len(tensors) <= most:
        return [[i] for i in range(len(tensors))]
    alone = most - len({tensor.dtype for tensor in tensors})
    order = sorted(range(len(tensors)), key=lambda i: -_span(tensors[i]))
    joined = {}
    for i in sorted(order[alone:]):
        joined.setdefault(tensors[i].dtype, []).append(i)
    return [*([i] for i in order[:alone]), *joined.values()]


def _joined(tensors):
    """Returns the elements of tensors one behind the other; a tensor's keep their distances."""
    if len(tensors) == 1:
        return tensors[0]
    return torch.cat([x.detach().as_strided((_span(x),), (1,)) for x in tensors])


@functools.cache
def _header(kernel):
    text = f'#include "attention/flex_{kernel}.h"\n'
    return inline_headers(text, f"flex_{kernel}.metal", [_KERNELS])
