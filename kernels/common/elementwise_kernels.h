// Kernels that apply Op to every element. The arithmetic is float32 for every type T in memory.
//
//   packed   all tensors fill memory in the same order; 16 bytes' worth of elements per thread
//   dense    the same, one element per thread
//   strided  inputs lie anyhow, the output is dense; one element per thread
//
// Op has `static float forward(float)`, or `static float forward(float, float)` for two inputs. Op is a template whose
// argument is T.
#pragma once

#include <metal_stdlib>

#include "common/pack.h"
#include "common/strided.h"

using namespace metal;

template <typename Op>
inline float4 forward4(float4 u) {
  return float4(Op::forward(u.x), Op::forward(u.y), Op::forward(u.z), Op::forward(u.w));
}
template <typename Op>
inline float4 forward4(float4 u, float4 v) {
  return float4(Op::forward(u.x, v.x), Op::forward(u.y, v.y), Op::forward(u.z, v.z), Op::forward(u.w, v.w));
}

template <typename Op, typename T>
inline Pack<T> forward_pack(Pack<T> a) {
  float4 values[kPackVectors<T>];
  unpack(a, values);
#pragma unroll
  for (uint n = 0; n < kPackVectors<T>; ++n) values[n] = forward4<Op>(values[n]);
  return packed<T>(values);
}
template <typename Op, typename T>
inline Pack<T> forward_pack(Pack<T> a, Pack<T> b) {
  float4 values[kPackVectors<T>], others[kPackVectors<T>];
  unpack(a, values);
  unpack(b, others);
#pragma unroll
  for (uint n = 0; n < kPackVectors<T>; ++n) values[n] = forward4<Op>(values[n], others[n]);
  return packed<T>(values);
}

template <typename Op, typename T>
kernel void unary_dense(device const T* x [[buffer(0)]], device T* y [[buffer(1)]],
                        uint i [[thread_position_in_grid]]) {
  y[i] = static_cast<T>(Op::forward(static_cast<float>(x[i])));
}

template <typename Op, typename T>
kernel void unary_packed(device const Pack<T>* x [[buffer(0)]], device Pack<T>* y [[buffer(1)]],
                         uint i [[thread_position_in_grid]]) {
  y[i] = forward_pack<Op>(x[i]);
}

template <typename Op, typename T>
kernel void binary_dense(device const T* a [[buffer(0)]], device const T* b [[buffer(1)]], device T* y [[buffer(2)]],
                         uint i [[thread_position_in_grid]]) {
  y[i] = static_cast<T>(Op::forward(static_cast<float>(a[i]), static_cast<float>(b[i])));
}

template <typename Op, typename T>
kernel void binary_packed(device const Pack<T>* a [[buffer(0)]], device const Pack<T>* b [[buffer(1)]],
                          device Pack<T>* y [[buffer(2)]], uint i [[thread_position_in_grid]]) {
  y[i] = forward_pack<Op>(a[i], b[i]);
}

// The offset in input `k` of the element at position i of the output.
inline long strided_offset(constant StridedParams& params, uint k, uint i) {
  long offset = 0;
  for (uint d = 0; d < params.dims; ++d) {
    offset += (i % params.sizes[d]) * params.strides[k][d];
    i /= params.sizes[d];
  }
  return offset;
}

template <typename Op, typename T>
kernel void unary_strided(device const T* x [[buffer(0)]], device T* y [[buffer(1)]],
                          constant StridedParams& params [[buffer(2)]], uint i [[thread_position_in_grid]]) {
  y[i] = static_cast<T>(Op::forward(static_cast<float>(x[strided_offset(params, 0, i)])));
}

template <typename Op, typename T>
kernel void binary_strided(device const T* a [[buffer(0)]], device const T* b [[buffer(1)]], device T* y [[buffer(2)]],
                           constant StridedParams& params [[buffer(3)]], uint i [[thread_position_in_grid]]) {
  const float u = static_cast<float>(a[strided_offset(params, 0, i)]);
  const float v = static_cast<float>(b[strided_offset(params, 1, i)]);
  y[i] = static_cast<T>(Op::forward(u, v));
}

#define INSTANTIATE_UNARY_AS(name, Op, suffix, T)                                                                    \
  template [[host_name(name "_dense_" suffix)]] kernel void unary_dense<Op<T>, T>(device const T*, device T*, uint); \
  template [[host_name(name "_packed_" suffix)]] kernel void unary_packed<Op<T>, T>(device const Pack<T>*,           \
                                                                                    device Pack<T>*, uint);          \
  template [[host_name(name "_strided_" suffix)]] kernel void unary_strided<Op<T>, T>(device const T*, device T*,    \
                                                                                      constant StridedParams&, uint);

#define INSTANTIATE_BINARY_AS(name, Op, suffix, T)                                                                   \
  template [[host_name(name "_dense_" suffix)]] kernel void binary_dense<Op<T>, T>(device const T*, device const T*, \
                                                                                   device T*, uint);                 \
  template [[host_name(name "_packed_" suffix)]] kernel void binary_packed<Op<T>, T>(                                \
      device const Pack<T>*, device const Pack<T>*, device Pack<T>*, uint);                                          \
  template [[host_name(name "_strided_" suffix)]] kernel void binary_strided<Op<T>, T>(                              \
      device const T*, device const T*, device T*, constant StridedParams&, uint);

#define INSTANTIATE_UNARY(name, Op)              \
  INSTANTIATE_UNARY_AS(name, Op, "float", float) \
  INSTANTIATE_UNARY_AS(name, Op, "half", half)   \
  INSTANTIATE_UNARY_AS(name, Op, "bfloat", bfloat)

#define INSTANTIATE_BINARY(name, Op)              \
  INSTANTIATE_BINARY_AS(name, Op, "float", float) \
  INSTANTIATE_BINARY_AS(name, Op, "half", half)   \
  INSTANTIATE_BINARY_AS(name, Op, "bfloat", bfloat)
