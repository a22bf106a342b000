"""Plans of attention with the caller's functions: tiles, parts, and what each kernel takes and gives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ... import _C
from ..._core.operators import ops
from ..._core.routing import device_type, on_cuda
from ..pointwise.numbers import Unsupported
from .captured import Plan, gradients_of, plan_of
from .graphs import Captured
from .kernels import Launch
from .mods import Mods

__all__ = ["MOST_SIZE", "Call", "Functions", "Tables", "dkv", "dq", "forward", "like", "tables_of"]

MOST_SIZE = 256
_SIZES = (64, 96, 128, 192, 256)
# Few queries: as many threadgroups as fill a large GPU twice, and keys of a block that one takes at least.
_THREADGROUPS, _CUT = 256, 128
# Tables of fewer rows have no order: most of their threadgroups work at once.
_FEWEST_IN_ORDER = 16


class Tables(NamedTuple):
    """The blocks that rows of blocks visit: dense int32 tensors (batch, heads, rows) and (batch, heads, rows, columns).

    Attributes:
        partial, full: counts and numbers of blocks with a mask, and of those without one.
        q_block, k_block: queries and keys of a block.
        order: the numbers of the rows, first those of the most blocks, or None: (batch, heads, rows).
    """

    partial: tuple[Tensor, Tensor]
    full: tuple[Tensor, Tensor] | None
    q_block: int
    k_block: int
    order: Tensor | None = None

    @property
    def buffers(self) -> list[Tensor]:
        return [*self.partial, *(self.full or self.partial), self.partial[0] if self.order is None else self.order]

    @property
    def numbers(self) -> list[int]:
        counts, indices = self.partial
        full_columns = self.full[1].shape[3] if self.full else 0
        return [*counts.shape, indices.shape[3], full_columns, self.q_block, self.k_block]


def tables_of(block_mask: Sequence, of_keys: bool) -> Tables:
    """Returns the blocks of keys that blocks of queries visit, or the other way round, of a BlockMask's tuple."""
    counts, indices, full_counts, full_indices = block_mask[6:10] if of_keys else block_mask[2:6]
    full = None if full_counts is None else (_dense(full_counts, 3), _dense(full_indices, 4))
    tables = Tables((_dense(counts, 3), _dense(indices, 4)), full, int(block_mask[-3]), int(block_mask[-2]))
    return tables._replace(order=_order(counts, tables))


# Orders of rows by the tensors of their counts, and of each by its shape and the stream that has computed it. One whose
# counts have changed since is still an order.
_orders = WeakTensorKeyDictionary()


def _order(key: Tensor, tables: Tables) -> Tensor | None:
    """Returns the order of a table's rows. It is computed where the table is used for the second time: one that is used
    once does not pay for it. A CUDA graph takes one that is there."""
    counts = tables.partial[0]
    if type(key) is not Tensor or counts.shape[2] < _FEWEST_IN_ORDER:
        return None
    if key not in _orders:
        _orders[key] = {}
        return None
    known = _orders[key]
    if key.is_cuda and torch.cuda.is_current_stream_capturing():
        return next((order for (shape, _), order in known.items() if shape == counts.shape), None)
    place = counts.shape, torch.cuda.current_stream(key.device).cuda_stream if key.is_cuda else 0
    if place not in known:
        blocks = counts if tables.full is None else counts + tables.full[0]
        known[place] = blocks.argsort(descending=True, stable=True).to(torch.int32)
    return known[place]


def _dense(tensor, dimensions):
    return tensor[(None,) * (dimensions - tensor.dim())].to(torch.int32).contiguous()


