"""The MSL of a kernel that reduces, with the pointwise operations before the reduction in it."""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Node

from ..._core.generated_kernels import MARK
from . import stages
from .accumulators import Accumulator, accumulator, results_of
from .functions import used
from .lowering import Lowering
from .nodes import result_dtype
from .numbers import MEMORY, converted, register
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
from .walk import MOST_STEPS, Walk


def reduction(node: Node, inputs: Sequence[Node], found: Walk, *, keep_float32: bool = False) -> str:
    """Returns the kernel that reduces a node's operand, for one kind of walk.

    Its outputs are the results or, where there are chunks, the fields of each chunk's state.
    """
    state, vector = accumulator(node), found.reduced.vector
    kept = Indices(found.kept, 3, "k")
    reduced = Indices(found.reduced, 3 + len(found.kept.numbers), "r")
    held = {leaf: f"in{k}_value" for k, leaf in enumerate(inputs)}

    def load(leaf, at):
        k = inputs.index(leaf)
        text = held[leaf]
        if vector > 1 and found.reduced.strides[k][0] != 0:
            text = loaded_element_of(f"{text}s", memory(leaf))
        return from_memory(text, result_dtype(leaf))

    lowering = Lowering(load, keep_float32=keep_float32)
    operand = lowering.value(node.args[0])  # pyright: ignore[reportArgumentType]
    taken = [f"const {register(state.operand)} x = {_operand(operand, state)};", state.add]
    one = [*lowering.statements, *taken]
    before = [*kept.from_number("result"), *(f"const uint base{k} = {kept.offset(k)};" for k in range(len(inputs)))]
    places = reduced.from_number("index")

    def moves(count):
        for k, leaf in enumerate(inputs):
            place, type_ = f"in{k} + (base{k} + {reduced.offset(k)})", memory(leaf)
            if vector > 1 and found.reduced.strides[k][0] != 0:
                yield f"const {loaded_type(type_, vector)} {held[leaf]}s = {loaded(place, type_, vector, count)};"
            else:
                yield f"const {type_} {held[leaf]} = *({place});"

    if vector == 1:
        loop = _loop(found, [*places, *moves("1"), *one])
    else:
        whole = stages.loop("j", vector, one)
        if lowering.roundings and stages.can_be_staged(lowering.statements):
            element = stages.Stored("", "", "", f"{{ {' '.join(taken)} }}")
            parts = stages.staged(lowering.statements, lowering.roundings, [element])
            whole = stages.loop("part", vector // stages.WIDTH, parts)
        rest = stages.loop("j", vector, ["if (index + j < end) {", *one, "}"])
        loop = _loop(found, [*places, *moves(str(vector)), *whole], [*places, *moves("end - index"), *rest])
    loop = [*before, *loop]
    types = dict.fromkeys(memory(leaf) for leaf in inputs) if vector > 1 else {}
    structs = "".join(vector_type(type_, vector) for type_ in types) + (MOVES if vector > 1 else "")
    places = [kept.offset(len(inputs) + k) for k in range(len(state.results))]
    if found.chunks > 1:
        outputs = [f"device {MEMORY[dtype]}* out{k}" for k, (dtype, _, _) in enumerate(state.fields)]
        stores = [
            f"out{k}[chunk * n[2] + result] = {to_memory(f's.{name}', dtype)};"
            for k, (dtype, name, _) in enumerate(state.fields)
        ]
    else:
        outputs, stores = _results(node, state, places)
    declared = [*outputs, *(f"device const {memory(leaf)}* in{k}" for k, leaf in enumerate(inputs))]
    return _kernel(state, structs, declared, loop, stores, found.threads)


def merging(node: Node, found: Walk) -> str:
    """Returns the kernel that merges the states of all chunks, one thread for a result."""
    state = accumulator(node)
    kept = Indices(found.kept, 3, "k")
    inputs = len(found.kept.strides) - len(state.results)
    fields = [from_memory(f"in{k}[chunk * n[2] + result]", dtype) for k, (dtype, _, _) in enumerate(state.fields)]
    start = ", ".join(value for _, _, value in state.fields)
    loop = [
        f"for (uint first = 0; first < n[1]; first += {MOST_STEPS}) {{",  # of up to 2^16 states, in sums of sums
        f"  State some = {{{start}}};",
        f"  const uint last = min(first + {MOST_STEPS}, n[1]);",
        f"  for (uint chunk = first; chunk < last; ++chunk) merge(some, State{{{', '.join(fields)}}});",
        "  merge(s, some);",
        "}",
        *kept.from_number("result"),
    ]
    outputs, stores = _results(node, state, [kept.offset(inputs + k) for k in range(len(state.results))])
    declared = [*outputs, *(f"device const {MEMORY[dtype]}* in{k}" for k, (dtype, _, _) in enumerate(state.fields))]
    return _kernel(state, "", declared, loop, stores, 1)


def _operand(value, state: Accumulator):
    return converted(value.text, value.dtype, state.operand)


def _loop(found, body, rest=()):
    """Returns a loop over a thread's elements, or over its whole vectors; then `rest` is for those behind the last
    one."""
    vector = found.reduced.vector
    head = ["const uint end = min(n[0], (chunk + 1) * n[1]);", f"uint index = chunk * n[1] + thread_index * {vector};"]
    last = f"index + {vector - 1}" if vector > 1 else "index"
    step = f"for (; {last} < end; index += {found.threads * vector}) {{"
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
