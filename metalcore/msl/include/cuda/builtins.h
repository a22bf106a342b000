// Clang's builtins, which programs for Metal call in place of some functions.
#pragma once

#include "target/integer.h"
#include "target/math.h"

METAL_FUNC constexpr int __builtin_clz(uint32_t x) { return msl::integer::leading_zeros(x) - 32; }
METAL_FUNC constexpr int __builtin_clzl(uint64_t x) { return msl::integer::leading_zeros(x); }
METAL_FUNC constexpr int __builtin_clzll(uint64_t x) { return msl::integer::leading_zeros(x); }
METAL_FUNC constexpr int __builtin_ctz(uint32_t x) { return msl::integer::trailing_zeros(x); }
METAL_FUNC constexpr int __builtin_ctzl(uint64_t x) { return msl::integer::trailing_zeros(x); }
METAL_FUNC constexpr int __builtin_ctzll(uint64_t x) { return msl::integer::trailing_zeros(x); }
METAL_FUNC constexpr int __builtin_popcount(uint32_t x) { return msl::integer::ones(x); }
METAL_FUNC constexpr int __builtin_popcountl(uint64_t x) { return msl::integer::ones(x); }
METAL_FUNC constexpr int __builtin_popcountll(uint64_t x) { return msl::integer::ones(x); }
METAL_FUNC constexpr float __builtin_inff() { return msl::math::kInfinity; }
METAL_FUNC constexpr float __builtin_nanf(const char*) { return msl::math::kNaN; }
METAL_FUNC constexpr float __builtin_fabsf(float x) { return msl::math::abs(x); }
METAL_FUNC float __builtin_fmaf(float a, float b, float c) { return ::fmaf(a, b, c); }
METAL_FUNC float __builtin_sqrtf(float x) { return ::sqrtf(x); }
METAL_FUNC void __builtin_memcpy(void* to, const void* from, size_t size) { memcpy(to, from, size); }
template <class T>
METAL_FUNC constexpr T __builtin_expect(T value, T) {
  return value;
}