class Call(NamedTuple):
    """The arguments of a call: tensors of four dimensions whose elements of a row are neighbours."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float

    @property
    def size(self) -> int:
        return next(size for size in _SIZES if size >= max(self.q.shape[3], self.v.shape[3]))


class _Tiles(NamedTuple):
    """A threadgroup has `simds` simdgroups of 8 * `down` rows each, and walks over `across` others at once. For the
    gradients of keys and values, `own` of its values and keys stay in its memory."""

    size: int
    down: int
    simds: int
    across: int
    is_narrow: bool
    own: int = 2

    @property
    def rows(self) -> int:
        return 8 * self.down * self.simds

    @property
    def arguments(self) -> str:
        return f"{self.size}, {self.down}, {self.simds}, {self.across}, {str(self.is_narrow).lower()}"


# Tiles of heads of 128 elements of 16 bits, where threads have 255 registers and threadgroups 48 KiB. The simulator has
# Metal's 32 KiB, and so tiles of 32 rows.
_LARGE = {
    "forward": _Tiles(128, 2, 8, 64, False),
    "dq": _Tiles(128, 2, 8, 32, False),
    "dkv": _Tiles(128, 2, 8, 16, False, own=0),
}
# The same for whole tiles, where a threadgroup's own rows stay in its memory: see
# kernels/attention/flex_forward_tall.h.
_TALL = {
    ("forward", 64): _Tiles(64, 4, 4, 32, False),
    ("forward", 128): _Tiles(128, 4, 4, 32, False),
    ("dq", 64): _Tiles(64, 4, 4, 32, False),
    ("dq", 128): _Tiles(128, 4, 4, 32, False),
    ("dkv", 64): _Tiles(64, 4, 4, 32, False),
    ("dkv", 128): _Tiles(128, 2, 8, 32, False),
}


def _first(value: int, *limits: tuple[int, int], otherwise: int) -> int:
    return next((number for limit, number in limits if value <= limit), otherwise)


def _tiles(call: Call, kernel: str, block: int) -> _Tiles:
    """Returns the tiles of the kernels that attention without functions has: see kernels/attention/attention.h. Blocks
    of so many rows take more of them."""
    size, row = call.size, call.size * call.q.element_size()
    is_narrow = (_C.chosen_tuning() or _C.gpu_family(device_type(call.q))).startswith("apple")
    if is_narrow:
        both = _first(row, (192, 4), (512, 2), otherwise=1)
        if kernel == "forward":
            across = _first(row, (192, 32), (256, 16), otherwise=8)
            return _Tiles(size, 1, _first(row, (512, 4), otherwise=2), across, True)
        longest = 128 if kernel == "dkv" else 256
        return _Tiles(size, 1, both, _first(row, (longest, 16), otherwise=8), True)
    across = _first(row, (128, 64), (256, 32), (512, 16), otherwise=8)
    if size == 128 and row == 256 and block >= 128:
        large = _LARGE[kernel]
        return large if on_cuda(call.q) else large._replace(across=min(large.across, 32))
    if kernel == "forward":
        return _Tiles(size, _first(size, (128, 2), otherwise=1), 4, across, False)
    if kernel == "dq":
        return _Tiles(size, _first(row, (256, 2), otherwise=1), 4, across, False)
    across = 32 if row == 384 and size == 192 else across
    return _Tiles(size, _first(row, (128, 2), otherwise=1), 4, across, False, own=0)


def _tall(call: Call, tiles: _Tiles, kernel: str) -> _Tiles | None:
    """Returns the tiles of the kernels for whole ones: on Hopper GPUs, which have memory for them, and small ones in
    the simulator."""
    if tiles.is_narrow or call.q.element_size() != 2:
        return None
    tall = _TALL.get((kernel, tiles.size))
    if on_cuda(call.q):
        return tall if _C.gpu_family("cuda") == "hopper" else None
    return tall and tall._replace(down=4 if kernel == "forward" else 2, simds=1, across=16)


def forward(call: Call, tables: Tables, functions: Functions) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the results, and the logarithms of softmax's sums and the largest scores, both to base 2."""
    q, (batch, heads, length, _), size = call.q, call.q.shape, call.v.shape[3]
    tiles = _tiles(call, "forward", tables.q_block)
    group = heads // call.k.shape[1]
    if 1 < group <= tiles.rows // length and tables.numbers[1:3] == [1, 1] and not functions.packed:
        return _packed(call, tables, functions, group)
    splits, cuts = _splits(call, tables, tiles)
    out = like(q, size)
    # Results of parts of the keys are floats (batch, length, splits, heads, size).
    parts = out if splits == 1 else q.new_empty(batch, length, splits, heads, size, dtype=torch.float32)
    numbers = (batch, heads, length) if splits == 1 else parts.shape[:-1]
    lse, largest = (torch.empty(numbers, dtype=torch.float32, device=q.device) for _ in range(2))
    inputs = [("T", q), ("T", call.k), ("T", call.v), *_tables(tables)]
    outputs = [("T" if splits == 1 else "float", parts), ("float", lse), ("float", largest)]
    place = parts if splits == 1 else parts[:, :, 0].transpose(1, 2)
    blocks = (tables.q_block, tables.k_block) if splits == 1 else ()
    strides, tall = {"out": place}, _tall(call, tiles, "forward")
    launch = Launch("forward", call, tables, tiles, functions, strides, outputs, inputs, blocks, tall=tall)
    part = 0 if splits == 1 else parts.stride(2)
    work = 2 * call.k.shape[2]
    launch.run(tables.q_block, length, heads, work, split=(splits, part, cuts))
    if splits == 1:
        return out, lse, largest
    merged, sums = ops.merge_states(parts.flatten(0, 1), lse.flatten(0, 1) * math.log(2))
    out.copy_(merged.view(batch, length, heads, size).transpose(1, 2))
    sums = sums.view(batch, length, heads).transpose(1, 2).contiguous() / math.log(2)
    return out, sums, largest.amax(2).transpose(1, 2).contiguous()


