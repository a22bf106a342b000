// Kernels that apply Op to every element: float32 arithmetic whatever the type T in memory.
//
//   dense    all tensors fill memory in the same order; N elements per thread (1 or 4), grid = elements / N
//   strided  inputs lie anyhow, the output is dense; one element per thread
//
// Op has `static float forward(float)`, or `static float forward(float, float)` for two inputs.
#pragma once

#include <metal_stdlib>

#include "common/strided.h"

using namespace metal;

template <typename Op, typename T>
kernel void unary_dense(device const T* x [[buffer(0)]],
                        device T* y [[buffer(1)]],
                        uint i [[thread_position_in_grid]]) {
  y[i] = static_cast<T>(Op::forward(static_cast<float>(x[i])));
}

template <typename Op, typename T>
kernel void unary_dense4(device const vec<T, 4>* x [[buffer(0)]],
                         device vec<T, 4>* y [[buffer(1)]],
                         uint i [[thread_position_in_grid]]) {
  const float4 a = static_cast<float4>(x[i]);
  y[i] = static_cast<vec<T, 4>>(
      float4(Op::forward(a.x), Op::forward(a.y), Op::forward(a.z), Op::forward(a.w)));
}

template <typename Op, typename T>
kernel void binary_dense(device const T* a [[buffer(0)]],
                         device const T* b [[buffer(1)]],
                         device T* y [[buffer(2)]],
                         uint i [[thread_position_in_grid]]) {
  y[i] = static_cast<T>(Op::forward(static_cast<float>(a[i]), static_cast<float>(b[i])));
}

template <typename Op, typename T>
kernel void binary_dense4(device const vec<T, 4>* a [[buffer(0)]],
                          device const vec<T, 4>* b [[buffer(1)]],
                          device vec<T, 4>* y [[buffer(2)]],
                          uint i [[thread_position_in_grid]]) {
  const float4 u = static_cast<float4>(a[i]);
  const float4 v = static_cast<float4>(b[i]);
  y[i] = static_cast<vec<T, 4>>(float4(Op::forward(u.x, v.x), Op::forward(u.y, v.y),
                                       Op::forward(u.z, v.z), Op::forward(u.w, v.w)));
}

// Where input `k` has the element that the output has at position i.
inline long strided_offset(constant StridedParams& params, uint k, uint i) {
  long offset = 0;
  for (uint d = 0; d < params.dims; ++d) {
    offset += (i % params.sizes[d]) * params.strides[k][d];
    i /= params.sizes[d];
  }
  return offset;
}

template <typename Op, typename T>
kernel void unary_strided(device const T* x [[buffer(0)]],
                          device T* y [[buffer(1)]],
                          constant StridedParams& params [[buffer(2)]],
                          uint i [[thread_position_in_grid]]) {
  y[i] = static_cast<T>(Op::forward(static_cast<float>(x[strided_offset(params, 0, i)])));
}

template <typename Op, typename T>
kernel void binary_strided(device const T* a [[buffer(0)]],
                           device const T* b [[buffer(1)]],
                           device T* y [[buffer(2)]],
                           constant StridedParams& params [[buffer(3)]],
                           uint i [[thread_position_in_grid]]) {
  const float u = static_cast<float>(a[strided_offset(params, 0, i)]);
  const float v = static_cast<float>(b[strided_offset(params, 1, i)]);
  y[i] = static_cast<T>(Op::forward(u, v));
}

#define INSTANTIATE_UNARY_AS(name, Op, suffix, T)                                                          \
  template [[host_name(name "_dense_" suffix)]] kernel void unary_dense<Op, T>(                            \
      device const T*, device T*, uint);                                                                   \
  template [[host_name(name "_dense4_" suffix)]] kernel void unary_dense4<Op, T>(                          \
      device const vec<T, 4>*, device vec<T, 4>*, uint);                                                   \
  template [[host_name(name "_strided_" suffix)]] kernel void unary_strided<Op, T>(                        \
      device const T*, device T*, constant StridedParams&, uint);

#define INSTANTIATE_BINARY_AS(name, Op, suffix, T)                                                         \
  template [[host_name(name "_dense_" suffix)]] kernel void binary_dense<Op, T>(                           \
      device const T*, device const T*, device T*, uint);                                                  \
  template [[host_name(name "_dense4_" suffix)]] kernel void binary_dense4<Op, T>(                         \
      device const vec<T, 4>*, device const vec<T, 4>*, device vec<T, 4>*, uint);                          \
  template [[host_name(name "_strided_" suffix)]] kernel void binary_strided<Op, T>(                       \
      device const T*, device const T*, device T*, constant StridedParams&, uint);

#define INSTANTIATE_UNARY(name, Op)                \
  INSTANTIATE_UNARY_AS(name, Op, "float", float)   \
  INSTANTIATE_UNARY_AS(name, Op, "half", half)     \
  INSTANTIATE_UNARY_AS(name, Op, "bfloat", bfloat)

#define INSTANTIATE_BINARY(name, Op)                \
  INSTANTIATE_BINARY_AS(name, Op, "float", float)   \
  INSTANTIATE_BINARY_AS(name, Op, "half", half)     \
  INSTANTIATE_BINARY_AS(name, Op, "bfloat", bfloat)
