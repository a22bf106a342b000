// The compiler's own functions that programs call directly (MLX does), and assert.
#pragma once

namespace msl {
enum math_mode : bool {};
}
#define __METAL_MAYBE_FAST_MATH__ false
#define __METAL_FAST_MATH__ true
#define __METAL_PRECISE_MATH__ false

#define MSL_BUILTIN(name)           \
  template <class T, class... More> \
  T __metal_##name(T, More...);
MSL_BUILTIN(acos) MSL_BUILTIN(acosh) MSL_BUILTIN(asin) MSL_BUILTIN(asinh) MSL_BUILTIN(atan) MSL_BUILTIN(atan2)
MSL_BUILTIN(atanh) MSL_BUILTIN(ceil) MSL_BUILTIN(copysign) MSL_BUILTIN(cos) MSL_BUILTIN(cosh) MSL_BUILTIN(cospi)
MSL_BUILTIN(divide) MSL_BUILTIN(exp) MSL_BUILTIN(exp10) MSL_BUILTIN(exp2) MSL_BUILTIN(fabs) MSL_BUILTIN(fdim)
MSL_BUILTIN(floor) MSL_BUILTIN(fma) MSL_BUILTIN(fmax) MSL_BUILTIN(fmax3) MSL_BUILTIN(fmedian3) MSL_BUILTIN(fmin)
MSL_BUILTIN(fmin3) MSL_BUILTIN(fmod) MSL_BUILTIN(fract) MSL_BUILTIN(ldexp) MSL_BUILTIN(log) MSL_BUILTIN(log10)
MSL_BUILTIN(log2) MSL_BUILTIN(nextafter) MSL_BUILTIN(pow) MSL_BUILTIN(powr) MSL_BUILTIN(rint) MSL_BUILTIN(round)
MSL_BUILTIN(rsqrt) MSL_BUILTIN(sin) MSL_BUILTIN(sinh) MSL_BUILTIN(sinpi) MSL_BUILTIN(sqrt) MSL_BUILTIN(tan)
MSL_BUILTIN(tanh) MSL_BUILTIN(tanpi) MSL_BUILTIN(trunc) MSL_BUILTIN(frexp) MSL_BUILTIN(modf) MSL_BUILTIN(clamp)
MSL_BUILTIN(simd_sum) MSL_BUILTIN(simd_product) MSL_BUILTIN(simd_min) MSL_BUILTIN(simd_max) MSL_BUILTIN(simd_xor)
MSL_BUILTIN(simd_and) MSL_BUILTIN(simd_or) MSL_BUILTIN(simd_broadcast) MSL_BUILTIN(simd_broadcast_first)
MSL_BUILTIN(simd_shuffle) MSL_BUILTIN(simd_shuffle_xor) MSL_BUILTIN(simd_shuffle_up) MSL_BUILTIN(simd_shuffle_down)
MSL_BUILTIN(simd_shuffle_rotate_up) MSL_BUILTIN(simd_shuffle_rotate_down)
MSL_BUILTIN(simd_shuffle_and_fill_up) MSL_BUILTIN(simd_shuffle_and_fill_down)
MSL_BUILTIN(simd_prefix_inclusive_sum) MSL_BUILTIN(simd_prefix_exclusive_sum)
MSL_BUILTIN(simd_prefix_inclusive_product) MSL_BUILTIN(simd_prefix_exclusive_product)
#undef MSL_BUILTIN
template <class T>
metal::make_signed_t<T> __metal_ilogb(T);
ushort __metal_get_simdgroup_size(ushort);
ushort __metal_get_thread_index_in_simdgroup(ushort);
#define __METAL_SIMDGROUP_SIZE__ 32

template <class T>
constexpr bool is_function_constant_defined(T) {
  return true;
}

#define assert(condition) ((void)(condition))

namespace metal {
struct MSL_SINCE_3_2 os_log {
  os_log(constant char*, constant char*);
  template <class... A>
  void log(constant char*, A...) const;
  template <class... A>
  void log_debug(constant char*, A...) const;
  template <class... A>
  void log_info(constant char*, A...) const;
  template <class... A>
  void log_error(constant char*, A...) const;
  template <class... A>
  void log_fault(constant char*, A...) const;
};
extern constant os_log os_log_default MSL_SINCE_3_2;
}  // namespace metal
