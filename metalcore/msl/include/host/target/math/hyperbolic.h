// Hyperbolic functions of float and their inverses.
#pragma once

#include "target/math/exponential.h"

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

}  // namespace msl::math
