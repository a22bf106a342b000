// MSL's math functions in metal, metal::fast and metal::precise (which are the same here: all are precise). Functions
// of one argument are overloads on float and half, as in MSL; a function of several arguments takes any mixture (see
// values.h).
#pragma once

#include "metal/values.h"
#include "target/math.h"

namespace metal {

#define MSL_UNARY(name)                                                                                    \
  METAL_MATH float name(float x) { return msl::math::name(x); }                                            \
  METAL_MATH half name(half x) { return half(msl::math::name(float(x))); }                                 \
  template <class T, int N>                                                                                \
  METAL_MATH vec<T, N> name(const vec<T, N>& v) {                                                          \
    return msl::map(v, [](T x) METAL_LAMBDA { return T(msl::math::name(float(x))); });                     \
  }                                                                                                        \
  template <class T, int N>                                                                                \
  METAL_MATH vec<T, N> name(const packed_vec<T, N>& v) {                                                   \
    return name(msl::unpacked(v));                                                                         \
  }
MSL_UNARY(acos) MSL_UNARY(acosh) MSL_UNARY(asin) MSL_UNARY(asinh) MSL_UNARY(atan) MSL_UNARY(atanh)
MSL_UNARY(ceil) MSL_UNARY(cos) MSL_UNARY(cosh) MSL_UNARY(cospi) MSL_UNARY(exp) MSL_UNARY(exp10) MSL_UNARY(exp2)
MSL_UNARY(floor) MSL_UNARY(fract) MSL_UNARY(log) MSL_UNARY(log10) MSL_UNARY(log2) MSL_UNARY(rint) MSL_UNARY(round)
MSL_UNARY(rsqrt) MSL_UNARY(sin) MSL_UNARY(sinh) MSL_UNARY(sinpi) MSL_UNARY(sqrt) MSL_UNARY(tan) MSL_UNARY(tanh)
MSL_UNARY(tanpi) MSL_UNARY(trunc)
#undef MSL_UNARY

// Functions that also return something through their second argument: name(x, thread T& out).
#define MSL_WITH_OUTPUT(name, Out)                                                                          \
  METAL_MATH float name(float x, Out(float) & out) { return msl::math::name(x, out); }                     \
  METAL_MATH half name(half x, Out(half) & out) {                                                          \
    Out(float) wide;                                                                                        \
    half result = msl::math::name(float(x), wide);                                                          \
    out = Out(half)(wide);                                                                                  \
    return result;                                                                                          \
  }                                                                                                         \
  template <class T>                                                                                        \
  METAL_MATH vec<T, 2> name(const vec<T, 2>& v, vec<Out(T), 2>& out) {                                     \
    return {name(v.x, out.x), name(v.y, out.y)};                                                            \
  }                                                                                                         \
  template <class T>                                                                                        \
  METAL_MATH vec<T, 3> name(const vec<T, 3>& v, vec<Out(T), 3>& out) {                                     \
    return {name(v.x, out.x), name(v.y, out.y), name(v.z, out.z)};                                          \
  }                                                                                                         \
  template <class T>                                                                                        \
  METAL_MATH vec<T, 4> name(const vec<T, 4>& v, vec<Out(T), 4>& out) {                                     \
    return {name(v.x, out.x), name(v.y, out.y), name(v.z, out.z), name(v.w, out.w)};                        \
  }
#define MSL_SAME(T) T
#define MSL_INT(T) int
MSL_WITH_OUTPUT(sincos, MSL_SAME) MSL_WITH_OUTPUT(modf, MSL_SAME) MSL_WITH_OUTPUT(frexp, MSL_INT)
#undef MSL_INT
#undef MSL_SAME
#undef MSL_WITH_OUTPUT

METAL_MATH int ilogb(float x) { return msl::math::ilogb(x); }
METAL_MATH int ilogb(half x) { return msl::math::ilogb(float(x)); }
template <class T, int N>
METAL_MATH vec<int, N> ilogb(const vec<T, N>& v) {
  return msl::map(v, [](T x) METAL_LAMBDA { return msl::math::ilogb(float(x)); });
}

template <class X, class K, class V = msl::floating_t<X>, class T = msl::element_t<V>>
METAL_MATH V ldexp(const X& x, const K& k) {
  using Exponent = msl::value_t<int, msl::width_v<V>>;
  return msl::map_all([](T v, int n) METAL_LAMBDA { return T(msl::math::ldexp(float(v), n)); }, V(x), Exponent(k));
}

// The next value in the argument's own type.
METAL_MATH float nextafter(float x, float y) { return msl::math::nextafter(x, y); }
template <class F>
METAL_MATH msl::small_float<F> nextafter(msl::small_float<F> x, msl::small_float<F> y) {
  using T = msl::small_float<F>;
  if (x != x || y != y) return x + y;
  if (x == y) return y;
  if (x == 0) return T::from_bits(uint16_t((y.bits & 0x8000) | 1));
  return T::from_bits(uint16_t((x < y) == (x > 0) ? x.bits + 1 : x.bits - 1));
}
template <class T, int N>
METAL_MATH vec<T, N> nextafter(const vec<T, N>& x, const vec<T, N>& y) {
  return msl::map_pairs<T>(x, y, [](T a, T b) METAL_LAMBDA { return nextafter(a, b); });
}

METAL_FUNC constexpr float fabs(float x) { return msl::math::abs(x); }
template <class F>
METAL_FUNC constexpr msl::small_float<F> fabs(msl::small_float<F> x) {
  return msl::small_float<F>::from_bits(x.bits & 0x7fff);
}
template <class T, int N>
METAL_FUNC constexpr vec<T, N> fabs(const vec<T, N>& v) {
  return msl::map(v, [](T x) METAL_LAMBDA { return fabs(x); });
}

template <class T, int N>
METAL_FUNC constexpr vec<T, N> fabs(const packed_vec<T, N>& v) {
  return fabs(msl::unpacked(v));
}

// abs is fabs for floating point. An integer's absolute value keeps its type, and that of the least integer wraps
// around.
METAL_FUNC constexpr float abs(float x) { return fabs(x); }
template <class F>
METAL_FUNC constexpr msl::small_float<F> abs(msl::small_float<F> x) {
  return fabs(x);
}
#define MSL_ABS(T) \
  METAL_FUNC constexpr T abs(T x) { return (T)(x < 0 ? 0 - x : x); }
MSL_ABS(signed char) MSL_ABS(char) MSL_ABS(short) MSL_ABS(int) MSL_ABS(long) MSL_ABS(long long)
#undef MSL_ABS
#define MSL_ABS(T) \
  METAL_FUNC constexpr T abs(T x) { return x; }
MSL_ABS(uchar) MSL_ABS(ushort) MSL_ABS(uint) MSL_ABS(ulong) MSL_ABS(unsigned long long)
#undef MSL_ABS
template <class T, int N>
METAL_FUNC constexpr vec<T, N> abs(const vec<T, N>& v) {
  return msl::map(v, [](T x) METAL_LAMBDA { return abs(x); });
}
template <class T, int N>
METAL_FUNC constexpr vec<T, N> abs(const packed_vec<T, N>& v) {
  return abs(msl::unpacked(v));
}

// Defines name(a, b, ...) by a function of floats. Results for half and bfloat are computed in float and rounded once.
#define MSL_FLOATING(name)                                                                                  \
  template <class A, class... Rest, class V = msl::common_floating_t<A, Rest...>,                           \
            class T = msl::element_t<V>>                                                                    \
  METAL_MATH V name(const A& a, const Rest&... rest) {                                                     \
    return msl::map_all(                                                                                    \
        [](auto... x) METAL_LAMBDA->decltype(T(msl::math::name(float(x)...))) {                             \
          return T(msl::math::name(float(x)...));                                                           \
        },                                                                                                  \
        V(a), V(rest)...);                                                                                  \
  }
MSL_FLOATING(atan2) MSL_FLOATING(copysign) MSL_FLOATING(fdim) MSL_FLOATING(fma) MSL_FLOATING(fmod)
MSL_FLOATING(pow) MSL_FLOATING(powr)
#undef MSL_FLOATING

template <class A, class B, class V = msl::common_floating_t<A, B>>
METAL_MATH V divide(const A& a, const B& b) {
  return V(a) / V(b);
}

}  // namespace metal
