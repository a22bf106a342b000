// vec<T, N>: two, three or four elements (and more, below) with MSL's size and alignment (three elements take the room
// of four). Members x y z w and r g b a name the same elements; longer swizzles are calls (see the end).
#pragma once

#include "metal/small_float.h"

namespace metal {

template <class T, int N>
struct vec;
template <class T, int N>
struct packed_vec;

}  // namespace metal

namespace msl {

template <int... I, class V>
METAL_FUNC constexpr auto read_swizzle(const V& v);
template <class V, int... I>
struct swizzle_reference;

// Names a swizzle where the program also has a struct with a member of that name.
template <char... C>
struct components {
  static constexpr int index(char name) {
    return name == 'x' || name == 'r' ? 0 : name == 'y' || name == 'g' ? 1 : name == 'z' || name == 'b' ? 2 : 3;
  }
};

// Calls f on each element and makes a vector of the results.
template <class F, class T>
METAL_FUNC constexpr auto map(in<metal::vec<T, 2>> v, F f) {
  return metal::vec<decltype(f(v.x)), 2>(f(v.x), f(v.y));
}
template <class F, class T>
METAL_FUNC constexpr auto map(in<metal::vec<T, 3>> v, F f) {
  return metal::vec<decltype(f(v.x)), 3>(f(v.x), f(v.y), f(v.z));
}
template <class F, class T>
METAL_FUNC constexpr auto map(in<metal::vec<T, 4>> v, F f) {
  return metal::vec<decltype(f(v.x)), 4>(f(v.x), f(v.y), f(v.z), f(v.w));
}

// Gives f(a, b) for each pair of elements, as vec<R, N>.
template <class R, class F, class T, class U>
METAL_FUNC constexpr metal::vec<R, 2> map_pairs(in<metal::vec<T, 2>> a, in<metal::vec<U, 2>> b, F f) {
  return {R(f(a.x, b.x)), R(f(a.y, b.y))};
}
template <class R, class F, class T, class U>
METAL_FUNC constexpr metal::vec<R, 3> map_pairs(in<metal::vec<T, 3>> a, in<metal::vec<U, 3>> b, F f) {
  return {R(f(a.x, b.x)), R(f(a.y, b.y)), R(f(a.z, b.z))};
}
template <class R, class F, class T, class U>
METAL_FUNC constexpr metal::vec<R, 4> map_pairs(in<metal::vec<T, 4>> a, in<metal::vec<U, 4>> b, F f) {
  return {R(f(a.x, b.x)), R(f(a.y, b.y)), R(f(a.z, b.z)), R(f(a.w, b.w))};
}

// The same for other widths (see the end of this file).
template <class F, class T, int N>
METAL_FUNC constexpr auto map(in<metal::vec<T, N>> v, F f) {
  metal::vec<decltype(f(v[0])), N> result{};
  for (int i = 0; i < N; ++i) result[i] = f(v[i]);
  return result;
}
template <class R, class F, class T, class U, int N>
METAL_FUNC constexpr metal::vec<R, N> map_pairs(in<metal::vec<T, N>> a, in<metal::vec<U, N>> b, F f) {
  metal::vec<R, N> result{};
  for (int i = 0; i < N; ++i) result[i] = R(f(a[i], b[i]));
  return result;
}

// The operators of vec<T, N>, which argument-dependent lookup finds. They are no templates, so a scalar or a packed
// vector on either side converts. An operator that T lacks is an error only where it is used.
template <class T, int N>
struct vec_operators {
  using V = metal::vec<T, N>;
  using B = metal::vec<bool, N>;

#define MSL_BINARY(op)                                                                                       \
  friend METAL_FUNC constexpr V operator op(in<V> a, in<V> b) {                                              \
    return map_pairs<T>(a, b, [](T p, T q) METAL_LAMBDA { return p op q; });                                 \
  }                                                                                                          \
  friend METAL_FUNC constexpr V& operator op##=(V& a, in<V> b) { return a = a op b; }
#define MSL_COMPARE(op)                                                                                      \
  friend METAL_FUNC constexpr B operator op(in<V> a, in<V> b) {                                              \
    return map_pairs<bool>(a, b, [](T p, T q) METAL_LAMBDA { return p op q; });                              \
  }
// What a target computes by pairs of elements (target/pairs.h).
#define MSL_PAIRED(op, function)                                                                             \
  friend METAL_FUNC constexpr V operator op(in<V> a, in<V> b) {                                              \
    if constexpr (has_pairs<T> && N % 2 == 0)                                                                \
      if (!__builtin_is_constant_evaluated()) return function(a, b);                                         \
    return map_pairs<T>(a, b, [](T p, T q) METAL_LAMBDA { return p op q; });                                 \
  }                                                                                                          \
  friend METAL_FUNC constexpr V& operator op##=(V& a, in<V> b) { return a = a op b; }
  MSL_PAIRED(+, sums_of_pairs) MSL_PAIRED(-, differences_of_pairs) MSL_PAIRED(*, products_of_pairs)
  MSL_BINARY(/) MSL_BINARY(%)
  MSL_BINARY(&) MSL_BINARY(|) MSL_BINARY(^) MSL_BINARY(<<) MSL_BINARY(>>)
  MSL_COMPARE(==) MSL_COMPARE(!=) MSL_COMPARE(<) MSL_COMPARE(<=) MSL_COMPARE(>) MSL_COMPARE(>=)
  MSL_COMPARE(&&) MSL_COMPARE(||)
#undef MSL_COMPARE
#undef MSL_PAIRED
#undef MSL_BINARY

