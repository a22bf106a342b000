// Activations with their derivatives: of single elements, of a gate that multiplies, and of a sum with a bias. The
// gradient kernels of single elements take (input, gradient of the output).
//
// y = activation(gate) * up and y = activation(x + bias): a thread of the packed kernels has 16 bytes of a row, where
// all rows begin and end at multiples of 16 bytes; a thread of the dense ones has one element. The derivatives compute
// the activation again. A thread of the derivative with a bias walks over a chunk of the rows, and leaves its part of
// the bias's gradient to normalization/column_sums.metal.
#include "activation/activation.h"
#include "activation/formulas.h"
#include "common/elementwise_kernels.h"

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

template <typename Op, typename T>
kernel void biased_dense(device const T* x [[buffer(0)]], device const T* bias [[buffer(1)]], device T* y [[buffer(2)]],
                         constant BiasedParams& params [[buffer(3)]], uint2 at [[thread_position_in_grid]]) {
  const float v = static_cast<float>(x[at.y * params.x_stride + at.x]) + static_cast<float>(bias[at.x]);
  y[ulong(at.y) * params.length + at.x] = static_cast<T>(Op::forward(v));
}

template <typename Op, typename T>
kernel void biased_packed(device const T* x [[buffer(0)]], device const T* bias [[buffer(1)]],
                          device T* y [[buffer(2)]], constant BiasedParams& params [[buffer(3)]],
                          uint2 at [[thread_position_in_grid]]) {
  constexpr uint N = kPackVectors<T>;
  const uint column = at.x * kPackElements<T>;
  float4 v[N], b[N];
  unpack(*reinterpret_cast<device const Pack<T>*>(x + at.y * params.x_stride + column), v);
  unpack(*reinterpret_cast<device const Pack<T>*>(bias + column), b);
#pragma unroll
  for (uint n = 0; n < N; ++n) {
#pragma unroll
    for (uint k = 0; k < 4; ++k) v[n][k] = Op::forward(v[n][k] + b[n][k]);
  }
  *reinterpret_cast<device Pack<T>*>(y + ulong(at.y) * params.length + column) = packed<T>(v);
}

template <typename Gradient, typename T>
kernel void biased_backward_dense(device const T* grad [[buffer(0)]], device const T* x [[buffer(1)]],
                                  device const T* bias [[buffer(2)]], device T* gx [[buffer(3)]],
                                  device float* partial [[buffer(4)]], constant BiasedParams& params [[buffer(5)]],
                                  uint2 at [[thread_position_in_grid]]) {
  const uint last = min((at.y + 1) * params.chunk_rows, params.rows);
  const float b = static_cast<float>(bias[at.x]);
  float sum = 0.0f;
  for (ulong row = at.y * params.chunk_rows; row < last; ++row) {
    const float v = static_cast<float>(x[row * params.x_stride + at.x]) + b;
    const float value = Gradient::forward(v, static_cast<float>(grad[row * params.grad_stride + at.x]));
    gx[row * params.length + at.x] = static_cast<T>(value);
    sum += value;
  }
  partial[ulong(at.y) * params.length + at.x] = sum;
}

// Rows of a thread that are on their way at once.
constexpr constant uint kRowsAtOnce = 4;

