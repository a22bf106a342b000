// Exponentials, logarithms and powers of float, without branches or calls so that loops over them vectorize. The hot
// ones (exp, exp2, log) work in float. The others use a short polynomial in double, so that only one rounding is left.
#pragma once

#include "metal/values.h"

namespace msl::math {

constexpr float kInfinity = __builtin_inff();
constexpr float kNaN = __builtin_nanf("");

// Adding and subtracting 1.5 * 2^23 rounds to the nearest integer; the sum's low bits hold that integer.
constexpr float kRounder = 0x1.8p23f;
constexpr double kRounder64 = 0x1.8p52;

METAL_FUNC constexpr float abs(float x) { return bit_cast<float>(bit_cast<uint32_t>(x) & 0x7fffffffu); }
METAL_FUNC constexpr float copysign(float x, float sign) {
  return bit_cast<float>((bit_cast<uint32_t>(x) & 0x7fffffffu) | (bit_cast<uint32_t>(sign) & 0x80000000u));
}

// a * b + c, with one rounding where the machine has the instruction and two elsewhere. It is never a call.
METAL_FUNC float multiply_add(float a, float b, float c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}
METAL_FUNC double multiply_add(double a, double b, double c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  return __builtin_fma(a, b, c);
#else
  return a * b + c;
#endif
}

// The polynomial with these coefficients, the highest power's first.
template <class T>
METAL_FUNC T polynomial(T, T constant) {
  return constant;
}
template <class T, class... Rest>
METAL_FUNC T polynomial(T x, T first, T second, Rest... rest) {
  return polynomial(x, multiply_add(first, x, second), rest...);
}

// 2^n for -126 <= n <= 127.
METAL_FUNC float power_of_two(int n) { return bit_cast<float>((n + 127) << 23); }
METAL_FUNC double power_of_two64(long n) { return bit_cast<double>((n + 1023) << 52); }

// x * 2^n for |n| <= 252, rounded once even where the result is subnormal.
METAL_FUNC float scale(float x, int n) { return x * power_of_two(n >> 1) * power_of_two(n - (n >> 1)); }

// e^r - 1 - r for |r| <= ln(2) / 2; coefficients from Cephes expf.
METAL_FUNC float exp_tail(float r) {
  float p = polynomial(r, 1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f,
                       5.0000001201e-1f);
  return p * r * r;
}

METAL_FUNC float exp(float x) {
  x = x < -104.0f ? -104.0f : x;
  x = x > 89.0f ? 89.0f : x;
  float rounded = multiply_add(x, 1.44269504f, kRounder);
  int n = bit_cast<int>(rounded) - bit_cast<int>(kRounder);
  rounded -= kRounder;
  float r = multiply_add(rounded, -0.693359375f, x);  // exact: the constant has 10 bits
  r = multiply_add(rounded, 2.12194440e-4f, r);
  return scale(exp_tail(r) + r + 1.0f, n);
}

METAL_FUNC float exp2(float x) {
  x = x < -151.0f ? -151.0f : x;
  x = x > 129.0f ? 129.0f : x;
  float rounded = x + kRounder;
  int n = bit_cast<int>(rounded) - bit_cast<int>(kRounder);
  float f = x - (rounded - kRounder);  // exact
  return scale(exp_tail(f * 0.693147182f) + f * 0.693147182f + 1.0f, n);
}

// 2^t in double for |t| < 1000, with a relative error below 1e-9.
METAL_FUNC double exp2_64(double t) {
  double rounded = t + kRounder64;
  long n = bit_cast<long>(rounded) - bit_cast<long>(kRounder64);
  double r = (t - (rounded - kRounder64)) * 0.69314718055994530942;
  double p = polynomial(r, 1.0 / 40320, 1.0 / 5040, 1.0 / 720, 1.0 / 120, 1.0 / 24, 1.0 / 6, 0.5, 1.0, 1.0);
  return p * power_of_two64(n);
}

METAL_FUNC double exp_64(double x) { return exp2_64(x * 1.44269504088896340736); }

METAL_FUNC float exp10(float x) {
  x = x < -46.0f ? -46.0f : x;
  x = x > 39.0f ? 39.0f : x;
  return float(exp2_64(double(x) * 3.32192809488736234787));
}

// Splits x > 0 into 2^exponent * (1 + f) with 1 + f in [sqrt(1/2), sqrt(2)).
struct LogParts {
  float exponent, f;
};
METAL_FUNC LogParts log_parts(float x) {
  bool tiny = x < 0x1p-126f;
  uint32_t bits = bit_cast<uint32_t>(tiny ? x * 0x1p23f : x) - 0x3f3504f3u;
  int exponent = (int(bits) >> 23) - (tiny ? 23 : 0);
  return {float(exponent), bit_cast<float>((bits & 0x7fffffu) + 0x3f3504f3u) - 1.0f};
}

// A logarithm at zero, below zero, at infinity and at NaN; `value` elsewhere.
METAL_FUNC float log_special(float x, float value) {
  value = x == kInfinity ? x : value;
  value = x == 0.0f ? -kInfinity : value;
  return x >= 0.0f ? value : kNaN;
}

// FreeBSD's logf: log(1+f) = f - f^2/2 + s * (f^2/2 + R(s^2)), s = f / (2 + f).
METAL_FUNC float log(float x) {
  LogParts parts = log_parts(x);
  float f = parts.f;
  float s = f / (2.0f + f);
  float z = s * s;
  float w = z * z;
  float r = z * (0.66666662693f + w * 0.28498786688f) + w * (0.40000972152f + w * 0.24279078841f);
  float half_square = 0.5f * f * f;
  float value = s * (half_square + r) + parts.exponent * 9.0580006145e-06f - half_square + f +
                parts.exponent * 6.9313812256e-01f;
  return log_special(x, value);
}

// log(1 + f) in double for 1 + f in [sqrt(1/2), sqrt(2)), with a relative error below 1e-12.
METAL_FUNC double log1p_64(double f) {
  double s = f / (2.0 + f);
  double z = s * s;
  return s * polynomial(z, 2.0 / 17, 2.0 / 15, 2.0 / 13, 2.0 / 11, 2.0 / 9, 2.0 / 7, 2.0 / 5, 2.0 / 3, 2.0);
}

METAL_FUNC double log2_64(float x) {
  LogParts parts = log_parts(x);
  return double(parts.exponent) + log1p_64(parts.f) * 1.44269504088896340736;
}

// The natural logarithm of a double that is positive, normal and finite.
METAL_FUNC double log_64(double x) {
  uint64_t bits = bit_cast<uint64_t>(x) - 0x3fe6a09e667f3bcdul;
  int exponent = int(int64_t(bits) >> 52);
  double f = bit_cast<double>((bits & 0xffffffffffffful) + 0x3fe6a09e667f3bcdul) - 1.0;
  return double(exponent) * 0.69314718055994530942 + log1p_64(f);
}

METAL_FUNC float log2(float x) { return log_special(x, float(log2_64(x))); }
METAL_FUNC float log10(float x) { return log_special(x, float(log2_64(x) * 0.30102999566398119521)); }

METAL_FUNC float sqrt(float x) { return __builtin_sqrtf(x); }
METAL_FUNC float rsqrt(float x) { return 1.0f / __builtin_sqrtf(x); }

// x^y for x >= 0.
METAL_FUNC float power_of_magnitude(float x, float y) {
  double logarithm = log2_64(x);
  logarithm = x == 0.0f ? -double(kInfinity) : logarithm;
  logarithm = x == kInfinity ? double(kInfinity) : logarithm;
  double t = double(y) * logarithm;
  t = t < -200.0 ? -200.0 : t;
  t = t > 200.0 ? 200.0 : t;
  float value = float(exp2_64(t));
  return y == 0.0f || x == 1.0f ? 1.0f : value;
}

METAL_FUNC float pow(float x, float y) {
  float magnitude = abs(x);
  float value = power_of_magnitude(magnitude, y);
  // Every float of 2^24 or more is an even integer.
  float size = abs(y);
  float whole = (size + 0x1p23f) - 0x1p23f;
  bool integer = size >= 0x1p23f || whole == size;
  float half_size = size * 0.5f;
  bool odd = integer && size < 0x1p24f && (half_size >= 0x1p23f || (half_size + 0x1p23f) - 0x1p23f != half_size);
  bool negative = bit_cast<int>(x) < 0;
  value = negative && odd ? -value : value;
  bool undefined = x < 0.0f && !integer && magnitude != kInfinity;
  value = undefined ? kNaN : value;
  // y == 0 and x == 1 give 1 even where the other is NaN; otherwise a NaN stays.
  bool unordered = (x != x && y != 0.0f) || (y != y && x != 1.0f);
  return unordered ? kNaN : value;
}

METAL_FUNC float powr(float x, float y) {
  float value = power_of_magnitude(x, y);
  return x >= 0.0f && y == y ? value : kNaN;
}

}  // namespace msl::math
