// rms_norm over rows: y = x / sqrt(mean(x^2) + eps) * weight, optionally of x + residual.
// T is the type of the rows, W that of the weight.
#include "common/norm_rows.h"

template <typename T, typename W>
kernel void rms_norm_thread(device const T* x [[buffer(0)]], device const T* residual [[buffer(1)]],
                            device const W* weight [[buffer(2)]], device T* y [[buffer(3)]],
                            device T* sum [[buffer(4)]], constant RmsNormParams& params [[buffer(5)]],
                            uint row [[thread_position_in_grid]]) {
  const uint length = params.length;
  const bool has_weight = params.has_weight;
  x += row * params.x_stride;
  y += ulong(row) * length;
  if (params.has_residual) {
    residual += row * params.residual_stride;
    sum += ulong(row) * length;
    for (uint i = 0; i < length; ++i)
      sum[i] = static_cast<T>(static_cast<float>(x[i]) + static_cast<float>(residual[i]));
    x = sum;
  }
  float squares = 0.0f;
  for (uint start = 0; start < length; start += kSumBlock) {
    const uint end = min(start + kSumBlock, length);
    float part = 0.0f;
    for (uint i = start; i < end; ++i) part += static_cast<float>(x[i]) * static_cast<float>(x[i]);
    squares += part;
  }
  const float scale = scale_of(squares, params);
  for (uint i = 0; i < length; ++i) {
    const float normal = static_cast<float>(x[i]) * scale;
    y[i] = static_cast<T>(has_weight ? normal * static_cast<float>(weight[i]) : normal);
  }
}

// Reads a thread's share, up to element `end`, of x or of x + residual rounded to T as a separate addition would leave
// it, which it writes.
template <bool aligned, uint N, typename T>
inline void read_input(Share<T, N> share, thread float4 (&v)[N], device const T* x, device const T* residual,
                       device T* sum, constant RmsNormParams& params, uint end) {
  share.template load<aligned>(v, x, end, 0.0f);
  if (!params.has_residual) return;
  float4 added[N];
  share.template load<aligned>(added, residual, end, 0.0f);
  for (uint n = 0; n < N; ++n) v[n] = static_cast<float4>(static_cast<vec<T, 4>>(v[n] + added[n]));
  share.template store<aligned>(v, sum, end);
}

template <bool aligned, uint N, typename T, typename W, typename Team>
inline void normalize_row(device const T* x, device const T* residual, device const W* weight, device T* y,
                          device T* sum, constant RmsNormParams& params, Team team) {
  const Share<T, N> share(team.thread_index, team.threads);
  float4 v[N];
  read_input<aligned>(share, v, x, residual, sum, params, params.length);
  float squares = 0.0f;
  for (uint n = 0; n < N; ++n) squares += sum4(v[n] * v[n]);
  const float scale = scale_of(team.sum(squares, 0), params);
  float4 w[N];
  load_weight<aligned>(share, w, weight, params, params.length);
  for (uint n = 0; n < N; ++n) v[n] = v[n] * scale * w[n];
  share.template store<aligned>(v, y, params.length);
}

template <typename T, typename W, uint N>
kernel void rms_norm_simd(device const T* x [[buffer(0)]], device const T* residual [[buffer(1)]],
                          device const W* weight [[buffer(2)]], device T* y [[buffer(3)]], device T* sum [[buffer(4)]],
                          constant RmsNormParams& params [[buffer(5)]], uint group [[threadgroup_position_in_grid]],
                          uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]],
                          uint simdgroups [[simdgroups_per_threadgroup]]) {
  const ulong row = ulong(group) * simdgroups + simdgroup;
  if (row >= params.rows) return;
  x += row * params.x_stride;
  residual += row * params.residual_stride;
  y += row * params.length;
  sum += row * params.length;
  if (params.aligned)
    normalize_row<true, N>(x, residual, weight, y, sum, params, Simdgroup(lane));
  else
    normalize_row<false, N>(x, residual, weight, y, sum, params, Simdgroup(lane));
}

template <typename T, typename W, uint N>
[[kernel]] [[max_total_threads_per_threadgroup(64 * N)]] void rms_norm_block(
    device const T* x [[buffer(0)]], device const T* residual [[buffer(1)]], device const W* weight [[buffer(2)]],
    device T* y [[buffer(3)]], device T* sum [[buffer(4)]], constant RmsNormParams& params [[buffer(5)]],
    uint row [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]]) {
  threadgroup float scratch[32];
  const Threadgroup team(thread_index, threads, scratch);
  x += row * params.x_stride;
  residual += row * params.residual_stride;
  y += ulong(row) * params.length;
  sum += ulong(row) * params.length;
  if (params.aligned)
    normalize_row<true, N>(x, residual, weight, y, sum, params, team);
  else
    normalize_row<false, N>(x, residual, weight, y, sum, params, team);
}

// A row of any length in two walks, through the part of it that a threadgroup has: the sum of the squares, and the
// results.

template <bool aligned, uint N, typename T>
inline float walk_squares(device const T* x, device const T* residual, device T* sum, constant RmsNormParams& params,
                          Part part, Threadgroup team) {
  float4 v[N];
  float squares = 0.0f;
  for (uint start = part.begin; start < part.end; start += team.threads * 4 * N) {
    const Share<T, N> share(team.thread_index, team.threads, start);
    read_input<aligned>(share, v, x, residual, sum, params, part.end);
    float4 squared = float4(0.0f);
    for (uint n = 0; n < N; ++n) squared += v[n] * v[n];
    squares += sum4(squared);
  }
  return team.sum(squares, 0);
}

