// Names with which Apple's own headers implement <metal_stdlib>. Published programs, such as MLX, call some of them to
// overload the library for their own types, so they are here too. Their last argument chooses fast or precise math,
// which are the same on the host.
#pragma once

#include "metal/math.h"
#include "metal/simdgroup.h"

namespace msl {
struct math_mode {};
}  // namespace msl

#define __METAL_MAYBE_FAST_MATH__ (MSL_ROOT::msl::math_mode{})
#define __METAL_FAST_MATH__ (MSL_ROOT::msl::math_mode{})
#define __METAL_PRECISE_MATH__ (MSL_ROOT::msl::math_mode{})

#define MSL_INTERNAL_MATH(name)                                              \
  template <class T, class... More>                                          \
  METAL_FUNC auto __metal_##name(T x, More... more) {                        \
    return msl::without_mode(                                                \
        [](auto... a) METAL_LAMBDA { return metal::name(a...); }, x, more...); \
  }

namespace msl {

// Calls f with all arguments except a math_mode at the end.
template <class F, class A>
METAL_FUNC auto without_mode(F f, A a, math_mode) { return f(a); }
template <class F, class A, class B>
METAL_FUNC auto without_mode(F f, A a, B b, math_mode) { return f(a, b); }
template <class F, class A, class B, class C>
METAL_FUNC auto without_mode(F f, A a, B b, C c, math_mode) { return f(a, b, c); }

}  // namespace msl

MSL_INTERNAL_MATH(acos) MSL_INTERNAL_MATH(acosh) MSL_INTERNAL_MATH(asin) MSL_INTERNAL_MATH(asinh)
MSL_INTERNAL_MATH(atan) MSL_INTERNAL_MATH(atan2) MSL_INTERNAL_MATH(atanh) MSL_INTERNAL_MATH(ceil)
MSL_INTERNAL_MATH(cos) MSL_INTERNAL_MATH(cosh) MSL_INTERNAL_MATH(cospi) MSL_INTERNAL_MATH(divide)
MSL_INTERNAL_MATH(exp) MSL_INTERNAL_MATH(exp10) MSL_INTERNAL_MATH(exp2) MSL_INTERNAL_MATH(fabs)
MSL_INTERNAL_MATH(fdim) MSL_INTERNAL_MATH(floor) MSL_INTERNAL_MATH(fmax) MSL_INTERNAL_MATH(fmax3)
MSL_INTERNAL_MATH(fmedian3) MSL_INTERNAL_MATH(fmin) MSL_INTERNAL_MATH(fmin3) MSL_INTERNAL_MATH(fmod)
MSL_INTERNAL_MATH(fract) MSL_INTERNAL_MATH(ldexp) MSL_INTERNAL_MATH(log) MSL_INTERNAL_MATH(log10)
MSL_INTERNAL_MATH(log2) MSL_INTERNAL_MATH(pow) MSL_INTERNAL_MATH(powr) MSL_INTERNAL_MATH(rint)
MSL_INTERNAL_MATH(round) MSL_INTERNAL_MATH(rsqrt) MSL_INTERNAL_MATH(sin) MSL_INTERNAL_MATH(sinh)
MSL_INTERNAL_MATH(sinpi) MSL_INTERNAL_MATH(sqrt) MSL_INTERNAL_MATH(tan) MSL_INTERNAL_MATH(tanh)
MSL_INTERNAL_MATH(tanpi) MSL_INTERNAL_MATH(trunc)
#undef MSL_INTERNAL_MATH

template <class T>
METAL_FUNC T __metal_fma(T a, T b, T c) { return metal::fma(a, b, c); }
template <class T>
METAL_FUNC T __metal_nextafter(T a, T b) { return metal::nextafter(a, b); }
template <class T>
METAL_FUNC T __metal_frexp(T x, int* exponent, msl::math_mode) { return metal::frexp(x, *exponent); }
template <class T>
METAL_FUNC T __metal_frexp(T x, int* exponent) { return metal::frexp(x, *exponent); }
template <class T>
METAL_FUNC T __metal_modf(T x, T* whole, msl::math_mode) { return metal::modf(x, *whole); }

#define MSL_INTERNAL_SIMD1(name)                                          \
  template <class T>                                                      \
  METAL_FUNC T __metal_##name(T x, uint32_t line = __builtin_LINE()) {    \
    return metal::name(x, line);                                          \
  }
#define MSL_INTERNAL_SIMD2(name)                                                    \
  template <class T>                                                                \
  METAL_FUNC T __metal_##name(T x, ushort n, uint32_t line = __builtin_LINE()) {    \
    return metal::name(x, n, line);                                                 \
  }
#define MSL_INTERNAL_FILL(name)                                                                             \
  template <class T>                                                                                        \
  METAL_FUNC T __metal_##name(T x, T filling, ushort delta, ushort modulo, uint32_t line = __builtin_LINE()) { \
    return metal::name(x, filling, delta, modulo, line);                                                    \
  }
MSL_INTERNAL_SIMD1(simd_max) MSL_INTERNAL_SIMD1(simd_min) MSL_INTERNAL_SIMD1(simd_sum)
MSL_INTERNAL_SIMD1(simd_product) MSL_INTERNAL_SIMD1(simd_prefix_exclusive_product)
MSL_INTERNAL_SIMD1(simd_prefix_exclusive_sum) MSL_INTERNAL_SIMD1(simd_prefix_inclusive_product)
MSL_INTERNAL_SIMD1(simd_prefix_inclusive_sum)
MSL_INTERNAL_SIMD2(simd_broadcast) MSL_INTERNAL_SIMD2(simd_shuffle) MSL_INTERNAL_SIMD2(simd_shuffle_down)
MSL_INTERNAL_SIMD2(simd_shuffle_up) MSL_INTERNAL_SIMD2(simd_shuffle_rotate_down)
MSL_INTERNAL_SIMD2(simd_shuffle_rotate_up) MSL_INTERNAL_SIMD2(simd_shuffle_xor)
MSL_INTERNAL_FILL(simd_shuffle_and_fill_down) MSL_INTERNAL_FILL(simd_shuffle_and_fill_up)
#undef MSL_INTERNAL_SIMD1
#undef MSL_INTERNAL_SIMD2
#undef MSL_INTERNAL_FILL

// MLX names these for floats too, although no code can call them.
#define MSL_INTERNAL_BITS(name)                                           \
  template <class T>                                                      \
  METAL_FUNC T __metal_##name(T x, uint32_t line = __builtin_LINE()) {    \
    if constexpr (std::is_integral_v<T>) return metal::name(x, line);     \
    return x;                                                             \
  }
MSL_INTERNAL_BITS(simd_and) MSL_INTERNAL_BITS(simd_or) MSL_INTERNAL_BITS(simd_xor)
#undef MSL_INTERNAL_BITS

METAL_FUNC ushort __metal_get_simdgroup_size(ushort) { return msl::kSimdWidth; }
METAL_FUNC ushort __metal_get_thread_index_in_simdgroup(ushort) { return msl::index_of_lane(); }
