// Minimum, maximum and the common functions: clamp, mix, saturate, sign, smoothstep, step, select.
#pragma once

#include "metal/lane_operations.h"
#include "metal/math.h"

namespace msl {

// Removes a template from overload resolution where the argument is not a number.
template <class V>
using floating_only = std::enable_if_t<!std::is_integral_v<element_t<V>>>;

}  // namespace msl

namespace metal {

template <class A, class B, class V = msl::common_t<A, B>>
METAL_FUNC constexpr V min(const A& a, const B& b) {
  return msl::map_all(msl::Min(), V(a), V(b));
}
template <class A, class B, class V = msl::common_t<A, B>>
METAL_FUNC constexpr V max(const A& a, const B& b) {
  return msl::map_all(msl::Max(), V(a), V(b));
}
template <class A, class B, class V = msl::common_floating_t<A, B>>
METAL_FUNC constexpr V fmin(const A& a, const B& b) {
  return msl::map_all(msl::Min(), V(a), V(b));
}
template <class A, class B, class V = msl::common_floating_t<A, B>>
METAL_FUNC constexpr V fmax(const A& a, const B& b) {
  return msl::map_all(msl::Max(), V(a), V(b));
}

#define MSL_OF_THREE(prefix)                                                              \
  template <class A, class B, class C, class V = msl::common_t<A, B, C>>                  \
  METAL_FUNC constexpr V prefix##min3(const A& a, const B& b, const C& c) {               \
    return min(min(V(a), V(b)), V(c));                                                    \
  }                                                                                       \
  template <class A, class B, class C, class V = msl::common_t<A, B, C>>                  \
  METAL_FUNC constexpr V prefix##max3(const A& a, const B& b, const C& c) {               \
    return max(max(V(a), V(b)), V(c));                                                    \
  }
MSL_OF_THREE()
MSL_OF_THREE(f)
#undef MSL_OF_THREE

template <class A, class B, class C, class V = msl::common_t<A, B, C>>
METAL_FUNC constexpr V median3(const A& a, const B& b, const C& c) {
  return max(min(V(a), V(b)), min(max(V(a), V(b)), V(c)));
}
template <class A, class B, class C, class V = msl::common_t<A, B, C>>
METAL_FUNC constexpr V fmedian3(const A& a, const B& b, const C& c) {
  return median3(V(a), V(b), V(c));
}

template <class X, class A, class B, class V = msl::common_t<X, A, B>>
METAL_FUNC constexpr V clamp(const X& x, const A& low, const B& high) {
  return min(max(V(x), V(low)), V(high));
}

template <class X, class V = msl::plain_t<X>, class = msl::floating_only<V>>
METAL_FUNC constexpr V saturate(const X& x) {
  return clamp(V(x), V(0.0f), V(1.0f));
}

template <class A, class B, class C, class V = msl::common_floating_t<A, B, C>>
METAL_FUNC constexpr V mix(const A& a, const B& b, const C& c) {
  return V(V(a) + (V(b) - V(a)) * V(c));
}

template <class X, class V = msl::plain_t<X>, class = msl::floating_only<V>>
METAL_FUNC constexpr V sign(const X& x) {
  using T = msl::element_t<V>;
  // Zero keeps its sign; a NaN gives zero.
  return msl::map_all([](T v) METAL_LAMBDA { return T(v > 0 ? T(1) : v < 0 ? T(-1) : v == 0 ? v : T(0)); }, V(x));
}

template <class A, class B, class X, class V = msl::common_floating_t<A, B, X>>
METAL_FUNC constexpr V smoothstep(const A& edge0, const B& edge1, const X& x) {
  V t = saturate(V((V(x) - V(edge0)) / (V(edge1) - V(edge0))));
  return V(t * t * (V(3.0f) - V(2.0f) * t));
}

template <class A, class X, class V = msl::common_floating_t<A, X>>
METAL_FUNC constexpr V step(const A& edge, const X& x) {
  using T = msl::element_t<V>;
  return msl::map_all([](T e, T v) METAL_LAMBDA { return v < e ? T(0) : T(1); }, V(edge), V(x));
}

// Gives b where the condition is true, else a, element by element for a vector of conditions.
template <class A, class B, class V = msl::common_t<A, B>>
METAL_FUNC constexpr V select(const A& a, const B& b, bool condition) {
  return condition ? V(b) : V(a);
}
template <class A, class B, int N, class T = msl::element_t<msl::common_t<A, B>>>
METAL_FUNC constexpr vec<T, N> select(const A& a, const B& b, const vec<bool, N>& condition) {
  return msl::map_all([](bool c, T x, T y) METAL_LAMBDA { return c ? y : x; }, condition, vec<T, N>(a), vec<T, N>(b));
}

}  // namespace metal
