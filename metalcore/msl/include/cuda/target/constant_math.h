// Math functions for constant expressions, where CUDA's cannot be called. They reduce the argument and sum series in
// double, so that the float nearest to the result is the nearest to the exact value too. No kernel runs them. C++ has
// neither comparison with NaN nor results out of range in constant expressions: nearest() keeps NaN from the functions.
#pragma once

namespace msl::constant_math {

constexpr double kInfinity = __builtin_bit_cast(double, 0x7ff0000000000000);
constexpr double kNaN = __builtin_bit_cast(double, 0x7ff8000000000000);
constexpr double kPi = 3.14159265358979323846, kLn2 = 0.69314718055994530942, kLn10 = 2.30258509299404568402;

constexpr unsigned long long bits_of(double x) { return __builtin_bit_cast(unsigned long long, x); }
constexpr bool is_negative(double x) { return bits_of(x) >> 63; }
constexpr bool is_nan(double x) { return bits_of(x) << 1 > bits_of(kInfinity) << 1; }
constexpr bool is_finite(double x) { return bits_of(x) << 1 < bits_of(kInfinity) << 1; }
constexpr double abs(double x) { return is_negative(x) ? -x : x; }
constexpr double copysign(double x, double sign) { return is_negative(x) == is_negative(sign) ? x : -x; }

constexpr float nearest(double x) {
  if (is_nan(x)) return __builtin_bit_cast(float, 0x7fc00000);
  if (abs(x) < 0x1p-150) return is_negative(x) ? -0.0f : 0.0f;
  if (abs(x) < 0x1.ffffffp127) return float(x);
  return __builtin_bit_cast(float, is_negative(x) ? 0xff800000 : 0x7f800000);
}
constexpr float nearest(double (*f)(double), double x) { return nearest(is_nan(x) ? x : f(x)); }
constexpr float nearest(double (*f)(double, double), double x, double y) {
  return nearest(is_nan(x) ? x : is_nan(y) ? y : f(x, y));
}

// Rounding. Beyond 2^52 every double is an integer; zeros keep their sign.
constexpr double trunc(double x) { return abs(x) < 0x1p52 ? copysign(double((long long)x), x) : x; }
constexpr double floor(double x) { return copysign(trunc(x) > x ? trunc(x) - 1 : trunc(x), x); }
constexpr double ceil(double x) { return copysign(trunc(x) < x ? trunc(x) + 1 : trunc(x), x); }
constexpr double round(double x) { return copysign(trunc(abs(x) + 0.5), x); }
constexpr double rint(double x) {
  return abs(x) < 0x1p52 ? copysign((abs(x) + 0x1p52) - 0x1p52, x) : x;
}

constexpr double divide(double x, double y) {
  return y != 0 ? x / y : (is_negative(x) == is_negative(y) ? kInfinity : -kInfinity);
}
constexpr double fdim(double x, double y) { return x <= y ? 0 : x - y; }
constexpr double fmod(double x, double y) {
  if (!is_finite(x) || y == 0) return kNaN;
  if (!is_finite(y)) return x;
  double remaining = abs(x);
  while (remaining >= abs(y)) {
    double part = abs(y);
    while (part <= remaining / 2) part *= 2;
    remaining -= part;
  }
  return copysign(remaining, x);
}

constexpr double ldexp(double x, int n) {
  for (; n > 0 && is_finite(x) && x != 0; --n) x *= 2;
  for (; n < 0 && x != 0; ++n) x /= 2;
  return x;
}
// x is the result times 2^exponent, and the result's size is at least a half and below one.
constexpr double frexp(double x, int& exponent) {
  exponent = 0;
  if (!is_finite(x) || x == 0) return x;
  for (; abs(x) >= 1; ++exponent) x /= 2;
  for (; abs(x) < 0.5; --exponent) x *= 2;
  return x;
}

constexpr double sqrt(double x) {
  if (x <= 0 || x == kInfinity) return x < 0 ? kNaN : x;
  int exponent = 0;
  double part = frexp(x, exponent);
  if (exponent % 2) part *= 2, --exponent;
  double root = 1;
  for (int i = 0; i < 7; ++i) root = (root + part / root) / 2;
  return ldexp(root, exponent / 2);
}

constexpr double rsqrt(double x) { return x < 0 ? kNaN : x == kInfinity ? 0 : divide(1, sqrt(x)); }

// Exponentials and logarithms. expm1 and log1p are exact for small x.

constexpr double expm1_of_small(double x) {
  double sum = 0;
  for (int i = 24; i > 0; --i) sum = (1 + sum) * x / i;
  return sum;
}
constexpr double exp(double x) {
  if (abs(x) > 200) return x > 0 ? kInfinity : 0;
  const double n = rint(x / kLn2);
  return ldexp(1 + expm1_of_small(x - n * 0x1.62e42fee00000p-1 - n * 0x1.a39ef35793c76p-33), int(n));  // ln 2 in two
}
constexpr double expm1(double x) { return abs(x) < 0.5 ? expm1_of_small(x) : exp(x) - 1; }

constexpr double log1p_of_small(double x) {
  const double ratio = x / (2 + x);
  double sum = 0;
  for (int i = 41; i > 0; i -= 2) sum = sum * ratio * ratio + 1.0 / i;
  return 2 * ratio * sum;
}
constexpr double log(double x) {
  if (x <= 0 || x == kInfinity) return x == 0 ? -kInfinity : x < 0 ? kNaN : x;
  int exponent = 0;
  double part = frexp(x, exponent);
  if (part < 0.70710678) part *= 2, --exponent;
  return exponent * kLn2 + log1p_of_small(part - 1);
}
constexpr double log1p(double x) { return abs(x) < 0.4 ? log1p_of_small(x) : log(1 + x); }
constexpr double log2(double x) { return log(x) / kLn2; }
constexpr double log10(double x) { return log(x) / kLn10; }

// The power of an integer is computed by products, so it is exact where it can be.
constexpr double pow(double x, double y) {
  if (y == 0 || x == 1) return 1;
  const bool is_integer = trunc(y) == y, is_odd = is_integer && abs(fmod(y, 2)) == 1;
  if (x == 0 || !is_finite(x)) return copysign((x == 0) == (y > 0) ? 0 : kInfinity, is_odd ? x : 1);
  if (x < 0 && !is_integer && is_finite(y)) return kNaN;
  if (!is_finite(y)) return abs(x) == 1 ? 1 : (abs(x) > 1) == (y > 0) ? kInfinity : 0;
  const double logarithm = y * log(abs(x));
  if (!is_integer || abs(y) > 64 || abs(logarithm) > 200) return copysign(exp(logarithm), is_odd ? x : 1);
  double product = 1;
  for (int i = 0; i < abs(y); ++i) product *= x;
  return y < 0 ? 1 / product : product;
}

constexpr double exp2(double x) { return pow(2, x); }
constexpr double exp10(double x) { return pow(10, x); }

// Trigonometry. An argument is reduced to the nearest quarter of a turn. An argument that is too large makes no
// constant.

void argument_too_large_for_a_constant();

struct Turned {
  double rest;
  int quarter;
};
constexpr Turned reduce(double x) {
  const double n = rint(x * (2 / kPi));
  if (abs(n) > 0x1p20) argument_too_large_for_a_constant();
  const double rest = x - n * 0x1.921fb54400000p0 - n * 0x1.0b4611a626331p-34;  // pi / 2 in two parts
  return {rest, int(n - 4 * floor(n / 4))};
}
constexpr double sine_or_cosine(Turned at, int first) {
  const int quarter = (at.quarter + first) % 4;
  double term = quarter % 2 ? 1 : at.rest, sum = 0;
  for (int i = quarter % 2 ? 0 : 1; i < 26; i += 2) {
    sum += term;
    if (abs(term) < 1e-80) break;
    term *= -at.rest * at.rest / ((i + 1) * (i + 2));
  }
  return quarter < 2 ? sum : -sum;
}
constexpr double sin(double x) { return is_finite(x) ? x == 0 ? x : sine_or_cosine(reduce(x), 0) : kNaN; }
constexpr double cos(double x) { return is_finite(x) ? sine_or_cosine(reduce(x), 1) : kNaN; }
constexpr double tan(double x) { return is_finite(x) ? sin(x) / cos(x) : kNaN; }
// The angle pi times x, which is exact for halves.
constexpr Turned turned(double x) {
  const double n = rint(2 * x);
  return {(x - n / 2) * kPi, int(n - 4 * floor(n / 4))};
}
constexpr double sinpi(double x) {
  return !is_finite(x) ? kNaN : x == trunc(x) ? copysign(0, x) : sine_or_cosine(turned(fmod(x, 2)), 0);
}
constexpr double cospi(double x) { return is_finite(x) ? sine_or_cosine(turned(fmod(x, 2)), 1) + 0.0 : kNaN; }
constexpr double tanpi(double x) {
  return !is_finite(x) ? kNaN : x == trunc(x) ? copysign(0, x) : divide(sinpi(x), cospi(x) + 0.0);
}

constexpr double atan(double x) {
  if (!is_finite(x)) return copysign(kPi / 2, x);
  if (abs(x) > 0.2) return 2 * atan(x / (1 + sqrt(1 + x * x)));
  double sum = 0;
  for (int i = 29; i > 0; i -= 2) sum = 1.0 / i - sum * x * x;
  return x * sum;
}
constexpr double atan2(double y, double x) {
  if (y == 0) return is_negative(x) ? copysign(kPi, y) : y;
  if (!is_finite(x)) return copysign(is_finite(y) ? (x > 0 ? 0 : kPi) : (x > 0 ? kPi / 4 : 3 * kPi / 4), y);
  const double angle = x == 0 || !is_finite(y) ? kPi / 2 : atan(abs(y / x));
  return copysign(x < 0 ? kPi - angle : angle, y);
}
constexpr double asin(double x) { return abs(x) > 1 ? kNaN : x == 0 ? x : atan2(x, sqrt((1 - x) * (1 + x))); }
constexpr double acos(double x) { return abs(x) > 1 ? kNaN : atan2(sqrt((1 - x) * (1 + x)), x); }

constexpr double sinh(double x) { return is_finite(x) ? (expm1(x) - expm1(-x)) / 2 : x; }
constexpr double cosh(double x) { return (exp(x) + exp(-x)) / 2; }
constexpr double tanh(double x) { return abs(x) > 40 ? copysign(1, x) : expm1(2 * x) / (expm1(2 * x) + 2); }
constexpr double asinh(double x) {
  const double a = abs(x);
  return x == 0 || !is_finite(x) ? x : copysign(log1p(a + a * a / (1 + sqrt(a * a + 1))), x);
}
constexpr double acosh(double x) { return x < 1 ? kNaN : log1p(x - 1 + sqrt((x - 1) * (x + 1))); }
constexpr double atanh(double x) {
  return x == 0 ? x : abs(x) >= 1 ? abs(x) > 1 ? kNaN : copysign(kInfinity, x) : log1p(2 * x / (1 - x)) / 2;
}

// The float nearest to a * b + c. The product is exact. An inexact sum is made odd, so that the second rounding does
// not take it for a half-way case.
constexpr float fma(float a, float b, float c) {
  const double product = double(a) * b, sum = product + c;
  const double part = sum - product, error = (product - (sum - part)) + (c - part);
  if (!is_finite(sum) || error == 0) return nearest(sum);
  const auto bits = __builtin_bit_cast(unsigned long long, sum);
  return nearest(bits & 1 ? sum : __builtin_bit_cast(double, bits + ((error > 0) == (sum > 0) ? 1 : -1)));
}

}  // namespace msl::constant_math
