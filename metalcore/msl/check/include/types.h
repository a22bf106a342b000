// Scalars, vectors and packed vectors with the types of the Metal specification. Only types matter here: no code runs.
// Clang's C++ for OpenCL has the address spaces: `device` is opencl_global_device, `constant` is const __global,
// `threadgroup` is __local and `thread` is __private. A pointer without an address space is __generic, as `this` is in
// MSL.
#pragma once

#include "traits.h"

namespace metal {
template <class T, int N>
struct packed_vec;
}

namespace msl {

// A component that any scalar gives to a vector's constructor.
template <class T>
struct component {
  template <class S, class = metal::enable_if_t<metal::is_scalar_v<S>>>
  constexpr component(S value) : value(T(value)) {}
  T value;
};

// A vector that a longer vector is constructed from. No scalar converts to it.
template <class T, int N>
struct part {
  constexpr part(metal::vec<T, N>) {}
  constexpr part(metal::packed_vec<T, N>) {}
};

// Braces may give fewer components than the vector has; a constructor's parentheses may not (see tree.py).
struct partial {};

// A scalar may be an operand beside a vector, except a fraction beside a vector of integers.
template <class T, class S>
constexpr constant bool combines = metal::is_scalar_v<S> && !(metal::is_integral_v<T> && metal::is_floating_point_v<S>);
// It converts to a vector implicitly.
template <class T, class S>
constexpr constant bool spreads = combines<T, S> && (metal::is_same_v<T, bfloat> || !metal::is_same_v<S, bfloat>);

}  // namespace msl

