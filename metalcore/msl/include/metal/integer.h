// MSL's integer functions, on scalars and vectors.
#pragma once

#include "metal/common.h"
#include "target/integer.h"

namespace msl::integer {

template <class T>
constexpr int bits_v = int(sizeof(T)) * 8;
template <class T>
using unsigned_t = std::make_unsigned_t<T>;
// A type that holds any product of two T.
template <class T>
using wide_t = std::conditional_t<sizeof(T) == 8, std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>,
                                  std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>>;

template <class T>
METAL_FUNC constexpr T least() {
  return std::is_signed_v<T> ? T(unsigned_t<T>(1) << (bits_v<T> - 1)) : T(0);
}
template <class T>
METAL_FUNC constexpr T greatest() {
  return T(~least<T>());
}
template <class T>
METAL_FUNC constexpr T saturated(wide_t<T> value) {
  return value < wide_t<T>(least<T>()) ? least<T>() : value > wide_t<T>(greatest<T>()) ? greatest<T>() : T(value);
}

template <class T>
METAL_FUNC constexpr T clz(T x) {
  return x == 0 ? T(bits_v<T>) : T(leading_zeros(uint64_t(unsigned_t<T>(x))) - (64 - bits_v<T>));
}
template <class T>
METAL_FUNC constexpr T ctz(T x) {
  return x == 0 ? T(bits_v<T>) : T(trailing_zeros(uint64_t(unsigned_t<T>(x))));
}
template <class T>
METAL_FUNC constexpr T popcount(T x) {
  return T(ones(uint64_t(unsigned_t<T>(x))));
}
template <class T>
METAL_FUNC constexpr T reverse_bits(T x) {
  return T(reversed(uint64_t(unsigned_t<T>(x))) >> (64 - bits_v<T>));
}

template <class T>
METAL_FUNC constexpr unsigned_t<T> absdiff(T x, T y) {
  return unsigned_t<T>(x < y ? unsigned_t<T>(y) - unsigned_t<T>(x) : unsigned_t<T>(x) - unsigned_t<T>(y));
}
template <class T>
METAL_FUNC constexpr T addsat(T x, T y) {
  T sum = T();
  return add_overflows(x, y, sum) ? (y < 0 ? least<T>() : greatest<T>()) : sum;
}
template <class T>
METAL_FUNC constexpr T subsat(T x, T y) {
  T difference = T();
  return subtract_overflows(x, y, difference) ? (x < y ? least<T>() : greatest<T>()) : difference;
}
// (x + y) / 2 without overflow: hadd rounds it down, rhadd up.
template <class T>
METAL_FUNC constexpr T hadd(T x, T y) {
  return T((x & y) + ((x ^ y) >> 1));
}
template <class T>
METAL_FUNC constexpr T rhadd(T x, T y) {
  return T((x | y) - ((x ^ y) >> 1));
}
template <class T>
METAL_FUNC constexpr T mulhi(T x, T y) {
  return T((wide_t<T>(x) * wide_t<T>(y)) >> bits_v<T>);
}
template <class T>
METAL_FUNC constexpr T low24(T x) {
  return T(x << 8) >> 8;
}
template <class T>
METAL_FUNC constexpr T mul24(T x, T y) {
  return T(low24(x) * low24(y));
}
template <class T>
METAL_FUNC constexpr T rotate(T v, T i) {
  unsigned count = unsigned(i) & (bits_v<T> - 1);
  unsigned_t<T> u = unsigned_t<T>(v);
  return count == 0 ? v : T(unsigned_t<T>(u << count) | unsigned_t<T>(u >> (bits_v<T> - count)));
}
template <class T>
METAL_FUNC constexpr T mad24(T x, T y, T z) {
  return T(mul24(x, y) + z);
}
template <class T>
METAL_FUNC constexpr T madhi(T x, T y, T z) {
  return T(mulhi(x, y) + z);
}
template <class T>
METAL_FUNC constexpr T madsat(T x, T y, T z) {
  if constexpr (sizeof(T) < 8) {
    return saturated<T>(wide_t<T>(x) * y + z);
  } else {
    // wide_t holds the product and the sum of any T.
    wide_t<T> value = wide_t<T>(x) * y;
    wide_t<T> sum = 0;
    return add_overflows(value, wide_t<T>(z), sum) ? greatest<T>() : saturated<T>(sum);
  }
}

template <class T>
METAL_FUNC constexpr T extract_bits(T x, uint offset, uint bits) {
  if (bits == 0 || offset >= uint(bits_v<T>)) return T(0);
  uint top = uint(bits_v<T>) - (bits < uint(bits_v<T>) - offset ? bits + offset : uint(bits_v<T>));
  return T(T(unsigned_t<T>(x) << top) >> (top + offset));
}
template <class T>
METAL_FUNC constexpr T insert_bits(T base, T insert, uint offset, uint bits) {
  if (bits == 0 || offset >= uint(bits_v<T>)) return base;
  unsigned_t<T> mask =
      bits >= uint(bits_v<T>) ? unsigned_t<T>(~unsigned_t<T>(0)) : unsigned_t<T>((uint64_t(1) << bits) - 1);
  mask = unsigned_t<T>(mask << offset);
  return T((unsigned_t<T>(base) & unsigned_t<T>(~mask)) | (unsigned_t<T>(unsigned_t<T>(insert) << offset) & mask));
}

template <class V>
using integers_only = std::enable_if_t<std::is_integral_v<element_t<V>>>;

}  // namespace msl::integer