  friend METAL_FUNC constexpr V operator+(in<V> v) { return v; }
  friend METAL_FUNC constexpr V operator-(in<V> v) {
    return map(v, [](T p) METAL_LAMBDA { return T(-p); });
  }
  friend METAL_FUNC constexpr V operator~(in<V> v) {
    return map(v, [](T p) METAL_LAMBDA { return T(~p); });
  }
  friend METAL_FUNC constexpr B operator!(in<V> v) {
    return map(v, [](T p) METAL_LAMBDA { return !p; });
  }
  friend METAL_FUNC constexpr V& operator++(V& v) { return v = v + V(T(1)); }
  friend METAL_FUNC constexpr V& operator--(V& v) { return v = v - V(T(1)); }
  friend METAL_FUNC constexpr V operator++(V& v, int) {
    V old = v;
    ++v;
    return old;
  }
  friend METAL_FUNC constexpr V operator--(V& v, int) {
    V old = v;
    --v;
    return old;
  }
};

}  // namespace msl

// The translator's names for swizzles, for vectors, packed or not.
#define MSL_SWIZZLES(type)                                                                                   \
  template <int... I>                                                                                        \
  METAL_FUNC constexpr auto swizzle() const {                                                                \
    return msl::read_swizzle<I...>(*this);                                                                   \
  }                                                                                                          \
  template <int... I>                                                                                        \
  METAL_FUNC constexpr msl::swizzle_reference<type, I...> swizzle_ref() {                                    \
    return {*this};                                                                                          \
  }                                                                                                          \
  template <char... C>                                                                                       \
  METAL_FUNC constexpr auto swizzle(msl::components<C...>) const {                                           \
    return swizzle<msl::components<C...>::index(C)...>();                                                    \
  }                                                                                                          \
  template <char... C>                                                                                       \
  METAL_FUNC constexpr auto swizzle_ref(msl::components<C...>) {                                             \
    return swizzle_ref<msl::components<C...>::index(C)...>();                                                \
  }

// The members of vec<T, N> for every N. An element is accessed by address, except in constant expressions, which may
// name members only.
#define MSL_VEC_COMMON(type, N)                                                                              \
  using element_type = T;                                                                                    \
  type() = default;                                                                                          \
  template <class S, class = std::enable_if_t<msl::is_scalar_v<S>>>                                          \
  METAL_FUNC constexpr type(S s) : type(T(s), msl::splat) {}                                                 \
  METAL_FUNC constexpr T& operator[](size_t i) {                                                             \
    MSL_CHECK_INDEX(i, N);                                                                                   \
    if (__builtin_is_constant_evaluated()) return *member(i);                                                \
    return reinterpret_cast<T*>(this)[i];                                                                    \
  }                                                                                                          \
  METAL_FUNC constexpr const T& operator[](size_t i) const {                                                 \
    MSL_CHECK_INDEX(i, N);                                                                                   \
    if (__builtin_is_constant_evaluated()) return *const_cast<type*>(this)->member(i);                       \
    return reinterpret_cast<const T*>(this)[i];                                                              \
  }                                                                                                          \
  MSL_SWIZZLES(type)

