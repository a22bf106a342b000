// Rounding, remainders, and the parts of floats.
#pragma once

#include "target/math/exponential.h"

namespace msl::math {

METAL_FUNC float floor(float x) { return __builtin_floorf(x); }
METAL_FUNC float ceil(float x) { return __builtin_ceilf(x); }
METAL_FUNC float trunc(float x) { return __builtin_truncf(x); }
METAL_FUNC float rint(float x) { return __builtin_rintf(x); }
// Rounds half away from zero. It adds the largest float below 1/2, which itself does not round up to 1.
METAL_FUNC float round(float x) { return copysign(trunc(x + copysign(0x1.fffffep-2f, x)), x); }

// The result is below 1 even where x - floor(x) rounds up to 1.
METAL_FUNC float fract(float x) {
  float value = x - floor(x);
  value = value < 0x1.fffffep-1f ? value : 0x1.fffffep-1f;
  value = abs(x) == kInfinity ? 0.0f : value;
  return x != x ? x : value;
}

METAL_FUNC float fmod(float x, float y) { return __builtin_fmodf(x, y); }
METAL_FUNC float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
METAL_FUNC float nextafter(float x, float y) { return __builtin_nextafterf(x, y); }
METAL_FUNC float ldexp(float x, int n) { return __builtin_ldexpf(x, n); }
METAL_FUNC float fdim(float x, float y) { return x > y ? x - y : (x != x || y != y ? kNaN : 0.0f); }

METAL_FUNC float frexp(float x, int& exponent) { return __builtin_frexpf(x, &exponent); }
// Gives INT_MIN for zero, INT_MAX for infinity and NaN.
METAL_FUNC int ilogb(float x) {
  if (x == 0.0f) return -2147483647 - 1;
  if (!(abs(x) < kInfinity)) return 2147483647;
  int exponent;
  __builtin_frexpf(x, &exponent);
  return exponent - 1;
}
METAL_FUNC float modf(float x, float& whole) {
  whole = trunc(x);
  return copysign(abs(x) == kInfinity ? 0.0f : x - whole, x);
}

}  // namespace msl::math
