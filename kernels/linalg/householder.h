// Householder reflectors H = I - tau v vᵀ, v = (1, …), as LAPACK's slarfg defines them: H x = beta e₁, and H = I (tau =
// 0) if x has only zeros below its first entry. A power of two scales x so that its squares stay in range, and entries
// of any magnitude give an orthogonal H.
#pragma once

#include <metal_stdlib>

// 2^-e where 2^e <= largest < 2^(e+1), limited to 2^-126 … 2^126 so that its inverse is a normal number too.
inline float scale_to_one(float largest) {
  const int exponent = as_type<int>(largest) & 0x7f800000;
  return as_type<float>(metal::clamp(0x7f000000 - exponent, 0x00800000, 0x7e800000));
}

inline float inverse_of_scale(float scale) { return as_type<float>(0x7f000000 - as_type<int>(scale)); }

struct Reflector {
  float beta;
  float tau;
  float inverse;  // v = (x * scale) * inverse, below its first entry
};

// The reflector of x = (alpha, rest). `largest` is the largest magnitude in the rest, `squares` the sum of the squares
// of its entries times `scale`. Only `squares` shows a NaN in the rest.
inline Reflector make_reflector(float alpha, float largest, float squares, float scale) {
  if (largest == 0.0f && squares == 0.0f) return {alpha, 0.0f, 0.0f};
  const float a = alpha * scale;
  const float b = -metal::copysign(metal::precise::sqrt(metal::fma(a, a, squares)), a);
  return {b * inverse_of_scale(scale), (b - a) / b, 1.0f / (a - b)};
}