namespace msl {
struct Splat {};
constexpr Splat splat;
}  // namespace msl

namespace metal {

template <class T>
struct alignas(2 * sizeof(T)) vec<T, 2> : msl::vec_operators<T, 2> {
  union { T x, r; };
  union { T y, g; };

  MSL_VEC_COMMON(vec, 2)
  METAL_FUNC constexpr vec(T s, msl::Splat) : x(s), y(s) {}
  METAL_FUNC constexpr vec(T x, T y) : x(x), y(y) {}
  template <class U, class = std::enable_if_t<!std::is_same_v<T, U>>>
  METAL_FUNC explicit constexpr vec(msl::in<vec<U, 2>> v) : x(T(v.x)), y(T(v.y)) {}
  template <class U, class = std::enable_if_t<!std::is_same_v<T, U>>>
  METAL_FUNC explicit constexpr vec(const packed_vec<U, 2>& v) : vec(vec<U, 2>(v)) {}

 private:
  METAL_FUNC constexpr T* member(size_t i) { return i == 0 ? &x : &y; }
};

template <class T>
struct alignas(4 * sizeof(T)) vec<T, 3> : msl::vec_operators<T, 3> {
  union { T x, r; };
  union { T y, g; };
  union { T z, b; };

  MSL_VEC_COMMON(vec, 3)
  METAL_FUNC constexpr vec(T s, msl::Splat) : x(s), y(s), z(s) {}
  METAL_FUNC constexpr vec(T x, T y, T z = T()) : x(x), y(y), z(z) {}  // elements left out of {…} are zero
  METAL_FUNC constexpr vec(const vec<T, 2>& v, T z) : x(v.x), y(v.y), z(z) {}
  METAL_FUNC constexpr vec(T x, const vec<T, 2>& v) : x(x), y(v.x), z(v.y) {}
  template <class U, class = std::enable_if_t<!std::is_same_v<T, U>>>
  METAL_FUNC explicit constexpr vec(msl::in<vec<U, 3>> v) : x(T(v.x)), y(T(v.y)), z(T(v.z)) {}
  template <class U, class = std::enable_if_t<!std::is_same_v<T, U>>>
  METAL_FUNC explicit constexpr vec(const packed_vec<U, 3>& v) : vec(vec<U, 3>(v)) {}

 private:
  METAL_FUNC constexpr T* member(size_t i) { return i == 0 ? &x : i == 1 ? &y : &z; }
};

template <class T>
struct alignas(4 * sizeof(T)) vec<T, 4> : msl::vec_operators<T, 4> {
  union { T x, r; };
  union { T y, g; };
  union { T z, b; };
  union { T w, a; };

  MSL_VEC_COMMON(vec, 4)
  METAL_FUNC constexpr vec(T s, msl::Splat) : x(s), y(s), z(s), w(s) {}
  METAL_FUNC constexpr vec(T x, T y, T z = T(), T w = T()) : x(x), y(y), z(z), w(w) {}
  METAL_FUNC constexpr vec(const vec<T, 2>& v, T z, T w) : x(v.x), y(v.y), z(z), w(w) {}
  METAL_FUNC constexpr vec(T x, const vec<T, 2>& v, T w) : x(x), y(v.x), z(v.y), w(w) {}
  METAL_FUNC constexpr vec(T x, T y, const vec<T, 2>& v) : x(x), y(y), z(v.x), w(v.y) {}
  METAL_FUNC constexpr vec(const vec<T, 2>& u, const vec<T, 2>& v) : x(u.x), y(u.y), z(v.x), w(v.y) {}
  METAL_FUNC constexpr vec(const vec<T, 3>& v, T w) : x(v.x), y(v.y), z(v.z), w(w) {}
  METAL_FUNC constexpr vec(T x, const vec<T, 3>& v) : x(x), y(v.x), z(v.y), w(v.z) {}
  template <class U, class = std::enable_if_t<!std::is_same_v<T, U>>>
  METAL_FUNC explicit constexpr vec(msl::in<vec<U, 4>> v) : x(T(v.x)), y(T(v.y)), z(T(v.z)), w(T(v.w)) {}
  template <class U, class = std::enable_if_t<!std::is_same_v<T, U>>>
  METAL_FUNC explicit constexpr vec(const packed_vec<U, 4>& v) : vec(vec<U, 4>(v)) {}

