// Geometric functions. Sums over half and bfloat vectors are computed in float.
#pragma once

#include "metal/common.h"

namespace msl {

// The type in which sums over elements of T are computed.
template <class T>
using sum_t = std::conditional_t<is_small_float<T>::value, float, T>;

template <class T>
METAL_FUNC constexpr sum_t<T> sum_of_products(const metal::vec<T, 2>& a, const metal::vec<T, 2>& b) {
  using S = sum_t<T>;
  return S(a.x) * S(b.x) + S(a.y) * S(b.y);
}
template <class T>
METAL_FUNC constexpr sum_t<T> sum_of_products(const metal::vec<T, 3>& a, const metal::vec<T, 3>& b) {
  using S = sum_t<T>;
  return S(a.x) * S(b.x) + S(a.y) * S(b.y) + S(a.z) * S(b.z);
}
template <class T>
METAL_FUNC constexpr sum_t<T> sum_of_products(const metal::vec<T, 4>& a, const metal::vec<T, 4>& b) {
  using S = sum_t<T>;
  return S(a.x) * S(b.x) + S(a.y) * S(b.y) + S(a.z) * S(b.z) + S(a.w) * S(b.w);
}

template <class V>
using vectors_only = std::enable_if_t<(width_v<V> > 1)>;

}  // namespace msl

namespace metal {

template <class A, class B, class V = msl::common_t<A, B>, class = msl::vectors_only<V>>
METAL_FUNC constexpr msl::element_t<V> dot(const A& a, const B& b) {
  return msl::element_t<V>(msl::sum_of_products(V(a), V(b)));
}
template <class X, class V = msl::plain_t<X>, class = msl::vectors_only<V>>
METAL_FUNC constexpr msl::element_t<V> length_squared(const X& x) {
  return dot(V(x), V(x));
}
template <class X, class V = msl::plain_t<X>, class = msl::vectors_only<V>>
METAL_MATH msl::element_t<V> length(const X& x) {
  return msl::element_t<V>(msl::math::sqrt(msl::sum_of_products(V(x), V(x))));
}
template <class A, class B, class V = msl::common_t<A, B>, class = msl::vectors_only<V>>
METAL_MATH msl::element_t<V> distance(const A& a, const B& b) {
  return length(V(a) - V(b));
}
template <class A, class B, class V = msl::common_t<A, B>, class = msl::vectors_only<V>>
METAL_FUNC constexpr msl::element_t<V> distance_squared(const A& a, const B& b) {
  return length_squared(V(a) - V(b));
}
template <class X, class V = msl::plain_t<X>, class = msl::vectors_only<V>>
METAL_MATH V normalize(const X& x) {
  float scale = msl::math::rsqrt(float(msl::sum_of_products(V(x), V(x))));
  return msl::map(V(x), [=](msl::element_t<V> v) METAL_LAMBDA { return msl::element_t<V>(float(v) * scale); });
}
template <class A, class B, class V = msl::common_t<A, B>, class = std::enable_if_t<msl::width_v<V> == 3>>
METAL_FUNC constexpr V cross(const A& a, const B& b) {
  V p(a), q(b);
  return V(p.y * q.z - p.z * q.y, p.z * q.x - p.x * q.z, p.x * q.y - p.y * q.x);
}
template <class N, class I, class R, class V = msl::common_t<N, I, R>, class = msl::vectors_only<V>>
METAL_FUNC constexpr V faceforward(const N& n, const I& i, const R& reference) {
  return dot(V(reference), V(i)) < 0 ? V(n) : -V(n);
}
template <class I, class N, class V = msl::common_t<I, N>, class = msl::vectors_only<V>>
METAL_FUNC constexpr V reflect(const I& i, const N& n) {
  using T = msl::element_t<V>;
  return V(i) - V(T(2) * dot(V(n), V(i))) * V(n);
}
template <class I, class N, class E, class V = msl::common_t<I, N>, class = msl::vectors_only<V>>
METAL_MATH V refract(const I& i, const N& n, E ratio) {
  using T = msl::element_t<V>;
  float eta = float(ratio), cosine = float(dot(V(n), V(i)));
  float k = 1.0f - eta * eta * (1.0f - cosine * cosine);
  return k < 0.0f ? V(T(0)) : V(T(eta)) * V(i) - V(T(eta * cosine + msl::math::sqrt(k))) * V(n);
}

namespace fast {
using metal::cross;
using metal::distance;
using metal::distance_squared;
using metal::dot;
using metal::length;
using metal::length_squared;
using metal::normalize;
}  // namespace fast
namespace precise {
using metal::cross;
using metal::distance;
using metal::distance_squared;
using metal::dot;
using metal::length;
using metal::length_squared;
using metal::normalize;
}  // namespace precise

}  // namespace metal
