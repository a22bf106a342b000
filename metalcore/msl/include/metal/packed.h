// packed_vec<T, N>: elements without padding, which are aligned as one element is. It converts to and from vec<T, N>,
// which does the arithmetic.
#pragma once

#include "metal/vec.h"

namespace msl {

template <class T>
struct is_packed : std::false_type {};
template <class T, int N>
struct is_packed<metal::packed_vec<T, N>> : std::true_type {};

template <class T>
METAL_FUNC constexpr const T& unpacked(const T& value) {
  return value;
}
template <class T, int N>
METAL_FUNC constexpr metal::vec<T, N> unpacked(const metal::packed_vec<T, N>& value) {
  return value;
}

}  // namespace msl

#define MSL_PACKED_COMMON(type, N)                                                                           \
  using element_type = T;                                                                                    \
  type() = default;                                                                                          \
  template <class S, class = std::enable_if_t<msl::is_scalar_v<S>>>                                          \
  METAL_FUNC constexpr type(S s) : type(vec<T, N>(s)) {}                                                     \
  template <class U, class = std::enable_if_t<!std::is_same_v<T, U>>>                                        \
  METAL_FUNC explicit constexpr type(const vec<U, N>& v) : type(vec<T, N>(v)) {}                             \
  template <class U, class = std::enable_if_t<!std::is_same_v<T, U>>>                                        \
  METAL_FUNC explicit constexpr type(const packed_vec<U, N>& v) : type(vec<T, N>(vec<U, N>(v))) {}           \
  METAL_FUNC constexpr T& operator[](size_t i) {                                                             \
    return MSL_CHECK_INDEX(i, N), reinterpret_cast<T*>(this)[i];                                             \
  }                                                                                                          \
  METAL_FUNC constexpr const T& operator[](size_t i) const {                                                 \
    return MSL_CHECK_INDEX(i, N), reinterpret_cast<const T*>(this)[i];                                       \
  }                                                                                                          \
  MSL_SWIZZLES(type)

namespace metal {

template <class T>
struct packed_vec<T, 2> {
  union { T x, r; };
  union { T y, g; };

  MSL_PACKED_COMMON(packed_vec, 2)
  METAL_FUNC constexpr packed_vec(const vec<T, 2>& v) : x(v.x), y(v.y) {}
  METAL_FUNC constexpr packed_vec(T x, T y) : x(x), y(y) {}
  METAL_FUNC constexpr operator vec<T, 2>() const { return {x, y}; }
};

template <class T>
struct packed_vec<T, 3> {
  union { T x, r; };
  union { T y, g; };
  union { T z, b; };

  MSL_PACKED_COMMON(packed_vec, 3)
  METAL_FUNC constexpr packed_vec(const vec<T, 3>& v) : x(v.x), y(v.y), z(v.z) {}
  METAL_FUNC constexpr packed_vec(T x, T y, T z) : x(x), y(y), z(z) {}
  METAL_FUNC constexpr packed_vec(const vec<T, 2>& v, T z) : x(v.x), y(v.y), z(z) {}
  METAL_FUNC constexpr packed_vec(T x, const vec<T, 2>& v) : x(x), y(v.x), z(v.y) {}
  METAL_FUNC constexpr operator vec<T, 3>() const { return {x, y, z}; }
};

template <class T>
struct packed_vec<T, 4> {
  union { T x, r; };
  union { T y, g; };
  union { T z, b; };
  union { T w, a; };

  MSL_PACKED_COMMON(packed_vec, 4)
  METAL_FUNC constexpr packed_vec(const vec<T, 4>& v) : x(v.x), y(v.y), z(v.z), w(v.w) {}
  METAL_FUNC constexpr packed_vec(T x, T y, T z, T w) : x(x), y(y), z(z), w(w) {}
  METAL_FUNC constexpr packed_vec(const vec<T, 2>& u, const vec<T, 2>& v) : x(u.x), y(u.y), z(v.x), w(v.y) {}
  METAL_FUNC constexpr packed_vec(const vec<T, 3>& v, T w) : x(v.x), y(v.y), z(v.z), w(w) {}
  METAL_FUNC constexpr operator vec<T, 4>() const { return {x, y, z, w}; }
};

// At least one operand is packed, so vec does the operation.
#define MSL_BINARY(op)                                                                                             \
  template <class A, class B,                                                                                      \
            class = std::enable_if_t<msl::is_packed<A>::value || msl::is_packed<B>::value>>                        \
  METAL_FUNC constexpr auto operator op(const A& a, const B& b)->decltype(msl::unpacked(a) op msl::unpacked(b)) {  \
    return msl::unpacked(a) op msl::unpacked(b);                                                                   \
  }
#define MSL_COMPOUND(op)                                                                                           \
  MSL_BINARY(op)                                                                                                   \
  template <class T, int N, class B>                                                                               \
  METAL_FUNC constexpr packed_vec<T, N>& operator op##=(packed_vec<T, N>& a, const B& b) {                         \
    return a = msl::unpacked(a) op msl::unpacked(b);                                                               \
  }
#define MSL_UNARY(op)                                                                                              \
  template <class T, int N>                                                                                        \
  METAL_FUNC constexpr auto operator op(const packed_vec<T, N>& v) {                                               \
    return op msl::unpacked(v);                                                                                    \
  }
MSL_COMPOUND(+) MSL_COMPOUND(-) MSL_COMPOUND(*) MSL_COMPOUND(/) MSL_COMPOUND(%)
MSL_COMPOUND(&) MSL_COMPOUND(|) MSL_COMPOUND(^) MSL_COMPOUND(<<) MSL_COMPOUND(>>)
MSL_BINARY(==) MSL_BINARY(!=) MSL_BINARY(<) MSL_BINARY(<=) MSL_BINARY(>) MSL_BINARY(>=) MSL_BINARY(&&) MSL_BINARY(||)
MSL_UNARY(+) MSL_UNARY(-) MSL_UNARY(~) MSL_UNARY(!)
#undef MSL_UNARY
#undef MSL_COMPOUND
#undef MSL_BINARY

}  // namespace metal

#undef MSL_PACKED_COMMON
