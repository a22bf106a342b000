// y = activation(gate) * up and its derivative, which computes the activation again. A thread of the packed kernels has
// 16 bytes of a row, where all rows begin and end at multiples of 16 bytes; a thread of the dense ones has one element.
#include "activation/formulas.h"
#include "activation/activation.h"
#include "common/pack.h"

template <typename Op, typename T>
kernel void gated_dense(device const T* gate [[buffer(0)]], device const T* up [[buffer(1)]], device T* y [[buffer(2)]],
                        constant GatedParams& params [[buffer(3)]], uint2 at [[thread_position_in_grid]]) {
  const float value = Op::forward(static_cast<float>(gate[at.y * params.gate_stride + at.x]));
  y[at.y * params.y_stride + at.x] = static_cast<T>(value * static_cast<float>(up[at.y * params.up_stride + at.x]));
}

template <typename T>
inline device const Pack<T>* pack_at(device const T* rows, long stride, uint2 at) {
  return reinterpret_cast<device const Pack<T>*>(rows + at.y * stride) + at.x;
}
template <typename T>
inline device Pack<T>* pack_at(device T* rows, long stride, uint2 at) {
  return reinterpret_cast<device Pack<T>*>(rows + at.y * stride) + at.x;
}

template <typename Op, typename T>
kernel void gated_packed(device const T* gate [[buffer(0)]], device const T* up [[buffer(1)]],
                         device T* y [[buffer(2)]], constant GatedParams& params [[buffer(3)]],
                         uint2 at [[thread_position_in_grid]]) {
  constexpr uint N = kPackVectors<T>;
  float4 g[N], u[N];
  unpack(*pack_at(gate, params.gate_stride, at), g);
  unpack(*pack_at(up, params.up_stride, at), u);
#pragma unroll
  for (uint n = 0; n < N; ++n) {
#pragma unroll
    for (uint k = 0; k < 4; ++k) g[n][k] = Op::forward(g[n][k]) * u[n][k];
  }
  *pack_at(y, params.y_stride, at) = packed<T>(g);
}

template <typename Op, typename Gradient, typename T>
kernel void gated_backward_dense(device const T* grad [[buffer(0)]], device const T* gate [[buffer(1)]],
                                 device const T* up [[buffer(2)]], device T* gate_grad [[buffer(3)]],
                                 device T* up_grad [[buffer(4)]], constant GatedParams& params [[buffer(5)]],
                                 uint2 at [[thread_position_in_grid]]) {
  const float d = static_cast<float>(grad[at.y * params.y_stride + at.x]);
  const float g = static_cast<float>(gate[at.y * params.gate_stride + at.x]);
  const float u = static_cast<float>(up[at.y * params.up_stride + at.x]);
  gate_grad[at.y * params.gate_grad_stride + at.x] = static_cast<T>(Gradient::forward(g, d * u));
  up_grad[at.y * params.up_grad_stride + at.x] = static_cast<T>(d * Op::forward(g));
}

template <typename Op, typename Gradient, typename T>
kernel void gated_backward_packed(device const T* grad [[buffer(0)]], device const T* gate [[buffer(1)]],
                                  device const T* up [[buffer(2)]], device T* gate_grad [[buffer(3)]],
                                  device T* up_grad [[buffer(4)]], constant GatedParams& params [[buffer(5)]],
                                  uint2 at [[thread_position_in_grid]]) {
  constexpr uint N = kPackVectors<T>;
  float4 d[N], g[N], u[N];
  unpack(*pack_at(grad, params.y_stride, at), d);
  unpack(*pack_at(gate, params.gate_stride, at), g);
  unpack(*pack_at(up, params.up_stride, at), u);
#pragma unroll
  for (uint n = 0; n < N; ++n) {
#pragma unroll
    for (uint k = 0; k < 4; ++k) {
      const float x = g[n][k];
      g[n][k] = Gradient::forward(x, d[n][k] * u[n][k]);
      u[n][k] = d[n][k] * Op::forward(x);
    }
  }
  *pack_at(gate_grad, params.gate_grad_stride, at) = packed<T>(g);
  *pack_at(up_grad, params.up_grad_stride, at) = packed<T>(u);
}

#define INSTANTIATE(name, types, ...) template[[host_name(name types)]] [[kernel]] decltype(__VA_ARGS__) __VA_ARGS__;

#define INSTANTIATE_GATED(name, Op, types, T)                                                          \
  INSTANTIATE("gated_" name "_dense", types, gated_dense<Op<T>, T>)                                    \
  INSTANTIATE("gated_" name "_packed", types, gated_packed<Op<T>, T>)                                  \
  INSTANTIATE("gated_" name "_backward_dense", types, gated_backward_dense<Op<T>, Op##Gradient<T>, T>) \
  INSTANTIATE("gated_" name "_backward_packed", types, gated_backward_packed<Op<T>, Op##Gradient<T>, T>)

#define INSTANTIATE_TYPES(types, T)         \
  INSTANTIATE_GATED("silu", Silu, types, T) \
  INSTANTIATE_GATED("gelu", Gelu, types, T) \
  INSTANTIATE_GATED("gelu_tanh", GeluTanh, types, T)

INSTANTIATE_TYPES("_float", float)
INSTANTIATE_TYPES("_half", half)
INSTANTIATE_TYPES("_bfloat", bfloat)
