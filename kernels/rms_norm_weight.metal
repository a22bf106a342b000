// The gradient of rms_norm's weight: the sum over rows of the output's gradient times s x, with s the scale of a row.
// It is made in two stages without atomics, so that the order of the additions is always the same: `partial` sums, here
// or in rms_norm_backward.metal, and the sum of these.
#include "common/norm_rows.h"

// Partial sums by themselves: a thread has four columns and a chunk of the rows.
template <bool aligned, typename T>
inline void sum_chunk(device const T* grad, device const T* x, device const float* scales, device float* partial,
                      constant RmsNormWeightParams& params, uint2 at) {
  const uint column = at.x * 4;
  const uint first = at.y * params.chunk_rows;
  const uint last = min(first + params.chunk_rows, params.rows);
  float4 sum = float4(0.0f);
  for (uint row = first; row < last; ++row) {
    sum += load4<aligned>(grad + row * params.grad_stride, column, params.length, 0.0f) *
           load4<aligned>(x + row * params.x_stride, column, params.length, 0.0f) * scales[row];
  }
  store4<false>(partial + ulong(at.y) * params.length, column, params.length, sum);
}

template <typename T>
kernel void rms_norm_weight_partial(device const T* grad [[buffer(0)]], device const T* x [[buffer(1)]],
                                    device const float* scales [[buffer(2)]], device float* partial [[buffer(3)]],
                                    constant RmsNormWeightParams& params [[buffer(4)]],
                                    uint2 at [[thread_position_in_grid]]) {
  if (params.aligned)
    sum_chunk<true>(grad, x, scales, partial, params, at);
  else
    sum_chunk<false>(grad, x, scales, partial, params, at);
}

// The sum of the partial ones: few of them column by column, a thread for each …
template <typename W>
kernel void rms_norm_weight_thread(device const float* partial [[buffer(0)]], device W* gw [[buffer(1)]],
                                   constant RmsNormWeightParams& params [[buffer(2)]],
                                   uint column [[thread_position_in_grid]]) {
  float sum = 0.0f;
  for (uint chunk = 0; chunk < params.chunks; ++chunk) sum += partial[ulong(chunk) * params.length + column];
  gw[column] = static_cast<W>(sum);
}

// … many of them by threadgroups for 32 columns: each of their simdgroups has every 16th, some on their way at once.
constexpr constant uint kSimdgroups = 16;
constexpr constant uint kAtOnce = 17;

template <typename W>
[[kernel]] [[max_total_threads_per_threadgroup(512)]] void rms_norm_weight_block(
    device const float* partial [[buffer(0)]], device W* gw [[buffer(1)]],
    constant RmsNormWeightParams& params [[buffer(2)]], uint group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup float sums[kSimdgroups * 32];
  const uint column = min(group * 32 + lane, params.length - 1);
  float sum = 0.0f;
  for (uint first = simdgroup; first < params.chunks; first += kSimdgroups * kAtOnce) {
    float values[kAtOnce];
#pragma unroll
    for (uint i = 0; i < kAtOnce; ++i) {
      const uint chunk = first + kSimdgroups * i;
      values[i] = chunk < params.chunks ? partial[ulong(chunk) * params.length + column] : 0.0f;
    }
#pragma unroll
    for (uint i = 0; i < kAtOnce; ++i) sum += values[i];
  }
  sums[simdgroup * 32 + lane] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (simdgroup > 0 || group * 32 + lane >= params.length) return;
  float total = 0.0f;
#pragma unroll
  for (uint i = 0; i < kSimdgroups; ++i) total += sums[i * 32 + lane];
  gw[column] = static_cast<W>(total);
}

#define INSTANTIATE(name, types, ...) template[[host_name(name types)]] [[kernel]] decltype(__VA_ARGS__) __VA_ARGS__;

#define INSTANTIATE_WEIGHT(types, T)                                        \
  INSTANTIATE("rms_norm_weight_partial", types, rms_norm_weight_partial<T>) \
  INSTANTIATE("rms_norm_weight_thread", types, rms_norm_weight_thread<T>)   \
  INSTANTIATE("rms_norm_weight_block", types, rms_norm_weight_block<T>)

INSTANTIATE_WEIGHT("_float", float)
INSTANTIATE_WEIGHT("_half", half)
INSTANTIATE_WEIGHT("_bfloat", bfloat)
