// What real numbers and complex ones (float2) share under one name.
#pragma once

#include <metal_stdlib>

#include "householder.h"

template <typename Number>
inline Number number(float real);
template <>
inline float number<float>(float real) {
  return real;
}
template <>
inline float2 number<float2>(float real) {
  return float2(real, 0.0f);
}

inline float times(float a, float b) { return a * b; }
inline float2 times(float a, float2 b) { return a * b; }
inline float2 times(float2 a, float2 b) { return float2(a.x * b.x - a.y * b.y, a.x * b.y + a.y * b.x); }

// sum + a b
inline float add_product(float sum, float a, float b) { return metal::fma(a, b, sum); }
inline float2 add_product(float2 sum, float a, float2 b) { return metal::fma(float2(a), b, sum); }
inline float2 add_product(float2 sum, float2 a, float2 b) {
  return metal::fma(float2(a.x), b, metal::fma(float2(-a.y, a.y), b.yx, sum));
}

inline float conjugate(float a) { return a; }
inline float2 conjugate(float2 a) { return float2(a.x, -a.y); }

inline float2 to_complex(float a) { return float2(a, 0.0f); }
inline float2 to_complex(float2 a) { return a; }

// Bits of a magnitude, which compare as the numbers do, with NaN above infinity.
inline uint bits_of(float a) { return as_type<uint>(metal::abs(a)); }
inline uint bits_of(float2 a) { return metal::max(bits_of(a.x), bits_of(a.y)); }

inline float size_of(float a) { return metal::abs(a); }
inline float size_of(float2 a) { return metal::max(metal::abs(a.x), metal::abs(a.y)); }

inline bool is_zero(float a) { return a == 0.0f; }
inline bool is_zero(float2 a) { return size_of(a) == 0.0f; }

// The magnitude, or for complex numbers one that is up to √2 times as large. A NaN has no sign.
inline float length_of(float a) { return metal::abs(a); }
inline float length_of(float2 a) { return metal::abs(metal::abs(a.x) + metal::abs(a.y)); }

inline float add_square(float sum, float a) { return metal::fma(a, a, sum); }
inline float add_square(float sum, float2 a) { return metal::fma(a.x, a.x, metal::fma(a.y, a.y, sum)); }

// a / b for b other than zero (Smith 1962).
inline float2 quotient(float2 a, float2 b) {
  const bool real = metal::abs(b.x) >= metal::abs(b.y);
  const float most = real ? b.x : b.y, ratio = (real ? b.y : b.x) / most;
  const float2 numerator = real ? float2(metal::fma(a.y, ratio, a.x), metal::fma(-a.x, ratio, a.y))
                                : float2(metal::fma(a.x, ratio, a.y), metal::fma(a.y, ratio, -a.x));
  return numerator / metal::fma(ratio, real ? b.y : b.x, most);
}

inline float hypotenuse(float x, float y) {
  const float most = metal::max(metal::abs(x), metal::abs(y));
  if (most == 0.0f) return 0.0f;
  const float ratio = metal::min(metal::abs(x), metal::abs(y)) / most;
  return most * metal::precise::sqrt(metal::fma(ratio, ratio, 1.0f));
}

// The root whose real part is not negative.
inline float2 square_root(float2 a) {
  const float most = metal::precise::sqrt(0.5f * (metal::abs(a.x) + hypotenuse(a.x, a.y)));
  if (most == 0.0f) return float2(0.0f);
  const float other = a.y / (2.0f * most);
  return a.x >= 0.0f ? float2(most, other) : float2(metal::abs(other), metal::copysign(most, a.y));
}

// A reflector I - tau v vᴴ whose conjugate transpose makes x a multiple of e₁, with a real beta (LAPACK's clarfg).
struct ComplexReflector {
  float2 beta, tau, inverse;
};

inline ComplexReflector make_reflector(float2 alpha, float largest, float squares, float scale) {
  if (largest == 0.0f && squares == 0.0f && alpha.y == 0.0f) return {alpha, float2(0.0f), float2(0.0f)};
  const float2 a = alpha * scale;
  const float b = -metal::copysign(metal::precise::sqrt(add_square(squares, a)), a.x);
  return {float2(b * inverse_of_scale(scale), 0.0f), float2((b - a.x) / b, -a.y / b),
          quotient(float2(1.0f, 0.0f), a - float2(b, 0.0f))};
}
