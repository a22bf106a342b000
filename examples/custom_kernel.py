"""Runs a Metal kernel of your own, then lets checking mode find what is wrong with a version of it."""

import textwrap

import torch

import metalcore

simulated = not torch.backends.mps.is_available()
if simulated:
    import metalcore.simulator

SOURCE = """\
#include <metal_stdlib>
using namespace metal;

// One threadgroup sums 256 consecutive elements.
kernel void sum256(device const float* in  [[buffer(0)]],
                   device float*       out [[buffer(1)]],
                   uint group [[threadgroup_position_in_grid]],
                   uint lane  [[thread_position_in_threadgroup]]) {
  threadgroup float partial[256];
  partial[lane] = in[group * 256 + lane];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint step = 128; step > 0; step /= 2) {
    if (lane < step) partial[lane] += partial[lane + step];
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  if (lane == 0) out[group] = partial[0];
}
"""


def run(source):
    x = torch.arange(1024, dtype=torch.float32, device="mps")
    y = torch.empty(4, device="mps")
    metalcore.compile_shader(source).sum256(x, y, threads=1024, group_size=256)
    return y.tolist()


print("sum256 of 0..1023 in four threadgroups:", run(SOURCE))
assert run(SOURCE) == [32640.0, 98176.0, 163712.0, 229248.0]

if not simulated:
    raise SystemExit("Checking mode is the simulator's; this is a real GPU.")

print("the same in checking mode:             ", end=" ")
with metalcore.simulator.checking():
    print(run(SOURCE))

# Without the first barrier, a thread can read a number that another thread has not written yet.
lines = SOURCE.splitlines()
missing = next(i for i, line in enumerate(lines) if "threadgroup_barrier" in line)
broken = "\n".join(line if i != missing else "  // (no barrier here)" for i, line in enumerate(lines))
print(f"\nWithout the barrier in line {missing + 1}, in checking mode:\n")
with metalcore.simulator.checking():
    try:
        run(broken)
    except metalcore.simulator.KernelError as error:
        print(textwrap.fill(f"{type(error).__name__}: {error}", 100, initial_indent="  ", subsequent_indent="  "))
        print(f"\n  line {error.line}:  {broken.splitlines()[error.line - 1].strip()}")
    else:
        raise SystemExit("the missing barrier was not found")
