// msl::math: the functions on float that metal/math.h makes MSL's overloads of; CUDA's accurate ones.
#pragma once

#include "metal/bit_cast.h"

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

#define MSL_SAME(name, cuda_name) \
  METAL_FUNC float name(float x) { return cuda_name(x); }
MSL_SAME(acos, ::acosf) MSL_SAME(acosh, ::acoshf) MSL_SAME(asin, ::asinf) MSL_SAME(asinh, ::asinhf)
MSL_SAME(atan, ::atanf) MSL_SAME(atanh, ::atanhf) MSL_SAME(ceil, ::ceilf) MSL_SAME(cos, ::cosf)
MSL_SAME(cosh, ::coshf) MSL_SAME(exp, ::expf) MSL_SAME(exp10, ::exp10f)
MSL_SAME(exp2, ::exp2f) MSL_SAME(floor, ::floorf) MSL_SAME(log, ::logf) MSL_SAME(log10, ::log10f)
MSL_SAME(log2, ::log2f) MSL_SAME(rint, ::rintf) MSL_SAME(round, ::roundf) MSL_SAME(rsqrt, ::rsqrtf)
MSL_SAME(sin, ::sinf) MSL_SAME(sinh, ::sinhf) MSL_SAME(sinpi, ::sinpif) MSL_SAME(sqrt, ::sqrtf)
MSL_SAME(tan, ::tanf) MSL_SAME(tanh, ::tanhf) MSL_SAME(trunc, ::truncf)
#undef MSL_SAME
#define MSL_SAME(name, cuda_name) \
  METAL_FUNC float name(float x, float y) { return cuda_name(x, y); }
MSL_SAME(atan2, ::atan2f) MSL_SAME(copysign, ::copysignf) MSL_SAME(fdim, ::fdimf) MSL_SAME(fmod, ::fmodf)
MSL_SAME(nextafter, ::nextafterf) MSL_SAME(pow, ::powf)
#undef MSL_SAME

METAL_FUNC float fma(float a, float b, float c) { return ::fmaf(a, b, c); }
METAL_FUNC float ldexp(float x, int n) { return ::ldexpf(x, n); }
METAL_FUNC float frexp(float x, int& exponent) { return ::frexpf(x, &exponent); }
METAL_FUNC float modf(float x, float& whole) { return ::modff(x, &whole); }
METAL_FUNC float sincos(float x, float& cosine) {
  float sine;
  ::sincosf(x, &sine, &cosine);
  return sine;
}

// What CUDA has no function for, or one that differs.

// A negative base has no power, even where the exponent is an integer.
METAL_FUNC float powr(float x, float y) { return x >= 0.0f && y == y ? ::powf(x, y) : kNaN; }

// Zeros of cospi are positive.
METAL_FUNC float cospi(float x) { return ::cospif(x) + 0.0f; }

METAL_FUNC float tanpi(float x) {
  float sine, cosine;
  ::sincospif(x, &sine, &cosine);
  float value = sine / (cosine + 0.0f);
  return sine == 0.0f ? ::copysignf(0.0f, x) : value;
}

// Below 1 even where x - floor(x) rounds up to it.
METAL_FUNC float fract(float x) {
  float value = ::fminf(x - ::floorf(x), 0x1.fffffep-1f);
  value = ::fabsf(x) == kInfinity ? 0.0f : value;
  return x != x ? x : value;
}

// INT_MIN for zero, INT_MAX for infinity and NaN.
METAL_FUNC int ilogb(float x) {
  if (x == 0.0f) return -2147483647 - 1;
  if (!(::fabsf(x) < kInfinity)) return 2147483647;
  return ::ilogbf(x);
}

}  // namespace msl::math