 private:
  METAL_FUNC constexpr T* member(size_t i) { return i == 0 ? &x : i == 1 ? &y : i == 2 ? &z : &w; }
};

// Clang's ext_vector_type may have any number of elements; MSL's own names end at four.
template <class T, int N>
struct alignas(N * sizeof(T)) vec : msl::vec_operators<T, N> {
  using element_type = T;
  T elements[N];

  vec() = default;
  template <class S, class = std::enable_if_t<msl::is_scalar_v<S>>>
  METAL_FUNC constexpr vec(S s) : elements{} {
    for (T& element : elements) element = T(s);
  }
  template <class... S, class = std::enable_if_t<sizeof...(S) + 2 == N>>
  METAL_FUNC constexpr vec(T first, T second, S... rest) : elements{first, second, T(rest)...} {}
  template <class U, class = std::enable_if_t<!std::is_same_v<T, U>>>
  METAL_FUNC explicit constexpr vec(msl::in<vec<U, N>> v) : elements{} {
    for (int i = 0; i < N; ++i) elements[i] = T(v[i]);
  }
  METAL_FUNC constexpr T& operator[](size_t i) { return MSL_CHECK_INDEX(i, N), elements[i]; }
  METAL_FUNC constexpr const T& operator[](size_t i) const { return MSL_CHECK_INDEX(i, N), elements[i]; }
};

}  // namespace metal

#undef MSL_VEC_COMMON

// v.xzy is translated to v.template swizzle<0, 2, 1>() where it is read and to v.template swizzle_ref<0, 2, 1>() where
// it is assigned to.
namespace msl {

template <int I, class V>
METAL_FUNC constexpr auto& element(V& v) {
  static_assert(I < int(sizeof(v) / sizeof(v.x)), "no such component");
  if constexpr (I == 0)
    return v.x;
  else if constexpr (I == 1)
    return v.y;
  else if constexpr (I == 2)
    return v.z;
  else
    return v.w;
}

template <int... I, class V>
METAL_FUNC constexpr auto read_swizzle(const V& v) {
  return metal::vec<typename V::element_type, sizeof...(I)>(element<I>(v)...);
}

// The target of an assignment to a swizzle. A read of it gives the vector.
template <class V, int... I>
struct swizzle_reference {
  using element_type = typename V::element_type;
  using value_type = metal::vec<element_type, sizeof...(I)>;

  V& target;

  METAL_FUNC constexpr operator value_type() const { return read_swizzle<I...>(target); }

  METAL_FUNC constexpr const swizzle_reference& operator=(const value_type& value) const {
    size_t next = 0;
    value_type copy = value;
    ((element<I>(target) = copy[next++]), ...);
    return *this;
  }
  METAL_FUNC constexpr const swizzle_reference& operator=(const swizzle_reference& other) const {
    return *this = value_type(other);
  }

#define MSL_COMPOUND(op)                                                                              \
  METAL_FUNC constexpr const swizzle_reference& operator op##=(const value_type& value) const {       \
    return *this = value_type(*this) op value;                                                        \
  }
  MSL_COMPOUND(+) MSL_COMPOUND(-) MSL_COMPOUND(*) MSL_COMPOUND(/) MSL_COMPOUND(%)
  MSL_COMPOUND(&) MSL_COMPOUND(|) MSL_COMPOUND(^) MSL_COMPOUND(<<) MSL_COMPOUND(>>)
#undef MSL_COMPOUND
};

}  // namespace msl
