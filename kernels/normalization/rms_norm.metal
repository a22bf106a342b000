// rms_norm over rows: y = x / sqrt(mean(x^2) + eps) * weight, optionally of x + residual.
// T is the type of the rows, W that of the weight.
#include "normalization/norm_rows.h"

template <typename T, typename W>
kernel void rms_norm_thread(device const T* x [[buffer(0)]], device const T* residual [[buffer(1)]],
                            device const W* weight [[buffer(2)]], device T* y [[buffer(3)]],
                            device T* sum [[buffer(4)]], constant RmsNormParams& params [[buffer(5)]],
                            device float* scales [[buffer(6)]], uint row [[thread_position_in_grid]]) {
  const uint length = params.length;
  const bool has_weight = params.has_weight;
  x += row_at(params.x, row);
  y += ulong(row) * length;
  if (params.has_residual) {
    residual += row_at(params.residual, row);
    sum += ulong(row) * length;
    for (uint i = 0; i < length; ++i)
      sum[i] = static_cast<T>(static_cast<float>(x[i]) + static_cast<float>(residual[i]));
    x = sum;
  }
  LongSum<float> squares;
  for (uint start = 0; start < length; start += kSumBlock) {
    const uint end = min(start + kSumBlock, length);
    float part = 0.0f;
    for (uint i = start; i < end; ++i) part += static_cast<float>(x[i]) * static_cast<float>(x[i]);
    squares.add(part);
  }
  const float scale = scale_of(squares.total(), params);
  if (params.with_scales) scales[row] = scale;
  for (uint i = 0; i < length; ++i) {
    const float normal = static_cast<float>(x[i]) * scale;
    y[i] = static_cast<T>(has_weight ? normal * (static_cast<float>(weight[i]) + params.offset) : normal);
  }
}

// The sum, up to element `end`, of squares over a thread's slice.
template <uint N, typename Slice, typename Rows>
inline float squares_of(Slice slice, thread const Rows& v, uint end) {
  float squares = 0.0f;
  for (uint n = 0; n < N; ++n) squares += slice.holds(n, end) ? sum4(v[n] * v[n]) : 0.0f;
  return squares;
}

template <bool aligned, uint N, typename T, typename W, typename Team>
inline void normalize_row(device const T* x, device const T* residual, device const W* weight, device T* y,
                          device T* sum, device float* row_scale, constant RmsNormParams& params, Team team) {
  typedef Slice<aligned, T, N> RowSlice;
  const RowSlice slice(team.thread_index);
  typename RowSlice::template Of<T> v;
  typename RowSlice::template Of<W> w;
  fetch_input(slice, v, x, residual, sum, params, params.length);
  fetch_weight(slice, w, weight, params, params.length);
  const float scale = scale_of(team.sum(squares_of<N>(slice, v, params.length), 0), params);
  if (params.with_scales && team.thread_index == 0) *row_scale = scale;
  for (uint n = 0; n < N; ++n) v.round(n, v[n] * scale * (w[n] + params.offset));
  slice.store(v, y, params.length);
}

template <bool aligned, typename T, typename W, uint N>
kernel void rms_norm_simd(device const T* x [[buffer(0)]], device const T* residual [[buffer(1)]],
                          device const W* weight [[buffer(2)]], device T* y [[buffer(3)]], device T* sum [[buffer(4)]],
                          constant RmsNormParams& params [[buffer(5)]], device float* scales [[buffer(6)]],
                          uint group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]],
                          uint simdgroup [[simdgroup_index_in_threadgroup]],
                          uint simdgroups [[simdgroups_per_threadgroup]]) {
  const ulong row = ulong(group) * simdgroups + simdgroup;
  if (row >= params.rows) return;
  x += row_at(params.x, row);
  residual += row_at(params.residual, row);
  y += row * params.length;
  sum += row * params.length;
  normalize_row<aligned, N>(x, residual, weight, y, sum, scales + row, params, Simdgroup(lane));
}

