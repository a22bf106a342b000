"""What others measured on Apple's GPUs, as launches of the same kernels: those of checkouts of MLX and ggml."""

from __future__ import annotations

import functools
import math
import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

import metalcore
from metalcore.estimates import CountedLibrary, counting
from metalcore.tuning.workloads import FULL, QUICK, all_workloads

from ..peers.ggml import GGML, matmul_constants
from ..peers.mlx import KERNELS, MLX
from ..peers.published import Launch, Published, checkout, struct_argument

# Kernels of a token or a layer of llama.cpp beside the products, which take no more than their launches.
SMALL_KERNELS = 14
STREAM = """
#include <metal_stdlib>
using namespace metal;
kernel void copy(device float4* y, device const float4* x, uint i [[thread_position_in_grid]]) { y[i] = x[i]; }
kernel void chains(device float* y, uint i [[thread_position_in_grid]]) {
  float a = y[i], b = a, c = a, d = a;
  for (int k = 0; k < 256; ++k) {
    a = a * a + 1.0f;
    b = b * b + 1.0f;
    c = c * c + 1.0f;
    d = d * d + 1.0f;
  }
  y[i] = a + b + c + d;
}
"""

PARTS = """
#include "mlx/backend/metal/kernels/utils.h"
#include "mlx/backend/metal/kernels/unary_ops.h"
#include "mlx/backend/metal/kernels/unary.h"
#include "mlx/backend/metal/kernels/binary_ops.h"
#include "mlx/backend/metal/kernels/binary.h"
#include "mlx/backend/metal/kernels/atomic.h"
#include "mlx/backend/metal/kernels/reduction/ops.h"
#include "mlx/backend/metal/kernels/reduce.h"
instantiate_kernel("max_float32", row_reduce_simple, float, float, Max<float>)
instantiate_kernel("sum_float32", row_reduce_simple, float, float, Sum<float>)
instantiate_kernel("subtract_float32", binary_g_nd2, float, float, Subtract, int)
instantiate_kernel("divide_float32", binary_g_nd2, float, float, Divide, int)
instantiate_kernel("maximum_float32", binary_vs, float, float, Maximum)
instantiate_kernel("exp_float32", unary_v, float, float, Exp)
"""


@dataclass(frozen=True)
class Workload:
    """A measured row's work.

    Attributes:
        steps: pairs of how often a launch is done and what launches it, given what compiles kernels.
        small: further launches that take no longer than a launch does.
        amount: operations, bytes or tokens, where the figure is a rate.
        syncs: how often the host waits.
        planned: whether the launches are those of metalcore's own plans, which chips differ in.
    """

    steps: tuple
    small: float = 0
    amount: float = 0
    syncs: float = 1
    planned: bool = False


def empty(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="mps")