template <typename Gradient, typename T>
kernel void biased_backward_packed(device const T* grad [[buffer(0)]], device const T* x [[buffer(1)]],
                                   device const T* bias [[buffer(2)]], device T* gx [[buffer(3)]],
                                   device float* partial [[buffer(4)]], constant BiasedParams& params [[buffer(5)]],
                                   uint2 at [[thread_position_in_grid]]) {
  constexpr uint N = kPackVectors<T>;
  const uint column = at.x * kPackElements<T>;
  const ulong last = min((at.y + 1) * params.chunk_rows, params.rows);
  float4 b[N], sum[N];
  unpack(*reinterpret_cast<device const Pack<T>*>(bias + column), b);
  for (uint n = 0; n < N; ++n) sum[n] = float4(0.0f);
  for (ulong first = at.y * params.chunk_rows; first < last; first += kRowsAtOnce) {
    Pack<T> v[kRowsAtOnce], g[kRowsAtOnce];
#pragma unroll
    for (uint r = 0; r < kRowsAtOnce; ++r) {
      const ulong row = min(first + r, last - 1);
      v[r] = *reinterpret_cast<device const Pack<T>*>(x + row * params.x_stride + column);
      g[r] = *reinterpret_cast<device const Pack<T>*>(grad + row * params.grad_stride + column);
    }
#pragma unroll
    for (uint r = 0; r < kRowsAtOnce; ++r) {
      if (first + r >= last) continue;
      float4 values[N], grads[N];
      unpack(v[r], values);
      unpack(g[r], grads);
#pragma unroll
      for (uint n = 0; n < N; ++n) {
#pragma unroll
        for (uint k = 0; k < 4; ++k) values[n][k] = Gradient::forward(values[n][k] + b[n][k], grads[n][k]);
        sum[n] += values[n];
      }
      *reinterpret_cast<device Pack<T>*>(gx + (first + r) * params.length + column) = packed<T>(values);
    }
  }
  for (uint n = 0; n < N; ++n)
    *reinterpret_cast<device float4*>(partial + ulong(at.y) * params.length + column + 4 * n) = sum[n];
}

INSTANTIATE_UNARY("silu", Silu)
INSTANTIATE_BINARY("silu_backward", SiluGradient)
INSTANTIATE_UNARY("relu", Relu)
INSTANTIATE_BINARY("relu_backward", ReluGradient)
INSTANTIATE_UNARY("gelu", Gelu)
INSTANTIATE_BINARY("gelu_backward", GeluGradient)
INSTANTIATE_UNARY("gelu_tanh", GeluTanh)
INSTANTIATE_BINARY("gelu_tanh_backward", GeluTanhGradient)
INSTANTIATE_UNARY("relu2", Relu2)
INSTANTIATE_BINARY("relu2_backward", Relu2Gradient)
INSTANTIATE_UNARY("quick_gelu", QuickGelu)
INSTANTIATE_BINARY("quick_gelu_backward", QuickGeluGradient)

#define INSTANTIATE(name, types, ...) template[[host_name(name types)]] [[kernel]] decltype(__VA_ARGS__) __VA_ARGS__;

#define INSTANTIATE_GATED(name, Op, types, T)                                                          \
  INSTANTIATE("gated_" name "_dense", types, gated_dense<Op<T>, T>)                                    \
  INSTANTIATE("gated_" name "_packed", types, gated_packed<Op<T>, T>)                                  \
  INSTANTIATE("gated_" name "_backward_dense", types, gated_backward_dense<Op<T>, Op##Gradient<T>, T>) \
  INSTANTIATE("gated_" name "_backward_packed", types, gated_backward_packed<Op<T>, Op##Gradient<T>, T>)

#define INSTANTIATE_BIASED(name, Op, types, T)                                                    \
  INSTANTIATE("biased_" name "_dense", types, biased_dense<Op<T>, T>)                             \
  INSTANTIATE("biased_" name "_packed", types, biased_packed<Op<T>, T>)                           \
  INSTANTIATE("biased_" name "_backward_dense", types, biased_backward_dense<Op##Gradient<T>, T>) \
  INSTANTIATE("biased_" name "_backward_packed", types, biased_backward_packed<Op##Gradient<T>, T>)

#define INSTANTIATE_TYPES(types, T)                  \
  INSTANTIATE_GATED("silu", Silu, types, T)          \
  INSTANTIATE_GATED("gelu", Gelu, types, T)          \
  INSTANTIATE_GATED("gelu_tanh", GeluTanh, types, T) \
  INSTANTIATE_BIASED("silu", Silu, types, T)         \
  INSTANTIATE_BIASED("gelu", Gelu, types, T)         \
  INSTANTIATE_BIASED("gelu_tanh", GeluTanh, types, T)

INSTANTIATE_TYPES("_float", float)
INSTANTIATE_TYPES("_half", half)
INSTANTIATE_TYPES("_bfloat", bfloat)