#define MSL_VECTOR(T, N) metal::vec<T, N>
// Components that are no fields are properties, so that they have a vector's type and can be assigned to.
#define MSL_COMPONENT(T, name) \
  T get_##name() const;        \
  void put_##name(T);          \
  __declspec(property(get = get_##name, put = put_##name)) T name;
#define MSL_READ_ONLY(T, name) \
  T get_##name() const;        \
  __declspec(property(get = get_##name)) T name;

// MSL_SWIZZLES_2, _3 and _4, which list the swizzles that the program mentions, are defined before this header.

#define MSL_INDEXING(T)                                \
  __private T& operator[](ulong) __private;            \
  __local T& operator[](ulong) __local;                \
  __global T& operator[](ulong) __global;              \
  const __private T& operator[](ulong) const __private; \
  const __local T& operator[](ulong) const __local;    \
  const __global T& operator[](ulong) const __global;  \
  T& operator[](ulong);                                \
  const T& operator[](ulong) const;

#define MSL_COMPOUND(Self, op) \
  template <class B, class = msl::common_t<Self, B>> \
  Self& operator op(B);
#define MSL_COMPOUNDS(Self)                                                                               \
  MSL_COMPOUND(Self, +=) MSL_COMPOUND(Self, -=) MSL_COMPOUND(Self, *=) MSL_COMPOUND(Self, /=)             \
  MSL_COMPOUND(Self, %=) MSL_COMPOUND(Self, &=) MSL_COMPOUND(Self, |=) MSL_COMPOUND(Self, ^=)             \
  MSL_COMPOUND(Self, <<=) MSL_COMPOUND(Self, >>=)                                                         \
  Self& operator++();                                                                                     \
  Self& operator--();                                                                                     \
  Self operator++(int);                                                                                   \
  Self operator--(int);

namespace msl {

// The common type of two operands of a vector's operator.
template <class A, class B, class = void>
struct common;
template <class A, class B>
using common_t = typename common<A, B>::type;

}  // namespace msl

#define MSL_VECTOR_BEGIN(N, ...)                                                             \
  vec() = default;                                                            \
  template <class S, metal::enable_if_t<msl::spreads<T, S>, int> = 0>                   \
  constexpr vec(S) : __VA_ARGS__ {}                                                                   \
  template <class S, metal::enable_if_t<metal::is_scalar_v<S> && !msl::spreads<T, S>, int> = 0> \
  constexpr explicit vec(S) : __VA_ARGS__ {}                                                          \
  template <class U, metal::enable_if_t<!metal::is_same_v<T, U>, int> = 0>              \
  constexpr explicit vec(vec<U, N>) : __VA_ARGS__ {}                                                  \
  constexpr vec(packed_vec<T, N>) : __VA_ARGS__ {}                                                    \
  template <class U, metal::enable_if_t<!metal::is_same_v<T, U>, int> = 0>              \
  constexpr explicit vec(packed_vec<U, N>) : __VA_ARGS__ {}                                           \
  MSL_COMPOUNDS(vec)                                                                    \
  MSL_INDEXING(T)

namespace metal {

template <class T>
struct alignas(2 * sizeof(T)) vec<T, 2> {
  using C = msl::component<T>;
  T x, y;
  MSL_VECTOR_BEGIN(2, x(), y())
  constexpr vec(C, C) : x(), y() {}
  MSL_SWIZZLES_2(T)
};

template <class T>
struct alignas(4 * sizeof(T)) vec<T, 3> {
  using C = msl::component<T>;
  T x, y, z;
  MSL_VECTOR_BEGIN(3, x(), y(), z())
  constexpr vec(C, C, C) : x(), y(), z() {}
  constexpr vec(C, C, msl::partial = {}) : x(), y(), z() {}
  constexpr vec(msl::part<T, 2>, C) : x(), y(), z() {}
  constexpr vec(C, msl::part<T, 2>) : x(), y(), z() {}
  MSL_SWIZZLES_3(T)
};

template <class T>
struct alignas(4 * sizeof(T)) vec<T, 4> {
  using C = msl::component<T>;
  T x, y, z, w;
  MSL_VECTOR_BEGIN(4, x(), y(), z(), w())
  constexpr vec(C, C, C, C) : x(), y(), z(), w() {}
  constexpr vec(C, C, msl::partial = {}) : x(), y(), z(), w() {}
  constexpr vec(C, C, C, msl::partial = {}) : x(), y(), z(), w() {}
  constexpr vec(msl::part<T, 2>, C, C) : x(), y(), z(), w() {}
  constexpr vec(C, msl::part<T, 2>, C) : x(), y(), z(), w() {}
  constexpr vec(C, C, msl::part<T, 2>) : x(), y(), z(), w() {}
  constexpr vec(msl::part<T, 2>, msl::part<T, 2>) : x(), y(), z(), w() {}
  constexpr vec(msl::part<T, 3>, C) : x(), y(), z(), w() {}
  constexpr vec(C, msl::part<T, 3>) : x(), y(), z(), w() {}
  MSL_SWIZZLES_4(T)
};

#define MSL_PACKED(N, ...)                                                         \
  packed_vec() = default;                                           \
  constexpr packed_vec(vec<T, N>) : __VA_ARGS__ {}                                          \
  template <class S, class = enable_if_t<msl::spreads<T, S>>>                 \
  constexpr packed_vec(S) : __VA_ARGS__ {}                                                  \
  template <class U, enable_if_t<!is_same_v<T, U>, int> = 0>                  \
  constexpr explicit packed_vec(packed_vec<U, N>) : __VA_ARGS__ {}                          \
  template <class U, enable_if_t<!is_same_v<T, U>, int> = 0>                  \
  constexpr explicit packed_vec(vec<U, N>) : __VA_ARGS__ {}                                 \
  MSL_COMPOUNDS(packed_vec)                                                   \
  MSL_INDEXING(T)

template <class T>
struct packed_vec<T, 2> {
  using C = msl::component<T>;
  T x, y;
  MSL_PACKED(2, x(), y())
  constexpr packed_vec(C, C) : x(), y() {}
  MSL_SWIZZLES_2(T)
};
template <class T>
struct packed_vec<T, 3> {
  using C = msl::component<T>;
  T x, y, z;
  MSL_PACKED(3, x(), y(), z())
  constexpr packed_vec(C, C, C) : x(), y(), z() {}
  constexpr packed_vec(msl::part<T, 2>, C) : x(), y(), z() {}
  constexpr packed_vec(C, msl::part<T, 2>) : x(), y(), z() {}
  MSL_SWIZZLES_3(T)
};
template <class T>
struct packed_vec<T, 4> {
  using C = msl::component<T>;
  T x, y, z, w;
  MSL_PACKED(4, x(), y(), z(), w())
  constexpr packed_vec(C, C, C, C) : x(), y(), z(), w() {}
  constexpr packed_vec(msl::part<T, 2>, msl::part<T, 2>) : x(), y(), z(), w() {}
  constexpr packed_vec(msl::part<T, 3>, C) : x(), y(), z(), w() {}
  MSL_SWIZZLES_4(T)
};

}  // namespace metal

namespace msl {

template <class A>
struct vector_of {};
template <class T, int N>
struct vector_of<metal::vec<T, N>> {
  using type = metal::vec<T, N>;
  using element = T;
};
template <class T, int N>
struct vector_of<metal::packed_vec<T, N>> : vector_of<metal::vec<T, N>> {};

template <class A, class B>
struct common<A, B, metal::enable_if_t<metal::is_same_v<typename vector_of<A>::type, typename vector_of<B>::type>>>
    : vector_of<A> {};
template <class A, class B>
struct common<A, B, metal::enable_if_t<combines<typename vector_of<A>::element, B>>> : vector_of<A> {};
template <class A, class B>
struct common<A, B, metal::enable_if_t<combines<typename vector_of<B>::element, A>>> : vector_of<B> {};

template <class V, class E>
struct with_element {};
template <class T, int N, class E>
struct with_element<metal::vec<T, N>, E> {
  using type = metal::vec<E, N>;
};

}  // namespace msl

namespace metal {

#define MSL_OPERATOR(op)                          \
  template <class A, class B>                     \
  constexpr msl::common_t<A, B> operator op(A, B);
#define MSL_COMPARISON(op)                        \
  template <class A, class B>                     \
  constexpr typename msl::with_element<msl::common_t<A, B>, bool>::type operator op(A, B);
#define MSL_UNARY(op)                             \
  template <class A>                              \
  constexpr typename msl::vector_of<A>::type operator op(A);
MSL_OPERATOR(+) MSL_OPERATOR(-) MSL_OPERATOR(*) MSL_OPERATOR(/) MSL_OPERATOR(%)
MSL_OPERATOR(&) MSL_OPERATOR(|) MSL_OPERATOR(^) MSL_OPERATOR(<<) MSL_OPERATOR(>>)
MSL_COMPARISON(==) MSL_COMPARISON(!=) MSL_COMPARISON(<) MSL_COMPARISON(>) MSL_COMPARISON(<=) MSL_COMPARISON(>=)
MSL_COMPARISON(&&) MSL_COMPARISON(||)
MSL_UNARY(+) MSL_UNARY(-) MSL_UNARY(~)
template <class A>
constexpr typename msl::with_element<typename msl::vector_of<A>::type, bool>::type operator!(A);

}  // namespace metal
