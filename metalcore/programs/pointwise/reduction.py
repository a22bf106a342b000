"""How a reduction's kernel walks its tensors, and its MSL, with the pointwise operations before the reduction in it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch.fx import Node

from ..._core.generated_kernels import MARK
from . import stages
from .accumulators import Accumulator, accumulator, results_of
from .functions import used
from .layout import Layout, collapsed, layout
from .lowering import Lowering
from .nodes import result_dtype
from .numbers import MEMORY, Unsupported, converted, register
from .source import (
    HEAD,
    MOVES,
    Indices,
    from_memory,
    loaded,
    loaded_element_of,
    loaded_type,
    memory,
    to_memory,
    vector_type,
)

ROW_THREADS = 256
MOST_STEPS = 512  # that a thread takes before its sum goes into another one
FEW_STEPS = 32  # so few elements are left to one thread
PARALLEL = 1 << 17  # threads that keep a GPU busy


class Walk(NamedTuple):
    """The kept dimensions, one result for each of their indices, and the reduced ones.

    Attributes:
        kept: sizes, and strides of the inputs, then of the results.
        reduced: of the inputs.
        threads: of a threadgroup that shares a result; 1 where a thread has a result of its own.
        chunks: the parts of the reduced elements that are reduced apart.
        per_chunk: elements of each; the last may have fewer.
    """

    kept: Layout
    reduced: Layout
    threads: int
    chunks: int
    per_chunk: int

    @property
    def results(self) -> int:
        return math.prod(self.kept.sizes)

    @property
    def numbers(self) -> list[int]:
        return [math.prod(self.reduced.sizes), self.per_chunk, self.results, *self.kept.numbers, *self.reduced.numbers]

    @property
    def grid(self) -> tuple[int, int, int]:
        return self.results * self.threads, self.chunks, 1

    @property
    def threadgroup(self) -> tuple[int, int, int]:
        return (self.threads if self.threads > 1 else min(256, 1 << (self.results - 1).bit_length())), 1, 1


def walk(
    shape: Sequence[int],
    dims: Sequence[int],
    inputs: Sequence[tuple[Sequence[int], int, int]],
    results: Sequence[Sequence[int]],
    *,
    is_ordered: bool = False,
) -> Walk:
    """Returns the walk over inputs of a shape (as for layout()), of which `dims` are reduced.

    Args:
        results: the strides of each result in the kept dimensions.
        is_ordered: whether the reduced elements are counted in the order of the dimensions.
    """
    others = [d for d in range(len(shape)) if d not in dims]
    kept_sizes, kept_strides = collapsed(
        [shape[d] for d in others], [*([strides[d] for d in others] for strides, _, _ in inputs), *results]
    )
    kept = Layout(kept_sizes, kept_strides, 1, False)
    extents = (sum((size - 1) * stride for size, stride in zip(shape, strides)) for strides, _, _ in inputs)
    if max(math.prod(shape), *extents) >= 1 << 31:
        raise Unsupported(f"a reduction of {list(shape)} elements needs indices of 64 bits")
    sizes = [shape[d] for d in dims]
    count, results_count = math.prod(sizes), math.prod(kept_sizes)
    by_threads = count <= FEW_STEPS or _is_along_results(inputs, others, dims)
    reduced_inputs = [
        ([strides[d] for d in dims], size, _row_address(strides, others, size, at)) for strides, size, at in inputs
    ]
    if count == 0:
        reduced = Layout((0,), tuple((0,) for _ in inputs), 1, False)
    else:
        reduced = layout(sizes, reduced_inputs, row_major=is_ordered)
        if by_threads or is_ordered:
            reduced = reduced._replace(vector=1)
    threads = 1 if by_threads or results_count * ROW_THREADS >= 1 << 32 else ROW_THREADS
    if threads > 1 and count <= 32 * 8:
        threads = 32
    steps = max(1, count // (threads * reduced.vector))
    chunks = min(-(-steps // 8), max(-(-steps // MOST_STEPS), min(256, PARALLEL // max(1, results_count * threads)), 1))
    unit = threads * reduced.vector
    per_chunk = -(-max(count, 1) // (chunks * unit)) * unit
    return Walk(kept, reduced, threads, max(1, -(-count // per_chunk)), per_chunk)


def _is_along_results(inputs, result_dims, dims):
    """Returns whether neighbours in memory belong to different results."""
    strides = inputs[0][0] if inputs else ()
    return min((strides[d] for d in result_dims if strides[d]), default=1 << 62) < min(  # pyright: ignore[reportOperatorIssue]
        (strides[d] for d in dims if strides[d]), default=1 << 62
    )


def _row_address(strides, result_dims, size, address):
    """Returns what a row's address may be modulo 16."""
    return math.gcd(address, 16, *(strides[d] * size for d in result_dims)) % 16


