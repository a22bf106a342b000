// group_norm: y = (x - mean) / sqrt(variance + eps) * weight + bias, with mean and variance of each group of channels,
// and a weight and a bias for each channel. A threadgroup walks over a group twice, and merges means and sums of
// squared deviations of parts (moments.h). Mean and 1 / sqrt(variance + eps) of each group are kept for the derivative.
// In `aligned` dispatches channels begin and end at multiples of 16 bytes.
#include "common/held.h"
#include "normalization/normalization.h"
#include "normalization/moments.h"

inline float scale_of(float squares, constant GroupNormParams& params) {
  return rsqrt(squares / static_cast<float>(params.channels * params.area) + params.eps);
}

// The factor and the addend that make a channel's results of its elements.
template <typename T>
inline float2 factors_of(device const T* weight, device const T* bias, constant GroupNormParams& params, uint channel,
                         float mean, float scale) {
  const float factor = params.has_weight ? scale * static_cast<float>(weight[channel]) : scale;
  return float2(factor, params.has_bias ? static_cast<float>(bias[channel]) : 0.0f);
}

template <typename T>
kernel void group_norm_thread(device const T* x [[buffer(0)]], device const T* weight [[buffer(1)]],
                              device const T* bias [[buffer(2)]], device T* y [[buffer(3)]],
                              device float* means [[buffer(4)]], device float* scales [[buffer(5)]],
                              constant GroupNormParams& params [[buffer(6)]], uint row [[thread_position_in_grid]]) {
  const uint length = params.channels * params.area;
  x += ulong(row) * length;
  y += ulong(row) * length;
  LongSum<float> total, squares;
  for (uint start = 0; start < length; start += kSumBlock) {
    const uint end = min(start + kSumBlock, length);
    float part = 0.0f;
    for (uint i = start; i < end; ++i) part += static_cast<float>(x[i]);
    total.add(part);
  }
  const float mean = total.total() / static_cast<float>(length);
  for (uint start = 0; start < length; start += kSumBlock) {
    const uint end = min(start + kSumBlock, length);
    float part = 0.0f;
    for (uint i = start; i < end; ++i) {
      const float d = static_cast<float>(x[i]) - mean;
      part += d * d;
    }
    squares.add(part);
  }
  const float scale = scale_of(squares.total(), params);
  means[row] = mean;
  scales[row] = scale;
  for (uint channel = 0; channel < params.channels; ++channel) {
    const float2 factors =
        factors_of(weight, bias, params, row % params.groups * params.channels + channel, mean, scale);
    for (uint i = channel * params.area; i < (channel + 1) * params.area; ++i)
      y[i] = static_cast<T>(fma(static_cast<float>(x[i]) - mean, factors.x, factors.y));
  }
}

template <bool aligned, typename T>
[[kernel]] [[max_total_threads_per_threadgroup(1024)]] void group_norm_looped(
    device const T* x [[buffer(0)]], device const T* weight [[buffer(1)]], device const T* bias [[buffer(2)]],
    device T* y [[buffer(3)]], device float* means [[buffer(4)]], device float* scales [[buffer(5)]],
    constant GroupNormParams& params [[buffer(6)]], uint row [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint threads [[threads_per_threadgroup]]) {
  constexpr uint N = kWalkStep<aligned, T>;
  typedef Slice<aligned, T, N> RowSlice;
  threadgroup float scratch[3 * 32];
  const Threadgroup team(thread_index, threads, scratch);
  const uint length = params.channels * params.area;
  const uint first_channel = row % params.groups * params.channels;
  x += ulong(row) * length;
  y += ulong(row) * length;
  Seen seen;
  for (uint start = 0; start < length; start += threads * 4 * N) {
    const RowSlice slice(thread_index, start);
    typename RowSlice::template Of<T> v;
    slice.fetch(v, x, length);
    see(seen, slice, v, length);
  }
  seen = merged(merged(seen, simd_sum(seen.count)), length, team);
  const float mean = seen.mean;
  const float scale = scale_of(seen.squares, params);
  if (thread_index == 0) {
    means[row] = mean;
    scales[row] = scale;
  }
  for (uint start = 0; start < length; start += threads * 4 * N) {
    const RowSlice slice(thread_index, start);
    typename RowSlice::template Of<T> v;
    slice.fetch(v, x, length);
    for (uint n = 0; n < N; ++n) {
      float4 factor, addend;
      const uint i = slice.first + slice.behind(n, 0);
      if (aligned) {
        const uint channel = first_channel + min(i, length - 1) / params.area;
        const float2 factors = factors_of(weight, bias, params, channel, mean, scale);
        factor = float4(factors.x);
        addend = float4(factors.y);
      } else {
        for (uint k = 0; k < 4; ++k) {
          const uint channel = first_channel + min(slice.first + slice.behind(n, k), length - 1) / params.area;
          const float2 factors = factors_of(weight, bias, params, channel, mean, scale);
          factor[k] = factors.x;
          addend[k] = factors.y;
        }
      }
      v.round(n, fma(v[n] - mean, factor, addend));
    }
    slice.store(v, y, length);
  }
}

#define INSTANTIATE(name, types, ...) template[[host_name(name types)]] [[kernel]] decltype(__VA_ARGS__) __VA_ARGS__;

#define INSTANTIATE_TYPES(types, T)                                    \
  INSTANTIATE("group_norm_thread", types, group_norm_thread<T>)        \
  INSTANTIATE("group_norm_looped", types, group_norm_looped<false, T>) \
  INSTANTIATE("group_norm_looped_aligned", types, group_norm_looped<true, T>)

INSTANTIATE_TYPES("_float", float)
INSTANTIATE_TYPES("_half", half)
INSTANTIATE_TYPES("_bfloat", bfloat)
