"""The MSL of a kernel for sums and products of all elements up to each one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Node

from ..._core.generated_kernels import MARK
from .functions import used
from .lowering import Lowering
from .nodes import arguments_of, fake, name_of, result_dtype
from .numbers import Unsupported, converted, kind, literal, register
from .reads.views import dimension
from .source import HEAD, coordinates, loader, parameters, place_at, to_memory

PER_THREAD = 4  # consecutive elements


def row_of(node: Node) -> tuple[int, int, int]:
    """Returns the dimension of a scan, its size, and how many rows there are. Raises Unsupported where it is none."""
    result = fake(node)
    if not result.dim():
        raise Unsupported("it has no dimension")
    if kind(result_dtype(node)) == "b":
        raise Unsupported("its result is a bool")
    dim = dimension(node, arguments_of(node)["dim"])
    size = result.shape[dim]
    return dim, size, result.numel() // max(1, size)


def threads_of(node: Node) -> int:
    """Returns the threads of a row, which are a threadgroup."""
    _, size, rows = row_of(node)
    threads = 256 if size > 32 * PER_THREAD else 32
    if rows * threads >= 1 << 32:
        raise Unsupported(f"{rows} rows")
    return threads


def scan(node: Node, inputs: Sequence[Node], strides: Sequence[Sequence[int]], *, keep_float32: bool = False) -> str:
    """Returns the kernel of a scan and of the operations before it.

    A thread adds a few neighbours, the threadgroup the sums of its threads, in steps of twice as many each time; what
    is behind them is added to the sum of what was before.

    Args:
        inputs: the leaves that it reads.
        strides: of the result, then of the inputs.
    """
    dim, size, _rows = row_of(node)
    threads, shape, dtype = threads_of(node), fake(node).shape, result_dtype(node)
    held = torch.float32 if dtype.is_floating_point else torch.int64
    type_ = register(held)
    operator, start = ("*", literal(1, held)) if name_of(node).startswith("cumprod") else ("+", literal(0, held))
    others = [1 if d == dim else n for d, n in enumerate(shape)]
    before, at = coordinates(others, strides[0])
    at = tuple("p" if d == dim else c for d, c in enumerate(at))
    lowering = Lowering(loader(inputs, strides[1:]), keep_float32=keep_float32)
    operand = lowering.value(node.args[0], at)  # pyright: ignore[reportArgumentType]
    value = converted(converted(operand.text, operand.dtype, dtype), dtype, held)
    result = to_memory(converted(f"v {operator} part[j]", held, dtype), dtype)
    lines = [
        *before,
        f"threadgroup {type_} sums[{threads}];",
        f"{type_} carry = {start};",
        f"for (int begin = 0; begin < {size}; begin += {threads * PER_THREAD}) {{",
        f"  {type_} part[{PER_THREAD}];",
        f"  {type_} total = {start};",
        f"  const int first = begin + int(thread_index) * {PER_THREAD};",
        f"  for (int j = 0; j < {PER_THREAD}; ++j) {{",
        "    const int p = first + j;",
        f"    if (p < {size}) {{",
        *(f"      {line}" for line in lowering.statements),
        f"      total = total {operator} {value};",
        "    }",
        "    part[j] = total;",
        "  }",
        "  sums[thread_index] = total;",
        "  threadgroup_barrier(mem_flags::mem_threadgroup);",
        f"  for (uint step = 1; step < {threads}u; step *= 2) {{",
        f"    const {type_} left = thread_index >= step ? sums[thread_index - step] : {start};",
        "    threadgroup_barrier(mem_flags::mem_threadgroup);",
        f"    sums[thread_index] = left {operator} sums[thread_index];",
        "    threadgroup_barrier(mem_flags::mem_threadgroup);",
        "  }",
        f"  const {type_} v = thread_index > 0 ? carry {operator} sums[thread_index - 1] : carry;",
        f"  for (int j = 0; j < {PER_THREAD}; ++j) {{",
        "    const int p = first + j;",
        f"    if (p < {size}) out0[{place_at(at, strides[0])}] = {result};",
        "  }",
        f"  carry = carry {operator} sums[{threads - 1}];",
        "  threadgroup_barrier(mem_flags::mem_threadgroup);",
        "}",
    ]
    body = "\n".join(f"  {line}" for line in lines)
    grid = "uint3 at [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]"
    return f"{HEAD}{used(body)}\nkernel void {MARK}({parameters([node], inputs, 'uint')}, {grid}) {{\n{body}\n}}\n"


def launch_of(node: Node) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Returns the grid and the threadgroup."""
    _, _, rows = row_of(node)
    threads = threads_of(node)
    return (rows * threads, 1, 1), (threads, 1, 1)
