// Sums x + alpha y of tensors that lie in the same order (packed, dense) or anyhow (strided), and conversions between
// floating-point dtypes, to the nearest number, and to the even one of two.
#include "common/elementwise_kernels.h"

template <typename T>
inline Pack<T> scaled_sum(Pack<T> x, Pack<T> y, float alpha) {
  float4 sums[kPackVectors<T>], added[kPackVectors<T>];
  unpack(x, sums);
  unpack(y, added);
#pragma unroll
  for (uint n = 0; n < kPackVectors<T>; ++n) sums[n] = fma(float4(alpha), added[n], sums[n]);
  return packed<T>(sums);
}
template <typename T>
inline T scaled_sum(T x, T y, float alpha) {
  return static_cast<T>(fma(alpha, static_cast<float>(y), static_cast<float>(x)));
}

template <typename T>
kernel void add_packed(device const Pack<T>* x [[buffer(0)]], device const Pack<T>* y [[buffer(1)]],
                       device Pack<T>* sum [[buffer(2)]], constant float& alpha [[buffer(3)]],
                       uint i [[thread_position_in_grid]]) {
  sum[i] = scaled_sum(x[i], y[i], alpha);
}

template <typename T>
kernel void add_dense(device const T* x [[buffer(0)]], device const T* y [[buffer(1)]], device T* sum [[buffer(2)]],
                      constant float& alpha [[buffer(3)]], uint i [[thread_position_in_grid]]) {
  sum[i] = scaled_sum(x[i], y[i], alpha);
}

template <typename T>
kernel void add_strided(device const T* x [[buffer(0)]], device const T* y [[buffer(1)]], device T* sum [[buffer(2)]],
                        constant float& alpha [[buffer(3)]], constant StridedParams& params [[buffer(4)]],
                        uint i [[thread_position_in_grid]]) {
  sum[i] = scaled_sum(x[strided_offset(params, 0, i)], y[strided_offset(params, 1, i)], alpha);
}

#define INSTANTIATE_ADD(suffix, T)                                                               \
  template [[host_name("add_packed_" suffix)]] [[kernel]] decltype(add_packed<T>) add_packed<T>; \
  template [[host_name("add_dense_" suffix)]] [[kernel]] decltype(add_dense<T>) add_dense<T>;    \
  template [[host_name("add_strided_" suffix)]] [[kernel]] decltype(add_strided<T>) add_strided<T>;
INSTANTIATE_ADD("float", float)
INSTANTIATE_ADD("half", half)
INSTANTIATE_ADD("bfloat", bfloat)

// A thread has four elements.
template <typename From, typename To>
kernel void cast_dense(device const vec<From, 4>* x [[buffer(0)]], device vec<To, 4>* y [[buffer(1)]],
                       uint i [[thread_position_in_grid]]) {
  y[i] = static_cast<vec<To, 4>>(static_cast<float4>(x[i]));
}

template <typename From, typename To>
kernel void cast_strided(device const From* x [[buffer(0)]], device To* y [[buffer(1)]],
                         constant StridedParams& params [[buffer(2)]], uint i [[thread_position_in_grid]]) {
  y[i] = static_cast<To>(static_cast<float>(x[strided_offset(params, 0, i)]));
}

#define INSTANTIATE_CAST(From, To)                                                                                    \
  template [[host_name("cast_dense_" #From "_" #To)]] [[kernel]] decltype(cast_dense<From, To>) cast_dense<From, To>; \
  template                                                                                                            \
      [[host_name("cast_strided_" #From "_" #To)]] [[kernel]] decltype(cast_strided<From, To>) cast_strided<From, To>;
INSTANTIATE_CAST(float, half)
INSTANTIATE_CAST(float, bfloat)
INSTANTIATE_CAST(half, float)
INSTANTIATE_CAST(half, bfloat)
INSTANTIATE_CAST(bfloat, float)
INSTANTIATE_CAST(bfloat, half)