def _packed(call: Call, tables: Tables, functions: Functions, group: int):
    """Returns the same for few queries, of which those of all heads that share a head of keys are rows of one tile, so
    that keys are read once."""
    (batch, heads, length, size), of_keys = call.q.shape, call.k.shape[1]
    q = call.q.reshape(batch, of_keys, group * length, size)
    functions = functions._replace(packed=(group, length))
    results = forward(call._replace(q=q), tables._replace(q_block=group * length), functions)
    out, lse, largest = (x.reshape(batch, heads, length, *x.shape[3:]) for x in results)
    return like(call.q, out.shape[3]).copy_(out), lse, largest


def _splits(call: Call, tables: Tables, tiles: _Tiles) -> tuple[int, int]:
    """Returns how many threadgroups share the keys of a few queries, and the parts that a block has for them."""
    batch, heads, length, _ = call.q.shape
    if length > tiles.rows:
        return 1, 1
    block = min(tables.k_block, call.k.shape[2])
    cuts = -(-block // _CUT)
    columns = sum(indices.shape[3] for _, indices in (tables.partial, *([tables.full] if tables.full else [])))
    splits = min(-(-_THREADGROUPS // (batch * heads * tables.numbers[2])), columns * cuts)
    return (splits, cuts) if splits > 1 else (1, 1)


def dq(call, tables, functions: Functions, out, lse, d_out, d_lse, wanted: Sequence[bool] = ()):
    """Returns the gradient of queries, for each of them what softmax's derivative subtracts, and the gradients of what
    the function of scores captures, where they are wanted."""
    q, plan = call.q, None
    tiles, pieces = _tiles(call, "dq", tables.q_block), 1
    outputs: list = []
    if any(wanted) and functions.joint is not None:
        pieces = -(-min(tables.q_block, q.shape[2]) // tiles.rows) * tables.numbers[2]
        try:
            plan = plan_of(functions.joint.graph, wanted, call, tiles.simds, pieces)
        except Unsupported as reason:
            raise Unsupported(f"metalcore.flex_attention: the gradient of what score_mod captures: {reason}") from None
    rows = kept = None
    if plan is not None:
        if plan.rows:
            rows = q.new_empty(len(plan.rows), *q.shape[:3], dtype=torch.float32)
            outputs.append(("float", rows))
        if plan.tables:
            kept = q.new_zeros(plan.elements(tiles.simds), dtype=torch.float32)
            outputs.append(("float", kept))
        functions = functions._replace(plan=plan)
    gradient = like(q, q.shape[3])
    delta = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    inputs = [("T", q), ("T", call.k), ("T", call.v), *_tables(tables)]
    inputs += [("T", out), ("float", lse), ("T", d_out), ("float", lse if d_lse is None else d_lse)]
    outputs = [("T", gradient), ("float", delta), *outputs]
    strides = {"out": out, "d_out": d_out, "dq": gradient}
    blocks = tables.q_block, tables.k_block
    tall = _tall(call, tiles, "dq") if plan is None else None
    launch = Launch("dq", call, tables, tiles, functions, strides, outputs, inputs, blocks, tall=tall)
    launch.run(tables.q_block, q.shape[2], q.shape[1], 3 * call.k.shape[2], has_lse=d_lse is not None)
    if plan is None or functions.joint is None:
        captures = () if functions.score is None else functions.score.captures
        zeros = (torch.zeros_like(x) if want and isinstance(x, Tensor) else None for x, want in zip(captures, wanted))
        return gradient, delta, tuple(zeros)
    joint, captures = functions.joint
    return gradient, delta, gradients_of(joint, plan, captures, wanted, rows, kept, tiles.simds, call.k.shape[2])


def dkv(call, tables, functions: Functions, lse, delta, d_out):
    """Returns the gradients of keys and values."""
    q, k, v = call.q, call.k, call.v
    dk, dv = like(k, k.shape[3]), like(v, v.shape[3])
    tiles = _tiles(call, "dkv", tables.k_block)
    kinds = [(True, True, tiles.own)]
    if tiles.is_narrow and tiles.size >= 128:  # a thread's registers do not hold the sums of both
        tiles = tiles._replace(across=_first(tiles.size * q.element_size(), (256, 16), otherwise=8))
        kinds = [(True, False, 2), (False, True, 1)]
    inputs = [("T", q), ("T", k), ("T", v), *_tables(tables), ("float", lse), ("float", delta), ("T", d_out)]
    for of_keys, of_values, own in kinds:
        more = f", {str(of_keys).lower()}, {str(of_values).lower()}, {own}"
        strides, outputs = {"d_out": d_out, "dk": dk, "dv": dv}, [("T", dk), ("T", dv)]
        blocks = tables.k_block, tables.q_block
        tall = _tall(call, tiles, "dkv")
        launch = Launch("dkv", call, tables, tiles, functions, strides, outputs, inputs, blocks, more, tall)
        work = 4 * q.shape[2] * (q.shape[1] // k.shape[1])
        launch.run(tables.k_block, k.shape[2], k.shape[1], work)
    return dk, dv


class Functions(NamedTuple):
    """The caller's functions, and the node of score_mod's derivative; None where there is none.

    Attributes:
        has_derivative: whether the kernel needs the derivative.
        plan: how it adds up gradients of what the function of scores captures.
        packed: heads and queries that are rows of a head of the kernel's, or nothing.
    """

    score: Captured | None
    mask: Captured | None
    joint: Captured | None = None
    has_derivative: bool = False
    plan: Plan | None = None
    packed: tuple[int, ...] = ()

    @property
    def captures(self) -> tuple:
        return tuple(x for mod in (self.score, self.mask) if mod is not None for x in mod.captures)

    @property
    def graphs(self) -> tuple:
        return tuple(None if mod is None else mod.graph for mod in (self.score, self.mask, self.joint))

    def mods(self, rows: int, kernel: str) -> Mods:
        mods = Mods(self.packed)
        mods.method("score", self.score, "float", more=("score",))
        mods.mask(self.mask, "q" if kernel == "dkv" else "k")
        if not self.has_derivative:
            return mods
        if self.plan is None or self.joint is None:
            mods.no_sums()
        else:
            mods.sums(self.joint, self.plan, rows)
        if self.joint is None:
            mods.plain_derivative("gradient")
            return mods
        returned = next(node for node in self.joint.graph.graph.nodes if node.op == "output").args[0]
        if returned[0] is None:  # pyright: ignore[reportIndexIssue, reportOptionalSubscript]
            mods.plain_derivative("0.0f")
        else:
            mods.method("derivative", self.joint, "float", returned[0], more=("score", "gradient"))  # pyright: ignore[reportArgumentType, reportIndexIssue, reportOptionalSubscript]
        return mods


def _tables(tables):
    return [("int", tensor) for tensor in tables.buffers]


def like(tensor: Tensor, size: int) -> Tensor:
    """Returns a new tensor (batch, heads, length, size) whose dimensions lie in memory in the order of `tensor`'s, as
    PyTorch's operator gives it. A row's elements are neighbours."""
    order = sorted(range(3), key=lambda d: (tensor.stride(d), -d))
    shape, strides, step = (*tensor.shape[:3], size), [0, 0, 0, 1], max(size, 1)
    for d in order:
        strides[d] = step
        step *= max(shape[d], 1)
    return tensor.new_empty_strided(shape, strides)
