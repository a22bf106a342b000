"""Counts beside those of NVIDIA's Nsight Compute, for small kernels that do the same work on every GPU.

    python -m benchmarks.apple.nsight count counts.json     # on Linux, with Clang
    python -m benchmarks.apple.nsight compare counts.json   # on a machine with an NVIDIA GPU and ncu

Both count operations of floats, 32-byte sectors of device memory and wavefronts of threadgroup memory. Lines of other
names have no twin: each compiler has its own arithmetic of addresses.
"""

import argparse
import csv
import io
import json
import subprocess
import sys
from pathlib import Path

import torch

SOURCE = """
#include <metal_stdlib>
using namespace metal;
constant constexpr uint kWide = 64;

kernel void axpy(device float* y, device const float* x, uint i [[thread_position_in_grid]]) {
  y[i] = 3.0f * x[i] + y[i];
}
kernel void vectors(device float4* y, device const float4* x, uint i [[thread_position_in_grid]]) {
  y[i] = x[i] * y[i];
}
kernel void strided(device float* y, device const float* x, uint i [[thread_position_in_grid]]) {
  y[i] = x[3 * i] + 1.0f;
}
kernel void gather(device float* y, device const float* x, device const uint* at, uint i [[thread_position_in_grid]]) {
  y[i] = x[at[i]];
}
kernel void stencil(device float* y, device const float* x, uint i [[thread_position_in_grid]]) {
  y[i] = (x[i] + x[i + 200]) * 0.25f + x[i + 101] * 0.5f;
}
kernel void polynomial(device half* y, device const half* x, uint i [[thread_position_in_grid]]) {
  half a = x[i], b = 1.0h;
  for (int k = 0; k < 12; ++k) b = b * a + 0.5h;
  y[i] = b;
}
kernel void rows(device float* y, device const float* x, uint row [[threadgroup_position_in_grid]],
                 uint i [[thread_index_in_threadgroup]]) {
  float sum = 0.0f;
  for (uint k = i; k < 1024; k += 128) sum += x[row * 1024 + k] * x[row * 1024 + k];
  sum = simd_sum(sum);
  threadgroup float parts[4];
  if (i % 32 == 0) parts[i / 32] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (i == 0) y[row] = parts[0] + parts[1] + parts[2] + parts[3];
}
template <uint Pitch>
[[kernel]] void transposed(device float* y, device const float* x, uint2 group [[threadgroup_position_in_grid]],
                           uint i [[thread_index_in_threadgroup]]) {
  threadgroup float tile[32 * Pitch];
  for (uint row = i / 32; row < 32; row += 4)
    tile[row * Pitch + i % 32] = x[(group.y * 32 + row) * kWide + group.x * 32 + i % 32];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint row = i / 32; row < 32; row += 4)
    y[(group.x * 32 + row) * kWide + group.y * 32 + i % 32] = tile[(i % 32) * Pitch + row];
}
template [[host_name("transposed")]] [[kernel]] decltype(transposed<32>) transposed<32>;
template [[host_name("padded")]] [[kernel]] decltype(transposed<33>) transposed<33>;
kernel void product(device float* y, device const float* a, device const float* b,
                    uint2 at [[thread_position_in_grid]], uint2 in [[thread_position_in_threadgroup]]) {
  threadgroup float left[16][16], right[16][16];
  float sum = 0.0f;
  for (uint k = 0; k < kWide; k += 16) {
    left[in.y][in.x] = a[at.y * kWide + k + in.x];
    right[in.y][in.x] = b[(k + in.y) * kWide + at.x];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint j = 0; j < 16; ++j) sum = fma(left[in.y][j], right[j][in.x], sum);
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  y[at.y * kWide + at.x] = sum;
}
"""
_FLOATS = {"float32": ("fadd", "fmul", "ffma"), "float16": ("hadd", "hmul", "hfma")}
_SECTORS = {kind: f"l1tex__t_sectors_pipe_lsu_mem_global_op_{kind[:2]}.sum" for kind in ("ld", "st")}
_WAVES = {kind: f"l1tex__data_pipe_lsu_wavefronts_mem_shared_op_{kind}.sum" for kind in ("ld", "st")}


