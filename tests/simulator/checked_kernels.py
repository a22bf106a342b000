"""Kernels for checking mode: correct ones, and seeded faults, each with a clean twin.

In a source, a line that ends with `// @good` is in the clean twin only, with `// @bad` in the faulty one only; a fault
must be reported at a line that ends with `@here`.
"""

import dataclasses

import pytest
import torch

import metalcore
from metalcore.simulator import checking

HEADER = """#include <metal_stdlib>
using namespace metal;
"""

COPY = (
    HEADER
    + """
kernel void copy(device const float* x, device float* y, constant int& shift, uint i [[thread_position_in_grid]]) {
  y[i] = x[int(i) + shift];
}"""
)  # each other shift than 0 is out of bounds

in_several_orders = pytest.mark.parametrize("seed", [0, 1, 2])


def run(source, *arguments, threads, group, seed):
    """The arguments after a correct kernel."""
    with checking(seed=seed):  # within which the program is compiled for checking mode alone
        library = metalcore.compile_shader(HEADER + source)
        library.run(*arguments, threads=threads, group_size=group)
    return [a.cpu() if isinstance(a, torch.Tensor) else a for a in arguments]


def select(source, faulty):
    """The source of one twin, and the lines at which its fault may be reported."""
    drop = "@good" if faulty else "@bad"
    lines = ["" if drop in line else line for line in source.split("\n")]
    return "\n".join(lines), [number for number, line in enumerate(lines, 1) if "@here" in line]


@dataclasses.dataclass
class Buffer:
    count: int
    dtype: torch.dtype = torch.float32


@dataclasses.dataclass
class Case:
    name: str
    kind: str  # or several kinds, where the order of the threads decides
    source: str
    arguments: tuple  # a number of elements of a new tensor, or a scalar
    threads: tuple
    group: tuple
    message: str = ""
    thread: object = None  # whether a thread at this position in the threadgroup may be reported

    def tensors(self):
        return [torch.rand(a.count, device="mps").to(a.dtype) if isinstance(a, Buffer) else a for a in self.arguments]

    def run(self, faulty, **options):
        source, lines = select(HEADER + self.source, faulty)
        arguments = self.tensors()
        with checking(**options):
            library = metalcore.compile_shader(source)
            library.run(*arguments, threads=self.threads, group_size=self.group)
        return lines