def reduction(node: Node, inputs: Sequence[Node], steps: Walk, *, keep_float32: bool = False) -> str:
    """Returns the kernel that reduces a node's operand, for one kind of walk.

    Its outputs are the results or, where there are chunks, the fields of each chunk's state.
    """
    state, vector = accumulator(node), steps.reduced.vector
    results = Indices(steps.kept, 3, "k")
    reduced = Indices(steps.reduced, 3 + len(steps.kept.numbers), "r")
    held = {leaf: f"in{k}_value" for k, leaf in enumerate(inputs)}

    def load(leaf, at):
        k = inputs.index(leaf)
        text = held[leaf]
        if vector > 1 and steps.reduced.strides[k][0] != 0:
            text = loaded_element_of(f"{text}s", memory(leaf))
        return from_memory(text, result_dtype(leaf))

    lowering = Lowering(load, keep_float32=keep_float32)
    operand = lowering.value(node.args[0])  # pyright: ignore[reportArgumentType]
    addition = [f"const {register(state.operand)} x = {_operand(operand, state)};", state.add]
    one = [*lowering.statements, *addition]
    before = [
        *results.from_number("result"),
        *(f"const uint base{k} = {results.offset(k)};" for k in range(len(inputs))),
    ]
    places = reduced.from_number("index")

    def moves(count):
        for k, leaf in enumerate(inputs):
            place, type_ = f"in{k} + (base{k} + {reduced.offset(k)})", memory(leaf)
            if vector > 1 and steps.reduced.strides[k][0] != 0:
                yield f"const {loaded_type(type_, vector)} {held[leaf]}s = {loaded(place, type_, vector, count)};"
            else:
                yield f"const {type_} {held[leaf]} = *({place});"

    if vector == 1:
        loop = _loop(steps, [*places, *moves("1"), *one])
    else:
        whole = stages.loop("j", vector, one)
        if lowering.roundings and stages.can_be_staged(lowering.statements):
            element = stages.Stored("", "", "", f"{{ {' '.join(addition)} }}")
            parts = stages.staged(lowering.statements, lowering.roundings, [element])
            whole = stages.loop("part", vector // stages.WIDTH, parts)
        rest = stages.loop("j", vector, ["if (index + j < end) {", *one, "}"])
        loop = _loop(steps, [*places, *moves(str(vector)), *whole], [*places, *moves("end - index"), *rest])
    loop = [*before, *loop]
    types = dict.fromkeys(memory(leaf) for leaf in inputs) if vector > 1 else {}
    structs = "".join(vector_type(type_, vector) for type_ in types) + (MOVES if vector > 1 else "")
    places = [results.offset(len(inputs) + k) for k in range(len(state.results))]
    if steps.chunks > 1:
        outputs = [f"device {MEMORY[dtype]}* out{k}" for k, (dtype, _, _) in enumerate(state.fields)]
        stores = [
            f"out{k}[chunk * n[2] + result] = {to_memory(f's.{name}', dtype)};"
            for k, (dtype, name, _) in enumerate(state.fields)
        ]
    else:
        outputs, stores = _results(node, state, places)
    declared = [*outputs, *(f"device const {memory(leaf)}* in{k}" for k, leaf in enumerate(inputs))]
    return _kernel(state, structs, declared, loop, stores, steps.threads)


def merging(node: Node, steps: Walk) -> str:
    """Returns the kernel that merges the states of all chunks, one thread for a result."""
    state = accumulator(node)
    results = Indices(steps.kept, 3, "k")
    inputs = len(steps.kept.strides) - len(state.results)
    fields = [from_memory(f"in{k}[chunk * n[2] + result]", dtype) for k, (dtype, _, _) in enumerate(state.fields)]
    start = ", ".join(value for _, _, value in state.fields)
    loop = [
        f"for (uint first = 0; first < n[1]; first += {MOST_STEPS}) {{",  # of up to 2^16 states, in sums of sums
        f"  State some = {{{start}}};",
        f"  const uint last = min(first + {MOST_STEPS}, n[1]);",
        f"  for (uint chunk = first; chunk < last; ++chunk) merge(some, State{{{', '.join(fields)}}});",
        "  merge(s, some);",
        "}",
        *results.from_number("result"),
    ]
    outputs, stores = _results(node, state, [results.offset(inputs + k) for k in range(len(state.results))])
    declared = [*outputs, *(f"device const {MEMORY[dtype]}* in{k}" for k, (dtype, _, _) in enumerate(state.fields))]
    return _kernel(state, "", declared, loop, stores, 1)


def _operand(value, state: Accumulator):
    return converted(value.text, value.dtype, state.operand)


def _loop(steps, body, rest=()):
    """Returns a loop over a thread's elements, or over its whole vectors; then `rest` is for those behind the last
    one."""
    vector = steps.reduced.vector
    head = ["const uint end = min(n[0], (chunk + 1) * n[1]);", f"uint index = chunk * n[1] + thread_index * {vector};"]
    last = f"index + {vector - 1}" if vector > 1 else "index"
    step = f"for (; {last} < end; index += {steps.threads * vector}) {{"
    return [*head, step, *body, "}", *(["if (index < end) {", *rest, "}"] if rest else [])]


def _results(node, state, places):
    dtypes = [result.dtype for result in results_of(node)]
    natural = [state.fields[-1][0] if state.is_ordered else state.fields[0][0]] * len(dtypes)
    outputs = [f"device {MEMORY[dtype]}* out{k}" for k, dtype in enumerate(dtypes)]
    stores = [
        f"out{k}[{place}] = {to_memory(converted(text, old, dtype), dtype)};"
        for k, (place, text, old, dtype) in enumerate(zip(places, state.results, natural, dtypes))
    ]
    return outputs, ["const float count = float(n[0]);", *stores]


def _kernel(state, structs, declared, loop, stores, threads):
    fields = "".join(f"  {register(dtype)} {name};\n" for dtype, name, _ in state.fields)
    start = ", ".join(value for _, _, value in state.fields)
    buffers = [f"{text} [[buffer({k})]]" for k, text in enumerate([*declared, "constant uint* n"])]
    head = ["const uint chunk = at.y;"]
    if threads > 1:
        buffers += ["uint3 at [[threadgroup_position_in_grid]]", "uint thread_index [[thread_index_in_threadgroup]]"]
        head.append("const uint result = at.x;")
        tree = [
            f"threadgroup State shared[{threads}];",
            "shared[thread_index] = s;",
            f"for (uint half_way = {threads // 2}; half_way > 0; half_way /= 2) {{",
            "  threadgroup_barrier(mem_flags::mem_threadgroup);",
            "  if (thread_index < half_way) {",
            "    State mine = shared[thread_index];",
            "    const State other = shared[thread_index + half_way];",
            "    merge(mine, other);",
            "    shared[thread_index] = mine;",
            "  }",
            "}",
            "if (thread_index != 0) return;",
            "s = shared[0];",
        ]
    else:
        buffers.append("uint3 at [[thread_position_in_grid]]")
        head += ["const uint result = at.x;", "const uint thread_index = 0;"]
        tree = []
    lines = [*head, f"State s = {{{start}}};", *loop, *tree, *stores]
    body = "\n".join(line if line.startswith("#") else f"  {line}" for line in lines)
    merge = f"inline void merge(thread State& s, State o) {{ {state.merge} }}\n"
    return (
        f"{HEAD}{structs}{used(body + merge)}\nstruct State {{\n{fields}}};\n{merge}\n"
        f"kernel void {MARK}({', '.join(buffers)}) {{\n{body}\n}}\n"
    )
