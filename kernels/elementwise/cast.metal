// Conversions between floating-point dtypes, to the nearest number, and to the even one of two. In the dense kernel a
// thread has four elements.
#include "common/elementwise_kernels.h"

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

#define INSTANTIATE(From, To)                                                                                         \
  template [[host_name("cast_dense_" #From "_" #To)]] [[kernel]] decltype(cast_dense<From, To>) cast_dense<From, To>; \
  template                                                                                                            \
      [[host_name("cast_strided_" #From "_" #To)]] [[kernel]] decltype(cast_strided<From, To>) cast_strided<From, To>;
INSTANTIATE(float, half)
INSTANTIATE(float, bfloat)
INSTANTIATE(half, float)
INSTANTIATE(half, bfloat)
INSTANTIATE(bfloat, float)
INSTANTIATE(bfloat, half)
