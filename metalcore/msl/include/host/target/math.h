// msl::math: the functions on float from which metal/math.h makes MSL's overloads.
#pragma once

#include "target/math/exponential.h"
#include "target/math/trigonometric.h"

// Hyperbolic functions of float and their inverses.
namespace msl::math {

// Near zero it is an odd polynomial (Cephes tanhf), elsewhere 1 - 2 / (e^2x + 1).
METAL_FUNC float tanh(float x) {
  float size = abs(x);
  float z = x * x;
  float p = polynomial(z, -5.70498872745e-3f, 2.06390887954e-2f, -5.37397155531e-2f, 1.33314422036e-1f,
                       -3.33332819422e-1f);
  float small = multiply_add(x * z, p, x);
  float large = 1.0f - 2.0f / (exp(size + size) + 1.0f);
  return copysign(size < 0.625f ? small : large, x);
}

METAL_FUNC double clamp_exponent(float x) {
  float low = x < -100.0f ? -100.0f : x;
  return double(low > 100.0f ? 100.0f : low);
}

METAL_FUNC float sinh(float x) {
  double wide = clamp_exponent(x);
  double grown = exp_64(wide);
  double square = wide * wide;
  double series = wide + wide * square * (1.0 / 6 + square * (1.0 / 120 + square * (1.0 / 5040)));
  return float(__builtin_fabs(wide) < 0.25 ? series : 0.5 * (grown - 1.0 / grown));
}

METAL_FUNC float cosh(float x) {
  double grown = exp_64(clamp_exponent(x));
  return float(0.5 * (grown + 1.0 / grown));
}

METAL_FUNC float asinh(float x) {
  double size = double(abs(x));
  double value = log_64(size + __builtin_sqrt(size * size + 1.0));
  value = size < 0x1p-10 ? size - size * size * size * (1.0 / 6) : value;
  return copysign(abs(x) < kInfinity ? float(value) : abs(x), x);
}

METAL_FUNC float acosh(float x) {
  double wide = double(x);
  float value = float(log_64(wide + __builtin_sqrt((wide - 1.0) * (wide + 1.0))));
  value = x == 1.0f ? 0.0f : value;
  value = x == kInfinity ? x : value;
  return x >= 1.0f ? value : kNaN;
}

METAL_FUNC float atanh(float x) {
  double size = double(abs(x));
  double value = 0.5 * log_64((1.0 + size) / (1.0 - size));
  value = size < 0x1p-10 ? size + size * size * size * (1.0 / 3) : value;
  float rounded = size == 1.0 ? kInfinity : float(value);
  return copysign(size <= 1.0 ? rounded : kNaN, x);
}

// Rounding, remainders, and the parts of floats.
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

METAL_FUNC constexpr float least(float a, float b) { return b < a || a != a ? b : a; }
METAL_FUNC constexpr float greatest(float a, float b) { return a < b || a != a ? b : a; }

}  // namespace msl::math
