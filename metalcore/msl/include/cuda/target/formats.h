// How half and bfloat convert to and from float: by instructions, except in constant expressions, which use arithmetic.
#pragma once

#include "metal/portable_formats.h"
#include "target/runtime.h"

// What the compiler knows of the types that floats were converted from. In many programs, such as MLX's, all matrices
// hold floats, whichever type they were read in.
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

struct half_format {
  static METAL_FUNC constexpr float widen(uint16_t bits) {
    return __builtin_is_constant_evaluated() ? portable_half::widen(bits) : convert(bits);
  }
  static METAL_FUNC constexpr float widen_rounded(uint16_t bits) { return widen(bits); }
  static METAL_FUNC constexpr uint16_t round(float value) {
    return __builtin_is_constant_evaluated() ? portable_half::round(value) : convert(value);
  }

 private:
  static METAL_FUNC float convert(uint16_t bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
#ifdef MSL_MATRIX_LANES
    __builtin_assume(is_half(value));  // for products of matrices
#endif
    return value;
  }
  static METAL_FUNC uint16_t convert(float value) {
    uint16_t bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
  }
};

struct bfloat_format {
  static METAL_FUNC constexpr float widen(uint16_t bits) {
#ifdef MSL_MATRIX_LANES  // products of matrices have to see that the lower half is 0
    return portable_bfloat::widen(bits);
#else
    return widen_rounded(bits);
#endif
  }
  // By a move: an element in the upper half of a register takes one instruction then, and two by a shift. Behind a
  // conversion the compiler sees a shift as a reason for the conversion's slow form (F2F, a quarter of the rate), and
  // takes the fast one (F2FP) behind the move.
  static METAL_FUNC constexpr float widen_rounded(uint16_t bits) {
    return __builtin_is_constant_evaluated() ? portable_bfloat::widen(bits) : move(bits);
  }
  static METAL_FUNC constexpr uint16_t round(float value) {
    return __builtin_is_constant_evaluated() ? portable_bfloat::round(value) : convert(value);
  }

 private:
  static METAL_FUNC uint16_t convert(float value) {
#if __CUDA_ARCH__ >= 800
    uint16_t bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
#else
    return portable_bfloat::round(value);
#endif
  }
  static METAL_FUNC float move(uint16_t bits) {
    float value;
    asm("mov.b32 %0, {%1, %2};" : "=f"(value) : "h"(uint16_t(0)), "h"(bits));
    return value;
  }
};

}  // namespace msl