namespace metal {

#define MSL_INTEGER_UNARY(name)                                                                       \
  template <class X, class V = msl::plain_t<X>, class = msl::integer::integers_only<V>>               \
  METAL_FUNC constexpr V name(const X& x) {                                                           \
    return msl::map_all([](auto v) METAL_LAMBDA { return msl::integer::name(v); }, V(x));             \
  }
MSL_INTEGER_UNARY(clz) MSL_INTEGER_UNARY(ctz) MSL_INTEGER_UNARY(popcount) MSL_INTEGER_UNARY(reverse_bits)
#undef MSL_INTEGER_UNARY

#define MSL_INTEGER_BINARY(name)                                                                              \
  template <class X, class Y, class V = msl::common_t<X, Y>, class = msl::integer::integers_only<V>>          \
  METAL_FUNC constexpr auto name(const X& x, const Y& y) {                                                    \
    return msl::map_all([](auto a, auto b) METAL_LAMBDA { return msl::integer::name(a, b); }, V(x), V(y));    \
  }
MSL_INTEGER_BINARY(absdiff) MSL_INTEGER_BINARY(addsat) MSL_INTEGER_BINARY(subsat) MSL_INTEGER_BINARY(hadd)
MSL_INTEGER_BINARY(rhadd) MSL_INTEGER_BINARY(mulhi) MSL_INTEGER_BINARY(mul24)
#undef MSL_INTEGER_BINARY

// The count gets the type of the value.
template <class X, class Y, class V = msl::plain_t<X>, class = msl::integer::integers_only<V>>
METAL_FUNC constexpr V rotate(const X& x, const Y& count) {
  return msl::map_all([](auto v, auto n) METAL_LAMBDA { return msl::integer::rotate(v, n); }, V(x), V(count));
}

#define MSL_INTEGER_TERNARY(name)                                                                             \
  template <class X, class Y, class Z, class V = msl::common_t<X, Y, Z>, class = msl::integer::integers_only<V>> \
  METAL_FUNC constexpr V name(const X& x, const Y& y, const Z& z) {                                           \
    return msl::map_all([](auto a, auto b, auto c) METAL_LAMBDA { return msl::integer::name(a, b, c); }, V(x), V(y), \
                        V(z));                                                                                \
  }
MSL_INTEGER_TERNARY(mad24) MSL_INTEGER_TERNARY(madhi) MSL_INTEGER_TERNARY(madsat)
#undef MSL_INTEGER_TERNARY

template <class X, class V = msl::plain_t<X>, class = msl::integer::integers_only<V>>
METAL_FUNC constexpr V extract_bits(const X& x, uint offset, uint bits) {
  return msl::map_all([=](auto v) METAL_LAMBDA { return msl::integer::extract_bits(v, offset, bits); }, V(x));
}
template <class X, class Y, class V = msl::plain_t<X>, class = msl::integer::integers_only<V>>
METAL_FUNC constexpr V insert_bits(const X& base, const Y& insert, uint offset, uint bits) {
  return msl::map_all([=](auto a, auto b) METAL_LAMBDA { return msl::integer::insert_bits(a, b, offset, bits); },
                      V(base), V(insert));
}

}  // namespace metal