def calls(device):
    """Returns the kernels' names, arguments, threads and threads a threadgroup."""
    generator = torch.Generator().manual_seed(0)

    def values(*shape, dtype=torch.float32):
        return torch.rand(shape, generator=generator).to(dtype).to(device)

    at = torch.randint(8192, (8192,), generator=generator, dtype=torch.int32).to(device)
    half, square = torch.float16, (64, 64)
    return [
        ("axpy", (values(8192), values(8192)), (8192,), (128,)),
        ("vectors", (values(8192), values(8192)), (2048,), (128,)),
        ("strided", (values(8192), values(3 * 8192)), (8192,), (128,)),
        ("gather", (values(8192), values(8192), at), (8192,), (128,)),
        ("stencil", (values(8192), values(8392)), (8192,), (128,)),
        ("polynomial", (values(8192, dtype=half), values(8192, dtype=half)), (8192,), (128,)),
        ("rows", (values(64), values(64, 1024)), (64 * 128,), (128,)),
        ("transposed", (values(*square), values(*square)), (256, 2), (128, 1)),
        ("padded", (values(*square), values(*square)), (256, 2), (128, 1)),
        ("product", (values(*square), values(*square), values(*square)), square, (16, 16)),
    ]


def run(library, device):
    for name, arguments, threads, group in calls(device):
        getattr(library, name)(*arguments, threads=threads, group_size=group)


def count():
    """Returns for each kernel what the executor counts."""
    import metalcore.simulator  # noqa: F401
    from metalcore.estimates import CountedLibrary, Memory, counting

    with counting(events=10**9) as counts:
        run(CountedLibrary(SOURCE), "mps")
    metrics = {}
    for of_kernel in counts:
        kinds, memory = of_kernel.instructions, of_kernel.memory
        figures = metrics[of_kernel.kernel] = {
            name: 32 * (kinds[f"{name}.add"] + kinds[f"{name}.mul"] + 2 * kinds[f"{name}.fma"]) for name in _FLOATS
        }
        for kind, access in (("ld", "load"), ("st", "store")):
            figures[f"sectors {kind}"] = memory.get(("device", access), Memory()).sectors
            figures[f"wavefronts {kind}"] = memory.get(("threadgroup", access), Memory()).passes
    return metrics


def measured():
    """Returns the same by Nsight Compute."""
    of_float = "smsp__sass_thread_inst_executed_op_{}_pred_on.sum"
    metrics = [of_float.format(op) for ops in _FLOATS.values() for op in ops]
    command = ["ncu", "--csv", "--metrics", ",".join([*metrics, *_SECTORS.values(), *_WAVES.values()])]
    command += ["-k", "regex:metalcore", sys.executable, "-m", "benchmarks.apple.nsight", "run"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    table = csv.DictReader(io.StringIO(output[output.index('"ID"') :]))
    launches: dict[str, dict[str, float]] = {}
    for row in table:
        launches.setdefault(row["ID"], {})[row["Metric Name"]] = float(row["Metric Value"].replace(",", ""))
    found = {}
    for (name, *_), values in zip(calls("cpu"), launches.values(), strict=True):
        figures = found[name] = {}
        for kind, (add, mul, fma) in _FLOATS.items():
            figures[kind] = sum(times * values[of_float.format(op)] for op, times in ((add, 1), (mul, 1), (fma, 2)))
        figures |= {f"sectors {kind}": values[metric] for kind, metric in _SECTORS.items()}
        figures |= {f"wavefronts {kind}": values[metric] for kind, metric in _WAVES.items()}
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("count", "compare", "run"), help="run: the kernels alone, for ncu")
    parser.add_argument("file", nargs="?", type=Path)
    options = parser.parse_args()
    if options.step == "run":
        import metalcore

        run(metalcore.compile_shader(SOURCE), "cuda")
    elif options.file is None:
        parser.error("count and compare want a file")
    elif options.step == "count":
        options.file.write_text(json.dumps(count(), indent=1) + "\n")
    else:
        ours, theirs = json.loads(options.file.read_text()), measured()
        for name, figures in theirs.items():
            for kind, value in figures.items():
                if value or ours[name][kind]:
                    ratio = ours[name][kind] / value if value else float("inf")
                    print(f"{name:12}{kind:16}{ours[name][kind]:12.0f}{value:12.0f}{ratio:8.3f}")


if __name__ == "__main__":
    main()
