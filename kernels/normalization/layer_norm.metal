// layer_norm over rows: y = (x - mean) / sqrt(variance + eps) * weight + bias, optionally of x + residual. Mean and
// 1 / sqrt(variance + eps) of each row are written where a derivative will need them. Longer rows than registers hold
// are walked twice: for mean and variance (moments.h), and for the results.
#include "normalization/norm_rows.h"
#include "normalization/normalization.h"
#include "normalization/moments.h"

// The mean of a row and the reciprocal of its standard deviation.
struct Moments {
  float mean;
  float scale;
};

inline float scale_of(float squares, constant LayerNormParams& params) {
  return rsqrt(squares / static_cast<float>(params.length) + params.eps);
}

template <typename T>
kernel void layer_norm_thread(device const T* x [[buffer(0)]], device const T* residual [[buffer(1)]],
                              device const T* weight [[buffer(2)]], device const T* bias [[buffer(3)]],
                              device T* y [[buffer(4)]], device T* sum [[buffer(5)]], device float* means [[buffer(6)]],
                              device float* scales [[buffer(7)]], constant LayerNormParams& params [[buffer(8)]],
                              uint row [[thread_position_in_grid]]) {
  const uint length = params.length;
  const bool has_weight = params.has_weight;
  const bool has_bias = params.has_bias;
  x += row_at(params.x, row);
  y += ulong(row) * length;
  if (params.has_residual) {
    residual += row_at(params.residual, row);
    sum += ulong(row) * length;
    for (uint i = 0; i < length; ++i)
      sum[i] = static_cast<T>(static_cast<float>(x[i]) + static_cast<float>(residual[i]));
    x = sum;
  }
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
  if (params.statistics) {
    means[row] = mean;
    scales[row] = scale;
  }
  for (uint i = 0; i < length; ++i) {
    const float normal = (static_cast<float>(x[i]) - mean) * scale;
    const float weighted = has_weight ? normal * static_cast<float>(weight[i]) : normal;
    y[i] = static_cast<T>(has_bias ? weighted + static_cast<float>(bias[i]) : weighted);
  }
}

template <bool aligned, uint N, typename T, typename Team>
inline Moments normalize_row(device const T* x, device const T* residual, device const T* weight, device const T* bias,
                             device T* y, device T* sum, constant LayerNormParams& params, Team team) {
  typedef Slice<aligned, T, N> RowSlice;
  const RowSlice slice(team.thread_index);
  const uint length = params.length;
  typename RowSlice::template Of<T> v;
  fetch_input(slice, v, x, residual, sum, params, length);
  const Seen seen = merged(seen_together(slice, v, team.thread_index / 32, length), length, team);
  const float mean = seen.mean;
  const float scale = scale_of(seen.squares, params);
  // The parameters are in the cache. Registers that would hold them from the start on hold more rows instead.
  typename RowSlice::template Of<T> w;
  typename RowSlice::template Of<T> b;
  fetch_parameter(slice, w, weight, params.has_weight, 1.0f, length);
  fetch_parameter(slice, b, bias, params.has_bias, 0.0f, length);
  for (uint n = 0; n < N; ++n) v.round(n, fma((v[n] - mean) * scale, w[n], b[n]));
  slice.store(v, y, length);
  return {mean, scale};
}

template <bool aligned, typename T, uint N>
kernel void layer_norm_simd(device const T* x [[buffer(0)]], device const T* residual [[buffer(1)]],
                            device const T* weight [[buffer(2)]], device const T* bias [[buffer(3)]],
                            device T* y [[buffer(4)]], device T* sum [[buffer(5)]], device float* means [[buffer(6)]],
                            device float* scales [[buffer(7)]], constant LayerNormParams& params [[buffer(8)]],
                            uint group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]],
                            uint simdgroup [[simdgroup_index_in_threadgroup]],
                            uint simdgroups [[simdgroups_per_threadgroup]]) {
  const ulong row = ulong(group) * simdgroups + simdgroup;
  if (row >= params.rows) return;
  const Moments found =
      normalize_row<aligned, N>(x + row_at(params.x, row), residual + row_at(params.residual, row), weight, bias,
                                y + row * params.length, sum + row * params.length, params, Simdgroup(lane));
  if (lane > 0 || !params.statistics) return;
  means[row] = found.mean;
  scales[row] = found.scale;
}

