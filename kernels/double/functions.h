// Functions of pairs, by reductions of the argument and Taylor series. A series begins, at its highest terms, in
// floats: these terms are so small that a float's rounding is below 2^-48 of the sum.
#pragma once

#include "double/pairs.h"

constant constexpr float kLn2[3] = {6.931471825e-01f, -1.904654212e-09f, -8.783183739e-17f};
constant constexpr float kHalfPi[4] = {1.570796371e+00f, -4.371138829e-08f, -1.715124510e-15f, 1.056299898e-23f};

inline Pair negative(Pair a) { return Pair(-a.x, -a.y); }

// value 2^exponent, in two steps whose factors are normal numbers.
inline Pair times_power(Pair value, int exponent) {
  const int half_way = exponent / 2;
  const float high = ldexp(ldexp(value.x, half_way), exponent - half_way);
  return Pair(high, isinf(high) ? 0.0f : ldexp(ldexp(value.y, half_way), exponent - half_way));
}

// a - times * (the number that `parts` add up to), exact for whole `times`, except for the last sum's rounding.
template <uint PARTS>
inline Pair without_multiple(Pair a, float times, constant const float (&parts)[PARTS]) {
#pragma unroll
  for (uint i = 0; i < PARTS; ++i) a = add(a, exact_product(-times, parts[i]));
  return a;
}

// A series by Horner's rule, from its highest terms on. Its terms are floats first, then pairs.
template <uint FLOATS, uint PAIRS>
inline Pair series(Pair x, constant const float (&floats)[FLOATS], constant const float (&pairs)[PAIRS][2]) {
  float tail = floats[0];
#pragma unroll
  for (uint i = 1; i < FLOATS; ++i) tail = fma(tail, x.x, floats[i]);
  Pair sum = Pair(tail, 0.0f);
#pragma unroll
  for (uint i = 0; i < PAIRS; ++i) sum = add(multiply(sum, x), Pair(pairs[i][0], pairs[i][1]));
  return sum;
}

// 1/13! … 1/8! in floats, and hi and lo of 1/7! … 1/2!
constant constexpr float kExponentialFloats[6] = {1.605904437e-10f, 2.087675588e-09f, 2.505210794e-08f,
                                                  2.755731998e-07f, 2.755731884e-06f, 2.480158764e-05f};
constant constexpr float kExponentialPairs[6][2] = {
    {1.984127011e-04f, -2.725596875e-12f}, {1.388888923e-03f, -3.363109444e-11f}, {8.333333768e-03f, -4.346172033e-10f},
    {4.166666791e-02f, -1.241763470e-09f}, {1.666666716e-01f, -4.967053879e-09f}, {5.000000000e-01f, 0.0f}};

// e^r - 1 for |r| <= ln(2) / 2.
inline Pair small_exponential(Pair r) {
  const Pair sum = series(r, kExponentialFloats, kExponentialPairs);
  return add(multiply(multiply(sum, r), r), r);
}

// e^x - 1 where |x| is at most 40: 2^k (e^r - 1) and 2^k - 1, of which a pair holds enough.
inline Pair exponential_less_one(Pair x) {
  const float power = rint(x.x * 1.442695041f);
  const Pair small = times_power(small_exponential(without_multiple(x, power, kLn2)), int(power));
  return power == 0.0f ? small : add(small, exact_sum(ldexp(1.0f, int(power)), -1.0f));
}

inline Pair exponential(Pair x) {
  if (isnan(x.x)) return x;
  if (x.x > 89.0f) return Pair(INFINITY, 0.0f);
  if (x.x < -104.0f) return Pair(0.0f, 0.0f);
  const float power = rint(x.x * 1.442695041f);
  return times_power(add(small_exponential(without_multiple(x, power, kLn2)), 1.0f), int(power));
}

// 1/21, 1/19 … 1/11 in floats, and hi and lo of 1/9, 1/7, 1/5 and 1/3.
constant constexpr float kLogarithmFloats[6] = {4.761904762e-02f, 5.263157895e-02f, 5.882352941e-02f,
                                                6.666666667e-02f, 7.692307692e-02f, 9.090909091e-02f};
