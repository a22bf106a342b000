"""What selftest checks of compile_shader: a program that runs, one that is refused, and one that tells whether the GPU
keeps float16's subnormal numbers."""

from __future__ import annotations

import torch

import metalcore
from metalcore import _C
from metalcore.msl.errors import CompilerNotFoundError

SHADER = """
#include <metal_stdlib>
using namespace metal;

// Sums 256 consecutive elements, scaled: simdgroups, threadgroup memory, a barrier and bytes as an argument.
kernel void sum256(device const float* in [[buffer(0)]], device float* out [[buffer(1)]],
                   constant float& factor [[buffer(2)]],
                   uint group [[threadgroup_position_in_grid]], uint index [[thread_position_in_threadgroup]],
                   uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup float partial[8];
  float sum = simd_sum(in[group * 256 + index]);
  if (lane == 0) partial[simdgroup] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (index == 0) {
    float total = 0.0f;
    for (uint i = 0; i < 8; ++i) total += partial[i];
    out[group] = factor * total;
  }
}
"""


# As in kernels/quant/subnormals.metal: the smallest float16 becomes 2 where it is no zero.
SMALLEST = """
kernel void smallest(device uint* number [[buffer(0)]]) {
  number[0] = uint(float(as_type<half>(ushort(number[0]))) * 0x1p25f);
}
"""


def check_subnormals(device):
    """Tells what is known at once of a GPU that decodes packed weights by such numbers, or else without them."""
    number = torch.ones(1, dtype=torch.int32, device=device)
    metalcore.compile_shader(SMALLEST).smallest(number, threads=1)
    found = number.item()
    if found not in (0, 2):
        raise ArithmeticError(f"the smallest one is {found / 2} of itself")
    if hasattr(_C, "mps_half_subnormals") and _C.mps_half_subnormals() != (found == 2):
        raise RuntimeError(f"this GPU {'keeps' if found else 'flushes'} them, and the backend has found the contrary")
    return {"note": "kept" if found else "they become zero here; packed weights are decoded without them"}


def check_results(device):
    library = metalcore.compile_shader(SHADER)
    x = torch.arange(1024, dtype=torch.float32, device=device)
    found = torch.empty(4, device=device)
    library.sum256(x, found, 2.0, threads=1024, group_size=256)
    expected = [65280.0, 196352.0, 327424.0, 458496.0]  # whole numbers below 2^24: exact in float32
    if found.tolist() != expected:
        raise ArithmeticError(f"sums are {found.tolist()}, not {expected}")
    return {"note": ""}


def check_faulty():
    try:
        library = metalcore.compile_shader("kernel void f(device float* x) { x[0] = no_such_name; }")
        _ = library.f  # where programs are compiled on first use
    except CompilerNotFoundError:
        raise
    except (RuntimeError, SyntaxError) as error:
        if "no_such_name" not in str(error):
            raise RuntimeError(f"the message does not say what is wrong: {error}") from error
        return {"note": ""}
    raise RuntimeError("it was compiled")
