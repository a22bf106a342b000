// The types of mixed arguments of a function: scalars are converted to their common type, a scalar beside a vector to
// the vector's element type, and packed vectors and swizzles count as vectors.
#pragma once

#include "metal/types.h"

namespace msl {

// The shape of an argument: its element type and width (1 for a scalar). Other types have no member `element`, so that
// overload resolution ignores these headers' functions for a user's own types.
template <class T, class = void>
struct value_traits {};
template <class T>
struct value_traits<T, std::enable_if_t<is_scalar_v<T>>> {
  using element = T;
  static constexpr int width = 1;
};
template <class T, int N>
struct value_traits<metal::vec<T, N>> {
  using element = T;
  static constexpr int width = N;
};
template <class T, int N>
struct value_traits<metal::packed_vec<T, N>> : value_traits<metal::vec<T, N>> {};
template <class V, int... I>
struct value_traits<swizzle_reference<V, I...>> : value_traits<typename swizzle_reference<V, I...>::value_type> {};

template <class T>
using element_t = typename value_traits<T>::element;
template <class T>
constexpr int width_v = value_traits<T>::width;

template <class T, int N>
struct value_of {
  using type = metal::vec<T, N>;
};
template <class T>
struct value_of<T, 1> {
  using type = T;
};
template <class T, int N>
using value_t = typename value_of<T, N>::type;

// The components that an argument gives to a vector's constructor.
template <class T, class = void>
constexpr int components_v = 1;
template <class T>
constexpr int components_v<T, std::void_t<typename value_traits<T>::element>> = width_v<T>;

// The vector V of these arguments, which must give all of its components (see dialect.py).
template <class V, class... A>
METAL_FUNC constexpr V complete(A... arguments) {
  static_assert((components_v<A> + ...) >= components_v<V>, "too few components for this vector");
  return V(arguments...);
}

// The vector or scalar that T stands for: itself, or vec for packed vectors and swizzles.
template <class T>
using plain_t = value_t<element_t<T>, width_v<T>>;

// The common type of two scalars.
template <class A, class B>
struct common_scalar {
  using type = decltype(A() + B());
};
template <class A>
struct common_scalar<A, A> {
  using type = A;
};

template <class A, class B, int WidthA, int WidthB>
struct common_value {};
template <class A, class B, int N>
struct common_value<A, B, N, 1> {
  using type = A;
};
template <class A, class B, int N>
struct common_value<A, B, 1, N> {
  using type = value_t<element_t<B>, N>;
};
template <class A, class B>
struct common_value<A, B, 1, 1> : common_scalar<A, B> {};
template <class A, int N>
struct common_value<A, A, N, N> {
  using type = A;
};
template <class A>
struct common_value<A, A, 1, 1> {
  using type = A;
};

// It has no member `type` where the arguments have no common type.
template <class Void, class A, class... Rest>
struct common_of {};
template <class A>
struct common_of<std::void_t<element_t<A>>, A> {
  using type = plain_t<A>;
};
template <class A, class B>
using common_pair_t = typename common_value<plain_t<A>, plain_t<B>, width_v<A>, width_v<B>>::type;
template <class A, class B, class... Rest>
struct common_of<std::void_t<common_pair_t<A, B>>, A, B, Rest...> : common_of<void, common_pair_t<A, B>, Rest...> {};

// The result type of a function of these arguments.
template <class... A>
using common_t = typename common_of<void, A...>::type;

// The same for functions defined on floating point only: integers count as float.
template <class T>
using floating_scalar_t = std::conditional_t<std::is_integral_v<T> || std::is_enum_v<T>, float, T>;
template <class V>
using floating_t = value_t<floating_scalar_t<element_t<V>>, width_v<V>>;
template <class... A>
using common_floating_t = floating_t<common_t<A...>>;

// Applies f to the elements of arguments that have all been converted to V.
template <class F, class T, class... Rest, class = std::enable_if_t<is_scalar_v<T>>>
METAL_FUNC constexpr auto map_all(F f, const T& a, const Rest&... rest) {
  return f(a, rest...);
}
template <class F, class T, class... Rest>
METAL_FUNC constexpr auto map_all(F f, in<metal::vec<T, 2>> a, const Rest&... rest) {
  return metal::vec<decltype(f(a.x, rest.x...)), 2>(f(a.x, rest.x...), f(a.y, rest.y...));
}
template <class F, class T, class... Rest>
METAL_FUNC constexpr auto map_all(F f, in<metal::vec<T, 3>> a, const Rest&... rest) {
  return metal::vec<decltype(f(a.x, rest.x...)), 3>(f(a.x, rest.x...), f(a.y, rest.y...), f(a.z, rest.z...));
}
template <class F, class T, class... Rest>
METAL_FUNC constexpr auto map_all(F f, in<metal::vec<T, 4>> a, const Rest&... rest) {
  return metal::vec<decltype(f(a.x, rest.x...)), 4>(f(a.x, rest.x...), f(a.y, rest.y...), f(a.z, rest.z...),
                                                    f(a.w, rest.w...));
}

}  // namespace msl