template <bool aligned, typename T, typename W, uint N>
[[kernel]] [[max_total_threads_per_threadgroup(512)]] void rms_norm_block(
    device const T* x [[buffer(0)]], device const T* residual [[buffer(1)]], device const W* weight [[buffer(2)]],
    device T* y [[buffer(3)]], device T* sum [[buffer(4)]], constant RmsNormParams& params [[buffer(5)]],
    device float* scales [[buffer(6)]], uint row [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint threads [[threads_per_threadgroup]]) {
  threadgroup float scratch[32];
  const Threadgroup team(thread_index, threads, scratch);
  x += row_at(params.x, row);
  residual += row_at(params.residual, row);
  y += ulong(row) * params.length;
  sum += ulong(row) * params.length;
  normalize_row<aligned, N>(x, residual, weight, y, sum, scales + row, params, team);
}

// A row of any length in two walks: the sum of the squares, and the results.

template <bool aligned, uint N, typename T>
inline float walk_squares(device const T* x, device const T* residual, device T* sum, constant RmsNormParams& params,
                          Threadgroup team) {
  LongSum<float> squares;
  for (uint start = 0; start < params.length; start += team.threads * 4 * N) {
    const Slice<aligned, T, N> slice(team.thread_index, start);
    typename Slice<aligned, T, N>::template Of<T> v;
    fetch_input(slice, v, x, residual, sum, params, params.length);
    squares.add(squares_of<N>(slice, v, params.length));
  }
  return team.sum(squares.total(), 0);
}

template <bool aligned, uint N, typename T, typename W>
inline void walk_results(device const T* x, device const W* weight, device T* y, device const T* sum,
                         device float* row_scale, constant RmsNormParams& params, float squares, Threadgroup team) {
  const float scale = scale_of(squares, params);
  if (params.with_scales && team.thread_index == 0) *row_scale = scale;
  device const T* const input = params.has_residual ? sum : x;
  for (uint start = 0; start < params.length; start += team.threads * 4 * N) {
    const Slice<aligned, T, N> slice(team.thread_index, start);
    typename Slice<aligned, T, N>::template Of<T> v;
    typename Slice<aligned, T, N>::template Of<W> w;
    slice.fetch(v, input, params.length);
    fetch_weight(slice, w, weight, params, params.length);
    for (uint n = 0; n < N; ++n) v.round(n, v[n] * scale * (w[n] + params.offset));
    slice.store(v, y, params.length);
  }
}

template <bool aligned, typename T, typename W>
inline void normalize_long_row(device const T* x, device const T* residual, device const W* weight, device T* y,
                               device T* sum, device float* row_scale, constant RmsNormParams& params,
                               Threadgroup team) {
  const float squares = walk_squares<aligned, kWalkStep<aligned, T>>(x, residual, sum, params, team);
  // A thread that is past the end reads the row's last elements of `sum`, which another thread has written.
  threadgroup_barrier(mem_flags::mem_device);
  walk_results<aligned, kWalkStep<aligned, T>>(x, weight, y, sum, row_scale, params, squares, team);
}

template <bool aligned, typename T, typename W>
[[kernel]] [[max_total_threads_per_threadgroup(1024)]] void rms_norm_looped(
    device const T* x [[buffer(0)]], device const T* residual [[buffer(1)]], device const W* weight [[buffer(2)]],
    device T* y [[buffer(3)]], device T* sum [[buffer(4)]], constant RmsNormParams& params [[buffer(5)]],
    device float* scales [[buffer(6)]], uint row [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint threads [[threads_per_threadgroup]]) {
  threadgroup float scratch[32];
  const Threadgroup team(thread_index, threads, scratch);
  x += row_at(params.x, row);
  residual += row_at(params.residual, row);
  y += ulong(row) * params.length;
  sum += ulong(row) * params.length;
  normalize_long_row<aligned>(x, residual, weight, y, sum, scales + row, params, team);
}

// Few long rows, as in norm_rows.h.

template <bool aligned, typename T>
[[kernel]] [[max_total_threads_per_threadgroup(1024)]] void rms_norm_split_squares(
    device const T* x [[buffer(0)]], device const T* residual [[buffer(1)]], device T* sum [[buffer(2)]],
    device float* parts [[buffer(3)]], constant RmsNormParams& params [[buffer(4)]],
    uint2 group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]],
    uint2 threads [[threads_per_threadgroup]]) {
  constexpr uint N = kColumnStep;
  constexpr uint R = RMS_NORM_SPLIT_ROWS(aligned, sizeof(T));
  typedef Slice<aligned, T, N> RowSlice;
  threadgroup float scratch[2 * 32 * R];
  const Threadgroup team(thread_index, threads.x, scratch);
  const Part part(params.length, group.x, params.share);
  const Chunk chunk(group.y, params);
  uint parity = 0;  // a reduction's scratch is used again only after another one
  for (uint row = 0; row < chunk.rows; row += R) {
    const uint rows = chunk.rows - row;
    const ulong first = chunk.first + row;
    float squares[R];
#pragma unroll
    for (uint r = 0; r < R; ++r) squares[r] = 0.0f;
    for (uint start = part.begin; start < part.end; start += team.threads * 4 * N) {
      const RowSlice slice(thread_index, start);
      typename RowSlice::template Of<T> v[R];
#pragma unroll
      for (uint r = 0; r < R; ++r) {
        if (r < rows)
          fetch_input(slice, v[r], x + (first + r) * params.x.strides[0],
                      residual + (first + r) * params.residual.strides[0], sum + (first + r) * params.length, params,
                      part.end);
      }
#pragma unroll
      for (uint r = 0; r < R; ++r) {
        if (r < rows) squares[r] += squares_of<N>(slice, v[r], part.end);
      }
    }
    store_parts<float, R>(squares, parts, first, rows, group.x, parity, params, team);
    parity ^= 1;
  }
}