template <bool aligned, typename T, uint N>
[[kernel]] [[max_total_threads_per_threadgroup(512)]] void layer_norm_block(
    device const T* x [[buffer(0)]], device const T* residual [[buffer(1)]], device const T* weight [[buffer(2)]],
    device const T* bias [[buffer(3)]], device T* y [[buffer(4)]], device T* sum [[buffer(5)]],
    device float* means [[buffer(6)]], device float* scales [[buffer(7)]],
    constant LayerNormParams& params [[buffer(8)]], uint row [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint threads [[threads_per_threadgroup]]) {
  threadgroup float scratch[3 * 32];
  const Threadgroup team(thread_index, threads, scratch);
  const Moments found =
      normalize_row<aligned, N>(x + row_at(params.x, row), residual + row_at(params.residual, row), weight, bias,
                                y + ulong(row) * params.length, sum + ulong(row) * params.length, params, team);
  if (thread_index > 0 || !params.statistics) return;
  means[row] = found.mean;
  scales[row] = found.scale;
}

// A longer row in two walks: mean and variance, and the results.
template <bool aligned, typename T>
[[kernel]] [[max_total_threads_per_threadgroup(1024)]] void layer_norm_looped(
    device const T* x [[buffer(0)]], device const T* residual [[buffer(1)]], device const T* weight [[buffer(2)]],
    device const T* bias [[buffer(3)]], device T* y [[buffer(4)]], device T* sum [[buffer(5)]],
    device float* means [[buffer(6)]], device float* scales [[buffer(7)]],
    constant LayerNormParams& params [[buffer(8)]], uint row [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint threads [[threads_per_threadgroup]]) {
  constexpr uint N = kWalkStep<aligned, T>;
  typedef Slice<aligned, T, N> RowSlice;
  threadgroup float scratch[3 * 32];
  const Threadgroup team(thread_index, threads, scratch);
  const uint length = params.length;
  x += row_at(params.x, row);
  residual += row_at(params.residual, row);
  y += ulong(row) * length;
  sum += ulong(row) * length;
  Seen seen;
  for (uint start = 0; start < length; start += threads * 4 * N) {
    const RowSlice slice(thread_index, start);
    typename RowSlice::template Of<T> v;
    fetch_input(slice, v, x, residual, sum, params, length);
    see(seen, slice, v, length);
  }
  seen = merged(merged(seen, simd_sum(seen.count)), length, team);
  const float mean = seen.mean;
  const float scale = scale_of(seen.squares, params);
  if (thread_index == 0 && params.statistics) {
    means[row] = mean;
    scales[row] = scale;
  }
  // A thread that is past the end reads the row's last elements of `sum`, which another thread has written.
  threadgroup_barrier(mem_flags::mem_device);
  device const T* const input = params.has_residual ? sum : x;
  for (uint start = 0; start < length; start += threads * 4 * N) {
    const RowSlice slice(thread_index, start);
    typename RowSlice::template Of<T> v;
    typename RowSlice::template Of<T> w;
    typename RowSlice::template Of<T> b;
    slice.fetch(v, input, length);
    fetch_parameter(slice, w, weight, params.has_weight, 1.0f, length);
    fetch_parameter(slice, b, bias, params.has_bias, 0.0f, length);
    for (uint n = 0; n < N; ++n) v.round(n, fma((v[n] - mean) * scale, w[n], b[n]));
    slice.store(v, y, length);
  }
}

#define INSTANTIATE(name, types, ...) template[[host_name(name types)]] [[kernel]] decltype(__VA_ARGS__) __VA_ARGS__;

#define INSTANTIATE_ROWS(layout, aligned, types, T)                               \
  INSTANTIATE("layer_norm_simd1" layout, types, layer_norm_simd<aligned, T, 1>)   \
  INSTANTIATE("layer_norm_simd4" layout, types, layer_norm_simd<aligned, T, 4>)   \
  INSTANTIATE("layer_norm_block4" layout, types, layer_norm_block<aligned, T, 4>) \
  INSTANTIATE("layer_norm_block8" layout, types, layer_norm_block<aligned, T, 8>) \
  INSTANTIATE("layer_norm_looped" layout, types, layer_norm_looped<aligned, T>)

#define INSTANTIATE_TYPES(types, T)                             \
  INSTANTIATE("layer_norm_thread", types, layer_norm_thread<T>) \
  INSTANTIATE_ROWS("", false, types, T)                         \
  INSTANTIATE_ROWS("_aligned", true, types, T)

INSTANTIATE_TYPES("_float", float)
INSTANTIATE_TYPES("_half", half)
INSTANTIATE_TYPES("_bfloat", bfloat)
