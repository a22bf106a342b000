// What the compiler knows of the types that floats were converted from. In many programs, such as MLX's, all matrices
// hold floats, whichever type they were read in.
#pragma once

#include "target/runtime.h"

namespace msl {

METAL_FUNC bool is_bfloat(float x) { return (__float_as_uint(x) & 0xffffu) == 0; }

// Conversions from half tell the compiler that this holds, so it has to be written without branches.
METAL_FUNC bool is_half(uint32_t bits) {
  const uint32_t size = bits & 0x7fffffffu;
  const float scaled = __uint_as_float(bits) * 0x1p24f;
  const bool is_normal = ((bits & 0x1fffu) == 0) & (size - 0x38800000u <= 0x477fe000u - 0x38800000u);
  const bool is_small = (size < 0x38800000u) & (float(int(scaled)) == scaled);
  return is_normal | is_small | (size >= 0x7f800000u);
}
METAL_FUNC bool is_half(float x) { return is_half(__float_as_uint(x)); }

// 0 where the compiler can tell that a condition holds, and 1 where it cannot. Then nothing is computed. The assumption
// says that `unknown`, which is 1, is 0 where the condition holds. It is false where the condition only happens to hold,
// but nothing else depends on `unknown`.
METAL_FUNC uint32_t is_unknown(bool condition) {
  uint32_t unknown;
  asm("mov.u32 %0, 1;" : "=r"(unknown));
  __builtin_assume(!condition | (unknown == 0));
  return unknown;
}
METAL_FUNC bool is_known(bool condition) { return is_unknown(condition) == 0; }

}  // namespace msl
