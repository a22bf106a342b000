// Operations on integers for which machines have instructions. Constant expressions use arithmetic.
#pragma once

#include "target/runtime.h"

namespace msl::integer {

// x must not be zero.
METAL_FUNC constexpr int leading_zeros(uint64_t x) {
  if (!__builtin_is_constant_evaluated()) return __clzll(int64_t(x));
  int n = 0;
  for (; !(x >> 63); x <<= 1) ++n;
  return n;
}
METAL_FUNC constexpr int trailing_zeros(uint64_t x) {
  if (!__builtin_is_constant_evaluated()) return __ffsll(int64_t(x)) - 1;
  int n = 0;
  for (; !(x & 1); x >>= 1) ++n;
  return n;
}
METAL_FUNC constexpr int ones(uint64_t x) {
  if (!__builtin_is_constant_evaluated()) return __popcll(x);
  int n = 0;
  for (; x; x &= x - 1) ++n;
  return n;
}
METAL_FUNC constexpr uint64_t reversed(uint64_t x) {
  if (!__builtin_is_constant_evaluated()) return __brevll(x);
  uint64_t result = 0;
  for (int i = 0; i < 64; ++i) result |= (x >> i & 1) << (63 - i);
  return result;
}

template <class T>
constexpr bool is_negative(T x) {
  return x < T(0);
}

template <class T>
METAL_FUNC constexpr bool add_overflows(T x, T y, T& sum) {
  using U = std::conditional_t<sizeof(T) == 16, unsigned __int128, uint64_t>;
  sum = T(U(x) + U(y));
  if constexpr (T(-1) < T(0)) return is_negative(x) == is_negative(y) && is_negative(sum) != is_negative(x);
  return sum < x;
}
template <class T>
METAL_FUNC constexpr bool subtract_overflows(T x, T y, T& difference) {
  difference = T(uint64_t(x) - uint64_t(y));
  if constexpr (T(-1) < T(0)) return is_negative(x) != is_negative(y) && is_negative(difference) != is_negative(x);
  return x < y;
}

}  // namespace msl::integer