class Workloads:
    """The work of rows of a table of measurements, by program and name."""

    def __init__(self, mlx, ggml):
        self.mlx, self.ggml = MLX(mlx), GGML(ggml)

        def published(name):
            return Published(checkout("--mlx", mlx, f"{KERNELS}/{name}.metal"), (Path(mlx).resolve(),))

        self.softmax_file, self.sort_file = published("softmax"), published("sort")
        self.norm_file, self.rms_file = published("layer_norm"), published("rms_norm")
        self.include_dirs = (Path(mlx).resolve(),)
        self.patterns: list[tuple[str, str, Callable]] = [
            ("MLX", r"(matmul|linear) (float\d+) (\d+)x(\d+) (?:by \4x|to )(\d+)", self.matmul),
            ("MLX", r"bmm float32 (\d+) of (\d+)x(\d+) by \3x(\d+)", self.bmm),
            ("MLX", r"sum float32 of ([\dx]+)", self.sum),
            # From some release on that benchmark's softmax took as long as its parts, one after the other.
            ("MLX", r"softmax float32 (\d+)x(\d+) last dim", self.softmax_by_parts),
            ("MLX", r"softmax kernel float32 (\d+)x(\d+) last dim", self.softmax),
            ("MLX", r"relu float32 of ([\dx]+)", self.relu),
            ("MLX", r"layer norm float32 ([\dx]+)x1024", self.layer_norm),
            ("MLX", r"causal attention float16 (\d+) heads (\d+)x(\d+)", self.attention),
            ("MLX", r"sort float32 ([\dx]+)x1024 last dim", self.sort),
            ("metalcore", r"(.+)", self.own),
            ("PyTorch MPS", r"copy", self.copy),
            ("Metal STREAM", r".*", self.copy),
            ("Metal", r"chains of scalar FMA", self.chains),
            ("llama.cpp", r"7B (\w+) (tg128|pp512)", self.llama7),
            ("llama.cpp", r"Llama-3 8B Q4_K_M.* (tg128|pp512)", self.llama8),
        ]

    def find(self, program, what):
        """Returns the Workload of a row, or None where its kernels are not here to be counted."""
        for name, pattern, make in self.patterns:
            if name == program and (match := re.fullmatch(pattern, what)):
                return make(*match.groups())
        return None

    def matmul(self, kind, dtype, m, k, n):
        m, k, n, dtype = int(m), int(k), int(n), getattr(torch, dtype)
        layout = "nt" if kind == "linear" else "nn"
        a, b = empty(m, k, dtype=dtype), empty(*((n, k) if layout == "nt" else (k, n)), dtype=dtype)
        [launch] = self.mlx.matmul(layout, 0, a, b).launches
        flops = 2.0 * m * k * n
        return Workload(((1, launch),), amount=flops)

    def bmm(self, batch, m, k, n):
        batch, m, k, n = map(int, (batch, m, k, n))
        [launch] = self.mlx.matmul("nn", 0, empty(m, k), empty(k, n)).launches
        arguments = empty(batch, m, k), empty(batch, k, n), None, empty(batch, m, n), *launch.arguments[4:]
        groups = *launch.groups[:2], batch
        return Workload(
            ((1, Launch(launch.published, launch.constants, launch.kernel, arguments, groups, launch.group)),),
        )

    def sum(self, shape):
        count = math.prod(map(int, shape.split("x")))
        source = (
            '#include "mlx/backend/metal/kernels/utils.h"\n#include "mlx/backend/metal/kernels/atomic.h"\n'
            '#include "mlx/backend/metal/kernels/reduction/ops.h"\n#include "mlx/backend/metal/kernels/reduce.h"\n'
            'instantiate_kernel("all_reduce_sumfloat32", all_reduce, float, float, Sum<float>, int64_t)\n'
        )
        rows = 1024 * 4

        def launch(make):
            library = _made(source, self.include_dirs, make)
            row = -(-count // rows)
            library.all_reduce_sumfloat32(
                empty(count), empty(rows), count, row, threads=(1024, rows, 1), group_size=(1024, 1, 1)
            )

        return Workload(((1, launch),), small=1)

    def softmax(self, rows, length):
        rows, length = int(rows), int(length)
        arguments = empty(rows, length), empty(rows, length), length
        name, threads = ("looped", 1024) if length > 4096 else ("block", -(-length // 128) * 32)
        launch = Launch(self.softmax_file, {}, f"{name}_softmax_float32", arguments, (rows, 1, 1), (threads, 1, 1))
        return Workload(((1, launch),))

    def softmax_by_parts(self, rows, length):
        """Returns the largest number, a difference, exp, a sum, and a quotient."""
        rows, length = int(rows), int(length)
        x, y, per_row = empty(rows, length), empty(rows, length), empty(rows, 1)

        def reduce(name, make):
            threads = 1024 if length > 1024 else 128 if length > 512 else 32
            kernel = getattr(_made(PARTS, self.include_dirs, make), name)
            kernel(x, per_row, length, rows, threads=(threads, -(-rows // 4)), group_size=(threads, 1))

        def pair(name, make):
            strides = torch.tensor([[length, 1], [1, 0]])
            kernel = getattr(_made(PARTS, self.include_dirs, make), name)
            kernel(x, per_row, y, *strides.to("mps"), threads=(length, rows), group_size=(32, 32))

        def exp(make):
            kernel = _made(PARTS, self.include_dirs, make).exp_float32
            kernel(x, y, rows * length, threads=(rows * length // 2,), group_size=(1024,), arg_casts={2: "int32"})

        reduced = [functools.partial(reduce, name) for name in ("max_float32", "sum_float32")]
        paired = [functools.partial(pair, name) for name in ("subtract_float32", "divide_float32")]
        return Workload(tuple((1, step) for step in (reduced[0], paired[0], exp, reduced[1], paired[1])))

    def relu(self, shape):
        count = math.prod(map(int, shape.split("x")))

        def launch(make):
            kernel = _made(PARTS, self.include_dirs, make).maximum_float32
            tensors = empty(count), empty(1), empty(count)
            kernel(*tensors, count, threads=(count // 2,), group_size=(1024,), arg_casts={3: "int32"})

        return Workload(((1, launch),))

    def layer_norm(self, shape):
        rows = math.prod(map(int, shape.split("x")))
        one = empty(1)
        arguments = empty(rows, 1024), one, one, empty(rows, 1024), 1e-5, 1024, 0, 0
        launch = Launch(self.norm_file, {20: False}, "layer_normfloat32", arguments, (rows, 1, 1), (128, 1, 1))
        return Workload(((1, launch),))

    def rms_norm(self, length):
        x = empty(4096, length)
        arguments = x, empty(length), empty(4096, length), 1e-5, length, 1
        return Launch(self.rms_file, {20: True}, "rmsfloat32", arguments, (4096, 1, 1), (length // 4, 1, 1))

    def attention(self, heads, length, size):
        heads, length, size = int(heads), int(length), int(size)
        q = empty(1, heads, length, size, dtype=torch.float16)
        [launch] = self.mlx.attention(True, q, q, q).launches
        return Workload(((1, launch),), amount=2.0 * heads * length**2 * size)

    def sort(self, shape):
        rows = math.prod(map(int, shape.split("x")))
        x = torch.rand(rows, 1024, device="mps")
        arguments = x, empty(rows, 1024), 1024, 1, 1, 1024, 1024
        launch = Launch(
            self.sort_file, {}, "c_block_sort_float32_float32_bn256_tn4", arguments, (1, rows, 1), (256, 1, 1)
        )
        return Workload(((1, launch),))

    def own(self, what):
        """Returns a call that `tune` times, as shared.py prints it."""
        call = next((call for call in all_workloads(FULL) + all_workloads(QUICK) if call.text() == what), None)
        return call and Workload(((1, lambda make: call.call("mps")()),), syncs=0, planned=True)

    def copy(self):
        count = 1 << 26

        def launch(make):
            library = _made(STREAM, (), make)
            library.copy(empty(count), empty(count), threads=(count // 4,), group_size=(256,))

        return Workload(((1, launch),), amount=8.0 * count)

    def chains(self):
        threads = 1 << 20

        def launch(make):
            _made(STREAM, (), make).chains(empty(threads), threads=(threads,), group_size=(256,))

        return Workload(((1, launch),), amount=2.0 * 4 * 256 * threads, syncs=0)

    # The shapes of a model's products: (type, rows, columns, times).
    def llama7(self, type, run):
        last = {"Q4_0": "Q6_K"}.get(type, type)
        layer = [(type, 4096, 4096, 4), (type, 11008, 4096, 2), (type, 4096, 11008, 1)]
        return self.model(32, layer, (last, 32000, 4096), run)

    def llama8(self, run):
        layer = [("Q4_K", 4096, 4096, 2), ("Q4_K", 1024, 4096, 1.5), ("Q6_K", 1024, 4096, 0.5)]
        layer += [("Q4_K", 14336, 4096, 2), ("Q4_K", 4096, 14336, 0.5), ("Q6_K", 4096, 14336, 0.5)]
        return self.model(32, layer, ("Q6_K", 128256, 4096), run)

    def model(self, layers, layer, output, run):
        one = run == "tg128"
        rows = 1 if one else 512
        products = [(type, m, k, layers * times) for type, m, k, times in layer]
        if one:
            products.append((*output, 1))
        steps = tuple((times, self.product(type, m, k, rows)) for type, m, k, times in products)
        return Workload(steps, SMALL_KERNELS * layers, float(rows))

    def product(self, type, m, k, rows):
        if type == "F16":
            packed = torch.empty(m, 2 * k, dtype=torch.uint8, device="mps")
        else:
            packed = torch.empty(m, k // block(type) * nbytes(type), dtype=torch.uint8, device="mps")
        x = empty(rows, k)
        if rows > 1:
            return self.ggml.matmul(type, packed, x).launches[0]
        if type != "F16":
            return self.ggml.matvec(type, packed, x).launches[0]
        out = empty(1, m)
        parameters = struct_argument(
            "3i4Q3i4Q3i2h",
            *(k, m, 1, 2, 2 * k, 2 * k * m, 2 * k * m, k, 1, 1, 4, 4 * k, 4 * k, 4 * k, m, 1, 2, 1, 1),
        )
        arguments = parameters, packed, x, out
        constants = {**matmul_constants(4), 700: False, 701: False}
        return Launch(
            self.ggml.published, constants, "kernel_mul_mv_f16_f32_4", arguments, (m // 2, 1, 1), (32, 4, 1), 256
        )


def block(type):
    return 256 if type.endswith("_K") else 32


def nbytes(type):
    return metalcore.quant.type_of(type).nbytes


@functools.cache
def _made(source, include_dirs, make):
    return make(source, include_dirs=include_dirs)


def counts(workload, kept: Path, chip):
    """Returns the Counted of each launch of a workload on a chip, with how often it is done; from the file `kept` if it
    is there."""
    if kept.exists():
        return pickle.loads(kept.read_bytes())
    launches = []
    for times, launch in workload.steps:
        plans = {"family": chip.family, "cores": chip.cores} if workload.planned else {}
        with counting(events=1_000_000, registers=True, **plans) as counted:
            launch.by(CountedLibrary)() if isinstance(launch, Launch) else launch(CountedLibrary)
        launches += [(times, each) for each in counted]
    kept.write_bytes(pickle.dumps(launches))
    return launches