constant constexpr float kLogarithmPairs[4][2] = {{1.111111119e-01f, -8.278422947e-10f},
                                                  {1.428571492e-01f, -6.386212004e-09f},
                                                  {2.000000030e-01f, -2.980232283e-09f},
                                                  {3.333333433e-01f, -9.934107759e-09f}};

// x = m 2^k with m from 1/√2 to √2; log m = 2 artanh((m - 1) / (m + 1)).
inline Pair logarithm(Pair x) {
  if (!(x.x > 0.0f) || isinf(x.x)) return Pair(log(x.x), 0.0f);
  int power;
  if (frexp(x.x, power) < 0.7071067812f) power -= 1;
  const Pair m = times_power(x, -power);
  const Pair root = quotient(add(m, -1.0f), add(m, 1.0f)), square = multiply(root, root);
  Pair sum = series(square, kLogarithmFloats, kLogarithmPairs);
  sum = add(multiply(multiply(sum, square), root), root);
  const Pair high = exact_product(float(power), kLn2[0]);
  return add(add(high, float(power) * kLn2[1]), Pair(2.0f * sum.x, 2.0f * sum.y));
}

// 1/17!, -1/15!, 1/13! and -1/11! in floats, and hi and lo of 1/9!, -1/7!, 1/5! and -1/3!.
constant constexpr float kSineFloats[4] = {2.811457359e-15f, -7.647163610e-13f, 1.605904437e-10f, -2.505210794e-08f};
constant constexpr float kSinePairs[4][2] = {{2.755731884e-06f, 3.793571224e-14f},
                                             {-1.984127011e-04f, 2.725596875e-12f},
                                             {8.333333768e-03f, -4.346172033e-10f},
                                             {-1.666666716e-01f, 4.967053879e-09f}};
// -1/18!, 1/16!, -1/14! and 1/12! in floats, and hi and lo of -1/10!, 1/8!, -1/6!, 1/4! and -1/2!.
constant constexpr float kCosineFloats[4] = {-1.561920681e-16f, 4.779477256e-14f, -1.147074536e-11f, 2.087675588e-09f};
constant constexpr float kCosinePairs[5][2] = {{-2.755731998e-07f, 7.575112209e-15f},
                                               {2.480158764e-05f, -3.406996094e-13f},
                                               {-1.388888923e-03f, 3.363109444e-11f},
                                               {4.166666791e-02f, -1.241763470e-09f},
                                               {-5.000000000e-01f, 0.0f}};

// The sine of r, |r| <= pi / 4, from its square.
inline Pair small_sine(Pair r, Pair square) {
  return add(multiply(multiply(series(square, kSineFloats, kSinePairs), square), r), r);
}
inline Pair small_cosine(Pair square) {
  return add(multiply(series(square, kCosineFloats, kCosinePairs), square), 1.0f);
}

constant constexpr float kMostAngle = 8388608.0f;  // 2^23: a float counts the right angles below it

// The sine of x, or of x + pi / 2. NaN beyond kMostAngle.
inline Pair sine(Pair x, int quarter) {
  if (!(abs(x.x) <= kMostAngle)) return Pair(NAN, 0.0f);
  const float turns = rint(x.x * 6.366197724e-01f);
  const Pair r = without_multiple(x, turns, kHalfPi), square = multiply(r, r);
  quarter += int(turns);
  const Pair found = quarter % 2 == 0 ? small_sine(r, square) : small_cosine(square);
  return (quarter & 2) == 0 ? found : negative(found);
}

inline Pair hyperbolic_tangent(Pair x) {
  if (isnan(x.x)) return x;
  if (abs(x.x) > 18.0f) return Pair(x.x > 0.0f ? 1.0f : -1.0f, 0.0f);
  const Pair less_one = exponential_less_one(add(x, x));
  return quotient(less_one, add(less_one, 2.0f));
}
