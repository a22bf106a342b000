// msl::math: the functions on float from which metal/math.h makes MSL's overloads. They are CUDA's accurate functions,
// except in constant expressions.
#pragma once

#include "metal/portable_formats.h"
#include "target/constant_math.h"

namespace msl::math {

constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000);
constexpr float kNaN = __builtin_bit_cast(float, 0x7fc00000);

METAL_FUNC constexpr float abs(float x) {
  return __builtin_is_constant_evaluated() ? bit_cast<float>(bit_cast<uint32_t>(x) & 0x7fffffffu) : ::fabsf(x);
}

METAL_FUNC constexpr float least(float a, float b) {
  return __builtin_is_constant_evaluated() ? (b < a || a != a ? b : a) : ::fminf(a, b);
}
METAL_FUNC constexpr float greatest(float a, float b) {
  return __builtin_is_constant_evaluated() ? (a < b || a != a ? b : a) : ::fmaxf(a, b);
}

// In constant expressions the nearest float of constant_math's function, and `elsewhere` otherwise.
#define MSL_EITHER(elsewhere, function, ...) \
  (__builtin_is_constant_evaluated() ? constant_math::nearest(constant_math::function, __VA_ARGS__) : elsewhere)

#define MSL_SAME(name) \
  METAL_FUNC constexpr float name(float x) { return MSL_EITHER(::name##f(x), name, x); }
MSL_SAME(acos) MSL_SAME(acosh) MSL_SAME(asin) MSL_SAME(asinh) MSL_SAME(atan) MSL_SAME(atanh) MSL_SAME(ceil)
MSL_SAME(cos) MSL_SAME(cosh) MSL_SAME(exp) MSL_SAME(exp10) MSL_SAME(exp2) MSL_SAME(floor) MSL_SAME(log)
MSL_SAME(log10) MSL_SAME(log2) MSL_SAME(rint) MSL_SAME(round) MSL_SAME(rsqrt) MSL_SAME(sin) MSL_SAME(sinh)
MSL_SAME(sinpi) MSL_SAME(sqrt) MSL_SAME(tan) MSL_SAME(tanh) MSL_SAME(trunc)
#undef MSL_SAME
#define MSL_SAME(name) \
  METAL_FUNC constexpr float name(float x, float y) { return MSL_EITHER(::name##f(x, y), name, x, y); }
MSL_SAME(atan2) MSL_SAME(copysign) MSL_SAME(fdim) MSL_SAME(fmod) MSL_SAME(pow)
#undef MSL_SAME
METAL_FUNC constexpr float nextafter(float x, float y) {
  if (!__builtin_is_constant_evaluated()) return ::nextafterf(x, y);
  if (x == y) return y;
  const uint32_t bits = bit_cast<uint32_t>(x == 0.0f ? copysign(0.0f, y) : x);
  return bit_cast<float>(x == 0.0f || (x < y) == (x > 0.0f) ? bits + 1 : bits - 1);
}

METAL_FUNC constexpr float fma(float a, float b, float c) {
  return __builtin_is_constant_evaluated() ? constant_math::fma(a, b, c) : ::fmaf(a, b, c);
}
METAL_FUNC constexpr float ldexp(float x, int n) {
  return __builtin_is_constant_evaluated() ? constant_math::nearest(constant_math::ldexp(x, n)) : ::ldexpf(x, n);
}
METAL_FUNC constexpr float frexp(float x, int& exponent) {
  return __builtin_is_constant_evaluated() ? float(constant_math::frexp(x, exponent)) : ::frexpf(x, &exponent);
}
METAL_FUNC constexpr float modf(float x, float& whole) {
  if (!__builtin_is_constant_evaluated()) return ::modff(x, &whole);
  whole = trunc(x);
  return copysign(whole == x ? 0.0f : x - whole, x);
}
METAL_FUNC constexpr float sincos(float x, float& cosine) {
  float sine = 0;
  if (__builtin_is_constant_evaluated()) sine = sin(x), cosine = cos(x);
  else ::sincosf(x, &sine, &cosine);
  return sine;
}

// Functions that CUDA does not have, or that differ from MSL's.

// A negative base has no power, even where the exponent is an integer.
METAL_FUNC constexpr float powr(float x, float y) { return x >= 0.0f && y == y ? pow(x, y) : kNaN; }

// Zeros of cospi are positive.
METAL_FUNC constexpr float cospi(float x) { return MSL_EITHER(::cospif(x) + 0.0f, cospi, x); }

METAL_FUNC constexpr float tanpi(float x) {
  if (__builtin_is_constant_evaluated()) return constant_math::nearest(constant_math::tanpi, x);
  float sine = 0, cosine = 0;
  ::sincospif(x, &sine, &cosine);
  float value = sine / (cosine + 0.0f);
  return sine == 0.0f ? ::copysignf(0.0f, x) : value;
}

// The result is below 1 even where x - floor(x) rounds up to 1.
METAL_FUNC constexpr float fract(float x) {
  float value = least(x - floor(x), 0x1.fffffep-1f);
  value = abs(x) == kInfinity ? 0.0f : value;
  return x != x ? x : value;
}

// Gives INT_MIN for zero, INT_MAX for infinity and NaN.
METAL_FUNC constexpr int ilogb(float x) {
  if (x == 0.0f) return -2147483647 - 1;
  if (!(abs(x) < kInfinity)) return 2147483647;
  if (!__builtin_is_constant_evaluated()) return ::ilogbf(x);
  int exponent = 0;
  constant_math::frexp(x, exponent);
  return exponent - 1;
}

#undef MSL_EITHER

}  // namespace msl::math
