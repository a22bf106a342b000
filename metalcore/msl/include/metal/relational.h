// Relational functions: all, any, and the classification of floats. The classification tests bits, so it does not
// depend on what the compiler assumes about NaN.
#pragma once

#include "metal/values.h"

namespace msl {

template <class T>
struct float_bits {
  static constexpr uint32_t sign = 0x80000000u, infinity = 0x7f800000u, least_normal = 0x00800000u;
};
template <>
struct float_bits<half> {
  static constexpr uint32_t sign = 0x8000u, infinity = 0x7c00u, least_normal = 0x0400u;
};
template <>
struct float_bits<bfloat> {
  static constexpr uint32_t sign = 0x8000u, infinity = 0x7f80u, least_normal = 0x0080u;
};

METAL_FUNC constexpr uint32_t bits_of(float x) { return bit_cast<uint32_t>(x); }
template <class F>
METAL_FUNC constexpr uint32_t bits_of(small_float<F> x) {
  return x.bits;
}

// A float's bits, and the limits with which they are compared.
template <class T>
struct Classified : float_bits<T> {
  uint32_t bits, magnitude;
  METAL_FUNC constexpr explicit Classified(T x) : bits(bits_of(x)), magnitude(bits & ~float_bits<T>::sign) {}
};

}  // namespace msl

namespace metal {

#define MSL_CLASSIFY(name, expression)                                          \
  METAL_FUNC constexpr bool name(float x) {                                     \
    msl::Classified<float> c(x);                                                \
    return expression;                                                          \
  }                                                                             \
  template <class F>                                                            \
  METAL_FUNC constexpr bool name(msl::small_float<F> x) {                       \
    msl::Classified<msl::small_float<F>> c(x);                                  \
    return expression;                                                          \
  }                                                                             \
  template <class T, int N>                                                     \
  METAL_FUNC constexpr vec<bool, N> name(const vec<T, N>& v) {                  \
    return msl::map(v, [](T x) METAL_LAMBDA { return name(x); });               \
  }                                                                             \
  template <class T, int N>                                                     \
  METAL_FUNC constexpr vec<bool, N> name(const packed_vec<T, N>& v) {           \
    return name(msl::unpacked(v));                                              \
  }
MSL_CLASSIFY(isfinite, c.magnitude < c.infinity)
MSL_CLASSIFY(isinf, c.magnitude == c.infinity)
MSL_CLASSIFY(isnan, c.magnitude > c.infinity)
MSL_CLASSIFY(isnormal, c.magnitude >= c.least_normal && c.magnitude < c.infinity)
MSL_CLASSIFY(signbit, (c.bits & c.sign) != 0)
#undef MSL_CLASSIFY

template <class A, class B, class V = msl::common_floating_t<A, B>>
METAL_FUNC constexpr auto isunordered(const A& a, const B& b) {
  return msl::map_all([](auto x, auto y) METAL_LAMBDA { return isnan(x) || isnan(y); }, V(a), V(b));
}
template <class A, class B, class V = msl::common_floating_t<A, B>>
METAL_FUNC constexpr auto isordered(const A& a, const B& b) {
  return msl::map_all([](auto x, auto y) METAL_LAMBDA { return !isnan(x) && !isnan(y); }, V(a), V(b));
}

METAL_FUNC constexpr bool all(bool x) { return x; }
METAL_FUNC constexpr bool any(bool x) { return x; }
METAL_FUNC constexpr bool all(const bool2& v) { return v.x && v.y; }
METAL_FUNC constexpr bool any(const bool2& v) { return v.x || v.y; }
METAL_FUNC constexpr bool all(const bool3& v) { return v.x && v.y && v.z; }
METAL_FUNC constexpr bool any(const bool3& v) { return v.x || v.y || v.z; }
METAL_FUNC constexpr bool all(const bool4& v) { return v.x && v.y && v.z && v.w; }
METAL_FUNC constexpr bool any(const bool4& v) { return v.x || v.y || v.z || v.w; }

}  // namespace metal