template <bool aligned, typename T, typename W>
[[kernel]] [[max_total_threads_per_threadgroup(1024)]] void rms_norm_split(
    device const T* x [[buffer(0)]], device const W* weight [[buffer(1)]], device T* y [[buffer(2)]],
    device const T* sum [[buffer(3)]], device const float* parts [[buffer(4)]],
    constant RmsNormParams& params [[buffer(5)]], device float* row_scales [[buffer(6)]],
    uint2 group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]],
    uint2 threads [[threads_per_threadgroup]]) {
  constexpr uint N = kColumnStep;
  constexpr uint R = RMS_NORM_SPLIT_ROWS(aligned, sizeof(T));
  typedef Slice<aligned, T, N> RowSlice;
  threadgroup float scales[RMS_NORM_CHUNK_ROWS];  // of rows; first the sums of their squares
  const Threadgroup team(thread_index, threads.x, scales);
  const Part part(params.length, group.x, params.share);
  const Chunk chunk(group.y, params);
  const long stride = params.has_residual ? long(params.length) : params.x.strides[0];
  device const T* const input = (params.has_residual ? sum : x) + chunk.first * stride;
  y += ulong(chunk.first) * params.length;
  // The next rows are on their way before they are needed, the first ones while the squares are summed up.
  typename RowSlice::template Of<W> w;
  typename RowSlice::template Of<T> v[R];
  fetch_some(RowSlice(thread_index, part.begin), v, input, stride, chunk.rows, part.end);
  fetch_weight(RowSlice(thread_index, part.begin), w, weight, params, part.end);
  sum_parts(scales, parts, chunk, params, team);
  if (thread_index < chunk.rows) {
    const float scale = scale_of(scales[thread_index], params);
    scales[thread_index] = scale;
    if (params.with_scales && group.x == 0) row_scales[chunk.first + thread_index] = scale;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint start = part.begin, row = 0; start < part.end;) {
    const RowSlice slice(thread_index, start);
#pragma unroll
    for (uint r = 0; r < R; ++r) {
      if (row + r >= chunk.rows) continue;
      for (uint n = 0; n < N; ++n) v[r].round(n, v[r][n] * scales[row + r] * (w[n] + params.offset));
      slice.store(v[r], y + ulong(row + r) * params.length, part.end);
    }
    row += R;
    if (row >= chunk.rows) {
      row = 0;
      start += team.threads * 4 * N;
      if (start < part.end) fetch_weight(RowSlice(thread_index, start), w, weight, params, part.end);
    }
    if (start < part.end)
      fetch_some(RowSlice(thread_index, start), v, input + row * stride, stride, chunk.rows - row, part.end);
  }
}

#define INSTANTIATE(name, types, ...) template[[host_name(name types)]] [[kernel]] decltype(__VA_ARGS__) __VA_ARGS__;

#define INSTANTIATE_ROWS(layout, aligned, types, T, W)                           \
  INSTANTIATE("rms_norm_simd1" layout, types, rms_norm_simd<aligned, T, W, 1>)   \
  INSTANTIATE("rms_norm_simd4" layout, types, rms_norm_simd<aligned, T, W, 4>)   \
  INSTANTIATE("rms_norm_block4" layout, types, rms_norm_block<aligned, T, W, 4>) \
  INSTANTIATE("rms_norm_block8" layout, types, rms_norm_block<aligned, T, W, 8>) \
  INSTANTIATE("rms_norm_looped" layout, types, rms_norm_looped<aligned, T, W>)   \
  INSTANTIATE("rms_norm_split" layout, types, rms_norm_split<aligned, T, W>)

#define INSTANTIATE_TYPES(types, T, W)                         \
  INSTANTIATE("rms_norm_thread", types, rms_norm_thread<T, W>) \
  INSTANTIATE_ROWS("", false, types, T, W)                     \
  INSTANTIATE_ROWS("_aligned", true, types, T, W)

INSTANTIATE_TYPES("_float", float, float)
INSTANTIATE_TYPES("_half", half, half)
INSTANTIATE_TYPES("_bfloat", bfloat, bfloat)
INSTANTIATE_TYPES("_half_float", half, float)
INSTANTIATE_TYPES("_bfloat_float", bfloat, float)

#define INSTANTIATE_SQUARES(types, T)                                            \
  INSTANTIATE("rms_norm_split_squares", types, rms_norm_split_squares<false, T>) \
  INSTANTIATE("rms_norm_split_squares_aligned", types, rms_norm_split_squares<true, T>)

INSTANTIATE_SQUARES("_float", float)
INSTANTIATE_SQUARES("_half", half)
INSTANTIATE_SQUARES("_bfloat", bfloat)
