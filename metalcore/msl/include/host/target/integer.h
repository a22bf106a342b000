// Operations on integers for which machines have instructions.
#pragma once

#include "target/runtime.h"
#include "target/standard.h"

namespace msl::integer {

// x must not be zero.
METAL_FUNC constexpr int leading_zeros(uint64_t x) { return __builtin_clzll(x); }
METAL_FUNC constexpr int trailing_zeros(uint64_t x) { return __builtin_ctzll(x); }
METAL_FUNC constexpr int ones(uint64_t x) { return __builtin_popcountll(x); }

METAL_FUNC constexpr uint64_t reversed(uint64_t v) {
  v = (v >> 1 & 0x5555555555555555u) | (v & 0x5555555555555555u) << 1;
  v = (v >> 2 & 0x3333333333333333u) | (v & 0x3333333333333333u) << 2;
  v = (v >> 4 & 0x0f0f0f0f0f0f0f0fu) | (v & 0x0f0f0f0f0f0f0f0fu) << 4;
  return __builtin_bswap64(v);
}

template <class T>
METAL_FUNC constexpr bool add_overflows(T x, T y, T& sum) {
  return __builtin_add_overflow(x, y, &sum);
}
template <class T>
METAL_FUNC constexpr bool subtract_overflows(T x, T y, T& difference) {
  return __builtin_sub_overflow(x, y, &difference);
}

}  // namespace msl::integer
