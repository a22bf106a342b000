// y = activation(x + bias) and its derivative. A thread of the packed kernels has 16 bytes of a row, where all rows
// begin and end at multiples of 16 bytes; a thread of the dense ones has one element. A thread of the derivative walks
// over a chunk of the rows, and leaves its part of the bias's gradient to normalization/column_sums.metal.
#include "activation/activation.h"
#include "activation/formulas.h"
#include "common/pack.h"

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

#define INSTANTIATE(name, types, ...) template[[host_name(name types)]] [[kernel]] decltype(__VA_ARGS__) __VA_ARGS__;

#define INSTANTIATE_BIASED(name, Op, types, T)                                                    \
  INSTANTIATE("biased_" name "_dense", types, biased_dense<Op<T>, T>)                             \
  INSTANTIATE("biased_" name "_packed", types, biased_packed<Op<T>, T>)                           \
  INSTANTIATE("biased_" name "_backward_dense", types, biased_backward_dense<Op##Gradient<T>, T>) \
  INSTANTIATE("biased_" name "_backward_packed", types, biased_backward_packed<Op##Gradient<T>, T>)

#define INSTANTIATE_TYPES(types, T)          \
  INSTANTIATE_BIASED("silu", Silu, types, T) \
  INSTANTIATE_BIASED("gelu", Gelu, types, T) \
  INSTANTIATE_BIASED("gelu_tanh", GeluTanh, types, T)

INSTANTIATE_TYPES("_float", float)
INSTANTIATE_TYPES("_half", half)
INSTANTIATE_TYPES("_bfloat", bfloat)