template <bool aligned, uint N, typename T, typename W>
inline void walk_results(device const T* x, device const W* weight, device T* y, device const T* sum,
                         constant RmsNormParams& params, Part part, float squares, Threadgroup team) {
  const float scale = scale_of(squares, params);
  device const T* const input = params.has_residual ? sum : x;
  for (uint start = part.begin; start < part.end; start += team.threads * 4 * N) {
    const Share<T, N> share(team.thread_index, team.threads, start);
    float4 v[N];
    float4 w[N];
    share.template load<aligned>(v, input, part.end, 0.0f);
    load_weight<aligned>(share, w, weight, params, part.end);
    for (uint n = 0; n < N; ++n) v[n] = v[n] * scale * w[n];
    share.template store<aligned>(v, y, part.end);
  }
}

template <bool aligned, typename T, typename W>
inline void normalize_long_row(device const T* x, device const T* residual, device const W* weight, device T* y,
                               device T* sum, constant RmsNormParams& params, Threadgroup team) {
  const Part part(params.length);
  const float squares = walk_squares<aligned, kLongStep<T>>(x, residual, sum, params, part, team);
  // A thread that is past the end reads the row's last elements of `sum`, which another thread has written.
  threadgroup_barrier(mem_flags::mem_device);
  walk_results<aligned, kLongStep<T>>(x, weight, y, sum, params, part, squares, team);
}

template <typename T, typename W>
[[kernel]] [[max_total_threads_per_threadgroup(1024)]] void rms_norm_looped(
    device const T* x [[buffer(0)]], device const T* residual [[buffer(1)]], device const W* weight [[buffer(2)]],
    device T* y [[buffer(3)]], device T* sum [[buffer(4)]], constant RmsNormParams& params [[buffer(5)]],
    uint row [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]]) {
  threadgroup float scratch[32];
  const Threadgroup team(thread_index, threads, scratch);
  x += row * params.x_stride;
  residual += row * params.residual_stride;
  y += ulong(row) * params.length;
  sum += ulong(row) * params.length;
  if (params.aligned)
    normalize_long_row<true>(x, residual, weight, y, sum, params, team);
  else
    normalize_long_row<false>(x, residual, weight, y, sum, params, team);
}

// Few long rows: several threadgroups share one, and leave the squares of their parts to a second dispatch.

template <typename T>
[[kernel]] [[max_total_threads_per_threadgroup(256)]] void rms_norm_split_squares(
    device const T* x [[buffer(0)]], device const T* residual [[buffer(1)]], device T* sum [[buffer(2)]],
    device float* parts [[buffer(3)]], constant RmsNormParams& params [[buffer(4)]],
    uint2 group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]],
    uint2 threads [[threads_per_threadgroup]]) {
  threadgroup float scratch[32];
  const Threadgroup team(thread_index, threads.x, scratch);
  const Part part(params.length, group.x, params.share);
  x += group.y * params.x_stride;
  residual += group.y * params.residual_stride;
  sum += ulong(group.y) * params.length;
  const float squares = params.aligned ? walk_squares<true, kSplitStep>(x, residual, sum, params, part, team)
                                       : walk_squares<false, kSplitStep>(x, residual, sum, params, part, team);
  if (thread_index == 0) parts[group.y * params.splits + group.x] = squares;
}

template <typename T, typename W>
[[kernel]] [[max_total_threads_per_threadgroup(256)]] void rms_norm_split(
    device const T* x [[buffer(0)]], device const W* weight [[buffer(1)]], device T* y [[buffer(2)]],
    device const T* sum [[buffer(3)]], device const float* parts [[buffer(4)]],
    constant RmsNormParams& params [[buffer(5)]], uint2 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint2 threads [[threads_per_threadgroup]]) {
  threadgroup float scratch[32];
  const Threadgroup team(thread_index, threads.x, scratch);
  const Part part(params.length, group.x, params.share);
  x += group.y * params.x_stride;
  y += ulong(group.y) * params.length;
  sum += ulong(group.y) * params.length;
  const bool present = thread_index < params.splits;
  const float squares = team.sum(present ? parts[group.y * params.splits + thread_index] : 0.0f, 0);
  if (params.aligned)
    walk_results<true, kSplitStep>(x, weight, y, sum, params, part, squares, team);
  else
    walk_results<false, kSplitStep>(x, weight, y, sum, params, part, squares, team);
}

#define INSTANTIATE(name, types, ...) template[[host_name(name types)]] [[kernel]] decltype(__VA_ARGS__) __VA_ARGS__;

#define INSTANTIATE_TYPES(types, T, W)                           \
  INSTANTIATE("rms_norm_thread", types, rms_norm_thread<T, W>)   \
  INSTANTIATE("rms_norm_simd1", types, rms_norm_simd<T, W, 1>)   \
  INSTANTIATE("rms_norm_simd4", types, rms_norm_simd<T, W, 4>)   \
  INSTANTIATE("rms_norm_block4", types, rms_norm_block<T, W, 4>) \
  INSTANTIATE("rms_norm_block8", types, rms_norm_block<T, W, 8>) \
  INSTANTIATE("rms_norm_looped", types, rms_norm_looped<T, W>)   \
  INSTANTIATE("rms_norm_split", types, rms_norm_split<T, W>)

INSTANTIATE_TYPES("_float", float, float)
INSTANTIATE_TYPES("_half", half, half)
INSTANTIATE_TYPES("_bfloat", bfloat, bfloat)
INSTANTIATE_TYPES("_half_float", half, float)
INSTANTIATE_TYPES("_bfloat_float", bfloat, float)

INSTANTIATE("rms_norm_split_squares", "_float", rms_norm_split_squares<float>)
INSTANTIATE("rms_norm_split_squares", "_half", rms_norm_split_squares<half>)
INSTANTIATE("rms_norm_split_squares", "_bfloat", rms_norm_split_squares<bfloat>)
