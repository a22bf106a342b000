// The functions of metal::fast for which the GPU has instructions. Subnormal numbers count as zeros; exp's relative
// error grows with the argument's size (2 + 1.16 |x| ulp), log's error near 1 is absolute, x / y is zero where |y| is
// above 2^126.
#pragma once

#include "metal/math.h"

namespace msl::math {

#define MSL_UNIT(name, instruction)                            \
  METAL_FUNC float name(float x) {                             \
    float y;                                                   \
    asm(instruction ".approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); \
    return y;                                                  \
  }
MSL_UNIT(unit_exp2, "ex2") MSL_UNIT(unit_log2, "lg2") MSL_UNIT(unit_reciprocal, "rcp")
#undef MSL_UNIT

METAL_FUNC constexpr float fast_exp(float x) {
  return __builtin_is_constant_evaluated() ? exp(x) : unit_exp2(x * 1.44269504f);
}
METAL_FUNC constexpr float fast_exp2(float x) { return __builtin_is_constant_evaluated() ? exp2(x) : unit_exp2(x); }
METAL_FUNC constexpr float fast_log(float x) {
  return __builtin_is_constant_evaluated() ? log(x) : unit_log2(x) * 0.69314718f;
}
METAL_FUNC constexpr float fast_log2(float x) { return __builtin_is_constant_evaluated() ? log2(x) : unit_log2(x); }
METAL_FUNC constexpr float fast_divide(float x, float y) {
  return __builtin_is_constant_evaluated() ? x / y : x * unit_reciprocal(y);
}

}  // namespace msl::math

namespace metal::fast {

#define MSL_FAST(name)                                                                        \
  METAL_MATH float name(float x) { return msl::math::fast_##name(x); }                        \
  METAL_MATH half name(half x) { return half(msl::math::fast_##name(float(x))); }             \
  template <class T, int N>                                                                   \
  METAL_MATH vec<T, N> name(const vec<T, N>& v) {                                             \
    return msl::map(v, [](T x) METAL_LAMBDA { return T(msl::math::fast_##name(float(x))); }); \
  }
MSL_FAST(exp) MSL_FAST(exp2) MSL_FAST(log) MSL_FAST(log2)
#undef MSL_FAST

template <class A, class B, class V = msl::common_floating_t<A, B>>
METAL_MATH V divide(const A& a, const B& b) {
  using T = msl::element_t<V>;
  return msl::map_all([](T x, T y) METAL_LAMBDA { return T(msl::math::fast_divide(float(x), float(y))); }, V(a), V(b));
}

}  // namespace metal::fast
