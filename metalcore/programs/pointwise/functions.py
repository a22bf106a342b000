"""Functions of MSL that formulas call, and which Metal's library lacks or defines differently."""

from __future__ import annotations

import re

# Each is the text of one function, by its name. One may call those before it.
FUNCTIONS = {
    "pw_expm1": """
// The series up to x^8, where exp(x) - 1 would cancel.
inline float pw_expm1(float x) {
  if (fabs(x) >= 0.5f) return exp(x) - 1.0f;
  float p = 2.4801587e-5f;
  p = fma(p, x, 1.9841270e-4f);
  p = fma(p, x, 1.3888889e-3f);
  p = fma(p, x, 8.3333333e-3f);
  p = fma(p, x, 4.1666667e-2f);
  p = fma(p, x, 1.6666667e-1f);
  p = fma(p, x, 0.5f);
  return fma(p * x, x, x);
}""",
    "pw_log1p": """
// log(u) x / (u - 1) with u = 1 + x as it rounds: the quotient takes back the rounding.
inline float pw_log1p(float x) {
  const float u = 1.0f + x;
  if (u == 1.0f) return x;
  return fabs(x) > 1e7f ? log(u) : log(u) * (x / (u - 1.0f));
}""",
    "pw_erfc": """
// erfc(t) exp(t^2) of t = |x| is a polynomial in u = (t - 2) / (t + 2), fitted for least relative error (2e-9). Beyond
// 10.1 erfc is 0 in float32, as exp is there; a NaN stays one.
inline float pw_erfc(float x) {
  const float t = fabs(x) > 10.1f ? 10.1f : fabs(x);
  const float u = fast::divide(t - 2.0f, t + 2.0f);
  float p = -1.1834549e-5f;
  p = fma(p, u, 1.36203297e-5f);
  p = fma(p, u, 1.54507326e-4f);
  p = fma(p, u, 4.97787142e-5f);
  p = fma(p, u, -9.71943047e-4f);
  p = fma(p, u, -8.48723511e-4f);
  p = fma(p, u, 6.99515278e-3f);
  p = fma(p, u, 3.7331411e-3f);
  p = fma(p, u, -7.89783622e-2f);
  p = fma(p, u, 2.41658176e-1f);
  p = fma(p, u, -4.27185853e-1f);
  p = fma(p, u, 2.55395677e-1f);
  const float square = t * t;
  const float rest = fma(t, t, -square);
  const float tail = p * (exp(-square) * (1.0f - rest));
  return x < 0.0f ? 2.0f - tail : tail;
}""",
    "pw_erf": """
inline float pw_erf(float x) {
  if (fabs(x) > 0.85f) return x < 0.0f ? pw_erfc(-x) - 1.0f : 1.0f - pw_erfc(x);
  const float s = x * x;
  float p = 8.8362445e-5f;
  p = fma(p, s, -8.24428871e-4f);
  p = fma(p, s, 5.20929865e-3f);
  p = fma(p, s, -2.6862482e-2f);
  p = fma(p, s, 1.12837471e-1f);
  p = fma(p, s, -3.76126369e-1f);
  p = fma(p, s, 1.12837917f);
  return x * p;
}""",
    "pw_max": """
// NaN, if one of the numbers is NaN.
template <typename T>
inline T pw_max(T a, T b) { return !(a <= b) && b == b ? a : b; }""",
    "pw_min": """
template <typename T>
inline T pw_min(T a, T b) { return !(a >= b) && b == b ? a : b; }""",
    "pw_fast_erfc": """
// The same with an error of 2e-5, for results of 16 bits.
inline float pw_fast_erfc(float x) {
  const float t = fabs(x) > 10.1f ? 10.1f : fabs(x);
  const float u = fast::divide(t - 2.0f, t + 2.0f);
  float p = 6.11604414e-3f;
  p = fma(p, u, 3.08344268e-3f);
  p = fma(p, u, -7.86635615e-2f);
  p = fma(p, u, 2.41774587e-1f);
  p = fma(p, u, -4.27220959e-1f);
  p = fma(p, u, 2.55393699e-1f);
  const float tail = p * fast::exp(-t * t);
  return x < 0.0f ? 2.0f - tail : tail;
}""",
    "pw_normal": """
// The normal distribution function, as kernels/activation/formulas.h has it: its tail is a polynomial in
// u = (t - 3) / (t + 3) times exp(-t^2 / 2) with t = |x|.
inline float pw_normal(float x) {
  const float t = fabs(x) > 20.0f ? 20.0f : fabs(x);
  const float u = fast::divide(t - 3.0f, t + 3.0f);
  float p = 5.31617334e-05f;
  p = fma(p, u, 1.15013776e-04f);
  p = fma(p, u, -3.39012651e-04f);
  p = fma(p, u, -9.83288395e-04f);
  p = fma(p, u, 2.90438742e-03f);
  p = fma(p, u, 6.13194238e-03f);
  p = fma(p, u, -4.62132618e-02f);
  p = fma(p, u, 1.23225041e-01f);
  p = fma(p, u, -2.06402615e-01f);
  p = fma(p, u, 1.21513948e-01f);
  const float square = t * t;
  const float rest = fma(t, t, -square);
  const float tail = p * (exp(-0.5f * square) * (1.0f - 0.5f * rest));
  return x < 0.0f ? tail : 1.0f - tail;
}""",
    "pw_gelu": """
inline float pw_gelu(float x) { return x * pw_normal(x); }""",
    "pw_gelu_tanh": """
inline float pw_gelu_tanh(float x) { return 0.5f * x * (1.0f + tanh(0.7978846f * (x + 0.044715f * x * x * x))); }""",
    "pw_fast_gelu_tanh": """
// (1 + tanh(v)) / 2 is 1 / (1 + exp(-2 v)), which keeps its relative accuracy where it is small.
inline float pw_fast_gelu_tanh(float x) {
  const float power = x * fma(x * x, -0.10294324f, -2.3022082f);
  return x * fast::divide(1.0f, 1.0f + fast::exp2(power));
}""",
    "pw_fast_tail": """
// The normal distribution function of -t, for t from 0 on. Its logarithm to base 2 is a polynomial that is fitted, up
// to 13, for least error (2e-5 of the result). Behind that it falls on, and from 14.5 on the result is 0 in float32.
inline float pw_fast_tail(float t) {
  float p = -2.01239447e-9f;
  p = fma(p, t, 1.45287714e-7f);
  p = fma(p, t, -4.61732679e-6f);
  p = fma(p, t, 8.55300968e-5f);
  p = fma(p, t, -1.03439775e-3f);
  p = fma(p, t, 8.72331392e-3f);
  p = fma(p, t, -5.40888906e-2f);
  p = fma(p, t, -4.58636284e-1f);
  p = fma(p, t, -1.15105104f);
  p = fma(p, t, -1.00002575f);
  return fast::exp2(p);
}""",
    "pw_fast_normal": """
inline float pw_fast_normal(float x) {
  const float tail = pw_fast_tail(fabs(x));
  return x < 0.0f ? tail : 1.0f - tail;
}""",
    "pw_fast_gelu": """
// max(x, 0) - |x| tail(|x|). Infinity takes no part in the product, which would be NaN; minus infinity does, as with
// PyTorch.
inline float pw_fast_gelu(float x) {
  const float t = fabs(x > 14.5f ? 14.5f : x);
  return fma(-t, pw_fast_tail(t), x <= 0.0f ? 0.0f : x);
}""",
    "pw_fast_tanh": """
// 1 - 2 / (1 + exp(2 x)), or two terms of the series where that would cancel. The error is below 4e-6 of the result.
inline float pw_fast_tanh(float x) {
  const float s = x * x;
  const float large = fma(-2.0f, fast::divide(1.0f, 1.0f + fast::exp2(2.88539008f * x)), 1.0f);
  return s < 0.004f ? fma(x * s, -0.33333333f, x) : large;
}""",
    "pw_fast_sigmoid": """
inline float pw_fast_sigmoid(float x) { return fast::divide(1.0f, 1.0f + fast::exp(-x)); }""",
    "pw_sigmoid": """
inline float pw_sigmoid(float x) { return 1.0f / (1.0f + exp(-x)); }""",
    "pw_softplus": """
inline float pw_softplus(float x) { return x > 20.0f ? x : pw_log1p(exp(x)); }""",
    "pw_hypot": """
inline float pw_hypot(float a, float b) {
  const float x = fabs(a), y = fabs(b);
  if (isinf(x) || isinf(y)) return INFINITY;
  const float large = pw_max(x, y), small = pw_min(x, y);
  const float ratio = small / large;
  return large == 0.0f ? large : large * sqrt(fma(ratio, ratio, 1.0f));
}""",
    "pw_logaddexp": """
inline float pw_logaddexp(float a, float b) {
  return isinf(a) && a == b ? a : pw_max(a, b) + pw_log1p(exp(-fabs(a - b)));
}""",
    "pw_divide": """
// Towards zero, and 0 where the divisor is 0.
template <typename T>
inline T pw_divide(T a, T b) {
  if (b == 0) return T(0);
  return b < 0 && b == T(-1) ? T(T(0) - a) : T(a / b);
}""",
    "pw_modulo": """
// The rest of pw_divide, which has the sign of the dividend.
template <typename T>
inline T pw_modulo(T a, T b) {
  if (b == 0 || (b < 0 && b == T(-1))) return T(0);
  return T(a % b);
}""",
    "pw_floor_divide": """
template <typename T>
inline T pw_floor_divide(T a, T b) {
  const T rest = pw_modulo(a, b);
  return T(pw_divide(a, b) - (rest != 0 && (rest < 0) != (b < 0) ? 1 : 0));
}
inline float pw_floor_divide(float a, float b) {
  if (b == 0.0f) return a / b;
  const float rest = fmod(a, b);
  float quotient = (a - rest) / b;
  if (rest != 0.0f && (b < 0.0f) != (rest < 0.0f)) quotient -= 1.0f;
  if (quotient == 0.0f) return copysign(0.0f, a / b);
  const float whole = floor(quotient);
  return quotient - whole > 0.5f ? whole + 1.0f : whole;
}""",
    "pw_remainder": """
template <typename T>
inline T pw_remainder(T a, T b) {
  const T rest = pw_modulo(a, b);
  return T(rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest);
}
inline float pw_remainder(float a, float b) {
  const float rest = fmod(a, b);
  return rest != 0.0f && (b < 0.0f) != (rest < 0.0f) ? rest + b : rest;
}""",
    "pw_power": """
// By squaring. Negative exponents give 0, unless the base is 1 or -1.
template <typename T, typename U>
inline T pw_power(T base, T exponent) {
  if (exponent < 0) return base == T(1) ? T(1) : base < 0 && base == T(-1) ? (exponent & 1 ? T(-1) : T(1)) : T(0);
  U result = 1, square = U(base);
  for (T left = exponent; left > 0; left = T(left / 2)) {
    if (left & 1) result = U(result * square);
    square = U(square * square);
  }
  return T(result);
}""",
}

# What is as good where the result has 16 bits.
_FAST = {
    "exp": "fast::exp",
    "tanh": "pw_fast_tanh",
    "pw_erfc": "pw_fast_erfc",
    "pw_normal": "pw_fast_normal",
    "pw_gelu": "pw_fast_gelu",
    "pw_gelu_tanh": "pw_fast_gelu_tanh",
    "pw_sigmoid": "pw_fast_sigmoid",
}


def fast(text: str) -> str:
    """Returns a formula's text with functions that are precise enough for results of 16 bits."""
    return re.sub(rf"\b({'|'.join(_FAST)})\(", lambda call: f"{_FAST[call[1]]}(", text)


def used(text: str) -> str:
    """Returns the functions that a text calls, in order, with those that they call."""
    needed: set[str] = set()
    left = [text]
    while left:
        names = FUNCTIONS.keys() & set(re.findall(r"\w+", left.pop()))
        left += [FUNCTIONS[name] for name in names - needed]
        needed |= names
    return "".join(f"{FUNCTIONS[name]}\n" for name in FUNCTIONS if name in needed)
