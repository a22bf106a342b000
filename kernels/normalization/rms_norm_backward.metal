// The derivative of rms_norm. With s the scale of a row and g the output's gradient times the weight,
//   gx = s (g - x s^2 mean(g x)),
// plus `residual`, the gradient that reaches x + residual by itself. The weight's gradient is the sum over rows of the
// output's gradient times s x. The simd and block kernels make `partial` sums of the rows that pass through their
// registers, and so does the split kernel where it has not all rows; the thread and looped kernels leave s in `scales`,
// of which rms_norm_weight_partial makes partial sums. normalization/column_sums.metal adds them up. A thread of
// block2_512 has twice the registers that one of block2 has on Apple GPUs, in half as many threads.
#include "normalization/rms_norm_backward.h"

template <typename T, typename W>
kernel void rms_norm_backward_thread(device const T* grad [[buffer(0)]], device const T* x [[buffer(1)]],
                                     device const W* weight [[buffer(2)]], device const T* residual [[buffer(3)]],
                                     device T* gx [[buffer(4)]], device float* scales [[buffer(5)]],
                                     constant RmsNormParams& params [[buffer(6)]],
                                     device const float* given [[buffer(7)]], uint row [[thread_position_in_grid]]) {
  const uint length = params.length;
  const bool has_weight = params.has_weight;
  const bool has_residual = params.has_residual;
  grad += row_at(params.grad, row);
  x += row_at(params.x, row);
  gx += ulong(row) * length;
  residual += row_at(params.residual, row);
  LongSum<float2> sums;  // of squares and of products
  for (uint start = 0; start < length; start += kSumBlock) {
    const uint end = min(start + kSumBlock, length);
    float2 part = float2(0.0f);
    for (uint i = start; i < end; ++i) {
      const float v = static_cast<float>(x[i]);
      const float g = static_cast<float>(grad[i]);
      part.x += v * v;
      part.y += (has_weight ? g * (static_cast<float>(weight[i]) + params.offset) : g) * v;
    }
    sums.add(part);
  }
  const float2 found = sums.total();
  const float2 factors = factors_of(found.x, found.y, 1.0f / static_cast<float>(length), given + row, params);
  scales[row] = factors.x;
  for (uint i = 0; i < length; ++i) {
    const float g = static_cast<float>(grad[i]);
    const float weighted = has_weight ? g * (static_cast<float>(weight[i]) + params.offset) : g;
    const float value = fma(static_cast<float>(x[i]), factors.y, weighted * factors.x);
    gx[i] = static_cast<T>(has_residual ? value + static_cast<float>(residual[i]) : value);
  }
}

template <bool aligned, typename T, typename W, uint N>
kernel void rms_norm_backward_simd(device const T* grad [[buffer(0)]], device const T* x [[buffer(1)]],
                                   device const W* weight [[buffer(2)]], device const T* residual [[buffer(3)]],
                                   device T* gx [[buffer(4)]], device float* partial [[buffer(5)]],
                                   constant RmsNormParams& params [[buffer(6)]],
                                   device const float* given [[buffer(7)]], uint group [[threadgroup_position_in_grid]],
                                   uint lane [[thread_index_in_simdgroup]],
                                   uint simdgroup [[simdgroup_index_in_threadgroup]],
                                   uint simdgroups [[simdgroups_per_threadgroup]]) {
  const uint stream = group * simdgroups + simdgroup;
  if (stream >= params.streams) return;
  const Simdgroup team(lane);
  if (params.has_residual)
    differentiate_rows<aligned, true, true, N, 1>(grad, x, weight, residual, gx, partial, given, params, team, stream);
  else
    differentiate_rows<aligned, true, false, N, 1>(grad, x, weight, residual, gx, partial, given, params, team, stream);
}

template <bool aligned, typename T, typename W, uint N, uint R, uint MOST>
[[kernel]] [[max_total_threads_per_threadgroup(MOST)]] void rms_norm_backward_block(
    device const T* grad [[buffer(0)]], device const T* x [[buffer(1)]], device const W* weight [[buffer(2)]],
    device const T* residual [[buffer(3)]], device T* gx [[buffer(4)]], device float* partial [[buffer(5)]],
    constant RmsNormParams& params [[buffer(6)]], device const float* given [[buffer(7)]],
    uint stream [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]]) {
  threadgroup float scratch[2 * 32 * 2 * R];
  const Threadgroup team(thread_index, threads, scratch);
  if (params.has_residual)
    differentiate_rows<aligned, false, true, N, R>(grad, x, weight, residual, gx, partial, given, params, team, stream);
  else
    differentiate_rows<aligned, false, false, N, R>(grad, x, weight, residual, gx, partial, given, params, team,
                                                    stream);
}

// A longer row in two walks: the sums, and the results. Its scale is left in `scales`.
template <bool aligned, typename T, typename W>
[[kernel]] [[max_total_threads_per_threadgroup(1024)]] void rms_norm_backward_looped(
    device const T* grad [[buffer(0)]], device const T* x [[buffer(1)]], device const W* weight [[buffer(2)]],
    device const T* residual [[buffer(3)]], device T* gx [[buffer(4)]], device float* scales [[buffer(5)]],
    constant RmsNormParams& params [[buffer(6)]], device const float* given [[buffer(7)]],
    uint row [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]]) {
  constexpr uint N = kColumnStep;
  typedef Slice<aligned, T, N> RowSlice;
  threadgroup float scratch[32 * 2];
  const Threadgroup team(thread_index, threads, scratch);
  const uint length = params.length;
  grad += row_at(params.grad, row);
  x += row_at(params.x, row);
  residual += row_at(params.residual, row);
  gx += ulong(row) * length;
  typename RowSlice::template Of<T> v;
  typename RowSlice::template Of<T> g;
  typename RowSlice::template Of<W> w;
  float sums[2] = {0.0f, 0.0f};
  for (uint start = 0; start < length; start += threads * 4 * N) {
    const RowSlice slice(thread_index, start);
    slice.fetch(v, x, length);
    slice.fetch(g, grad, length);
    fetch_weight(slice, w, weight, params, length);
    const float2 sum = sums_of<N>(slice, v, g, w, params.offset, length);
    sums[0] += sum.x;
    sums[1] += sum.y;
  }
  team.sum(sums, 0);
  const float2 factors = factors_of(sums[0], sums[1], 1.0f / static_cast<float>(length), given + row, params);
  if (thread_index == 0) scales[row] = factors.x;
  for (uint start = 0; start < length; start += threads * 4 * N) {
    const RowSlice slice(thread_index, start);
    typename RowSlice::template Of<T> added;
    slice.fetch(v, x, length);
    slice.fetch(g, grad, length);
    fetch_weight(slice, w, weight, params, length);
    if (params.has_residual) slice.fetch(added, residual, length);
    for (uint n = 0; n < N; ++n) {
      const float4 value = fma(v[n], float4(factors.y), g[n] * (w[n] + params.offset) * factors.x);
      v.round(n, params.has_residual ? value + added[n] : value);
    }
    slice.store(v, gx, length);
  }
}

// Long rows, as in norm_rows.h. A threadgroup has some rows at work at once.

template <bool aligned, typename T, typename W>
[[kernel]] [[max_total_threads_per_threadgroup(1024)]] void rms_norm_backward_split_sums(
    device const T* grad [[buffer(0)]], device const T* x [[buffer(1)]], device const W* weight [[buffer(2)]],
    device float2* parts [[buffer(3)]], constant RmsNormParams& params [[buffer(4)]],
    uint2 group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]],
    uint2 threads [[threads_per_threadgroup]]) {
  constexpr uint N = kColumnStep;
  constexpr uint R = RMS_NORM_BACKWARD_SPLIT_ROWS(aligned, sizeof(T));
  typedef Slice<aligned, T, N> RowSlice;
  threadgroup float scratch[2 * 32 * 2 * R];
  const Threadgroup team(thread_index, threads.x, scratch);
  const Part part(params.length, group.x, params.share);
  const Chunk chunk(group.y, params);
  const uint step = team.threads * 4 * N;
  x += chunk.first * params.x.strides[0];
  grad += chunk.first * params.grad.strides[0];
  typename RowSlice::template Of<T> v[R];
  typename RowSlice::template Of<T> g[R];
  typename RowSlice::template Of<W> w;
  fetch_some(RowSlice(thread_index, part.begin), v, x, params.x.strides[0], chunk.rows, part.end);
  fetch_some(RowSlice(thread_index, part.begin), g, grad, params.grad.strides[0], chunk.rows, part.end);
  fetch_weight(RowSlice(thread_index, part.begin), w, weight, params, part.end);
  uint parity = 0;  // a reduction's scratch is used again only after another one
  for (uint row = 0; row < chunk.rows; row += R) {
    float sums[2 * R];
#pragma unroll
    for (uint i = 0; i < 2 * R; ++i) sums[i] = 0.0f;
    for (uint start = part.begin; start < part.end; start += step) {
#pragma unroll
      for (uint r = 0; r < R; ++r) {
        if (row + r >= chunk.rows) continue;
        const float2 sum = sums_of<N>(RowSlice(thread_index, start), v[r], g[r], w, params.offset, part.end);
        sums[2 * r] += sum.x;
        sums[2 * r + 1] += sum.y;
      }
      const bool along = start + step < part.end;  // the same rows come next
      const uint next = along ? row : row + R;
      if (next >= chunk.rows) break;
      const RowSlice slice(thread_index, along ? start + step : part.begin);
      fetch_some(slice, v, x + next * params.x.strides[0], params.x.strides[0], chunk.rows - next, part.end);
      fetch_some(slice, g, grad + next * params.grad.strides[0], params.grad.strides[0], chunk.rows - next, part.end);
      fetch_weight(slice, w, weight, params, part.end);
    }
    store_parts<float2, R>(sums, parts, chunk.first + row, chunk.rows - row, group.x, parity, params, team);
    parity ^= 1;
  }
}

template <bool aligned, typename T, typename W>
[[kernel]] [[max_total_threads_per_threadgroup(1024)]] void rms_norm_backward_split(
    device const T* grad [[buffer(0)]], device const T* x [[buffer(1)]], device const W* weight [[buffer(2)]],
    device const T* residual [[buffer(3)]], device T* gx [[buffer(4)]], device float* partial [[buffer(5)]],
    constant RmsNormParams& params [[buffer(6)]], device const float* given [[buffer(7)]],
    device const float2* parts [[buffer(8)]], device W* gw [[buffer(9)]], uint2 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint2 threads [[threads_per_threadgroup]]) {
  constexpr uint N = kColumnStep;
  constexpr uint R = RMS_NORM_BACKWARD_SPLIT_ROWS(aligned, sizeof(T));
  typedef Slice<aligned, T, N> RowSlice;
  threadgroup float2 sums[RMS_NORM_CHUNK_ROWS];  // of rows, then the factors made of them
  const Threadgroup team(thread_index, threads.x, nullptr);
  const Part part(params.length, group.x, params.share);
  const Chunk chunk(group.y, params);
  x += chunk.first * params.x.strides[0];
  grad += chunk.first * params.grad.strides[0];
  residual += chunk.first * params.residual.strides[0];
  gx += ulong(chunk.first) * params.length;
  partial += ulong(group.y) * params.length;
  // The next rows are on their way before they are needed, the first ones while the sums of parts are added up.
  typename RowSlice::template Of<W> w;
  typename RowSlice::template Of<T> v[R];
  typename RowSlice::template Of<T> g[R];
  float4 total[N];
  for (uint n = 0; n < N; ++n) total[n] = float4(0.0f);
  fetch_some(RowSlice(thread_index, part.begin), v, x, params.x.strides[0], chunk.rows, part.end);
  fetch_some(RowSlice(thread_index, part.begin), g, grad, params.grad.strides[0], chunk.rows, part.end);
  fetch_weight(RowSlice(thread_index, part.begin), w, weight, params, part.end);
  sum_parts(sums, parts, chunk, params, team);
  if (thread_index < chunk.rows)
    sums[thread_index] =
        factors_of(sums[thread_index].x, sums[thread_index].y, 1.0f / static_cast<float>(params.length),
                   given + chunk.first + thread_index, params);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint start = part.begin, row = 0; start < part.end;) {
    const RowSlice slice(thread_index, start);
#pragma unroll
    for (uint r = 0; r < R; ++r) {
      if (row + r >= chunk.rows) continue;
      const float2 factors = sums[row + r];
      typename RowSlice::template Of<T> added;
      if (params.has_residual) slice.fetch(added, residual + (row + r) * params.residual.strides[0], part.end);
      for (uint n = 0; n < N; ++n) {
        total[n] = fma(g[r][n], v[r][n] * factors.x, total[n]);
        const float4 value = fma(v[r][n], float4(factors.y), g[r][n] * (w[n] + params.offset) * factors.x);
        v[r].round(n, params.has_residual ? value + added[n] : value);
      }
      slice.store(v[r], gx + ulong(row + r) * params.length, part.end);
    }
    row += R;
    if (row >= chunk.rows) {
      if (params.partial) slice.store(total, partial, part.end);
      if (params.whole) {
        typename RowSlice::template Of<W> rounded;
        for (uint n = 0; n < N; ++n) rounded.round(n, total[n]);
        slice.store(rounded, gw, part.end);
      }
      for (uint n = 0; n < N; ++n) total[n] = float4(0.0f);
      row = 0;
      start += team.threads * 4 * N;
      if (start < part.end) fetch_weight(RowSlice(thread_index, start), w, weight, params, part.end);
    }
    if (start < part.end) {
      const RowSlice next(thread_index, start);
      fetch_some(next, v, x + row * params.x.strides[0], params.x.strides[0], chunk.rows - row, part.end);
      fetch_some(next, g, grad + row * params.grad.strides[0], params.grad.strides[0], chunk.rows - row, part.end);
    }
  }
}

// Partial sums of the weight's gradient by themselves: a thread has four columns and a chunk of the rows.
template <bool aligned, typename T>
inline void sum_chunk(device const T* grad, device const T* x, device const float* scales, device float* partial,
                      constant RmsNormParams& params, uint2 at) {
  const uint column = at.x * 4;
  const uint first = at.y * params.chunk_rows;
  const uint last = min(first + params.chunk_rows, params.rows);
  LongSum<float4> sum;
  for (uint row = first; row < last; ++row) {
    sum.add(load4<aligned>(grad + row_at(params.grad, row), column, params.length, 0.0f) *
            load4<aligned>(x + row_at(params.x, row), column, params.length, 0.0f) * scales[row]);
  }
  store4<false>(partial + ulong(at.y) * params.length, column, params.length, sum.total());
}

template <typename T>
kernel void rms_norm_weight_partial(device const T* grad [[buffer(0)]], device const T* x [[buffer(1)]],
                                    device const float* scales [[buffer(2)]], device float* partial [[buffer(3)]],
                                    constant RmsNormParams& params [[buffer(4)]],
                                    uint2 at [[thread_position_in_grid]]) {
  if (params.aligned)
    sum_chunk<true>(grad, x, scales, partial, params, at);
  else
    sum_chunk<false>(grad, x, scales, partial, params, at);
}

#define INSTANTIATE(name, types, ...) template[[host_name(name types)]] [[kernel]] decltype(__VA_ARGS__) __VA_ARGS__;

#define INSTANTIATE_ROWS(layout, aligned, types, T, W)                                                         \
  INSTANTIATE("rms_norm_backward_simd1" layout, types, rms_norm_backward_simd<aligned, T, W, 1>)               \
  INSTANTIATE("rms_norm_backward_block1" layout, types,                                                        \
              rms_norm_backward_block<aligned, T, W, 1, RMS_NORM_BLOCK1_ROWS(sizeof(T)), 1024>)                \
  INSTANTIATE("rms_norm_backward_block2" layout, types, rms_norm_backward_block<aligned, T, W, 2, 1, 1024>)    \
  INSTANTIATE("rms_norm_backward_block2_512" layout, types, rms_norm_backward_block<aligned, T, W, 2, 1, 512>) \
  INSTANTIATE("rms_norm_backward_looped" layout, types, rms_norm_backward_looped<aligned, T, W>)               \
  INSTANTIATE("rms_norm_backward_split_sums" layout, types, rms_norm_backward_split_sums<aligned, T, W>)       \
  INSTANTIATE("rms_norm_backward_split" layout, types, rms_norm_backward_split<aligned, T, W>)

// Long rows, which the registers of NVIDIA's GPUs hold.
#define INSTANTIATE_LONG(types, T, W) \
  INSTANTIATE("rms_norm_backward_block8_aligned", types, rms_norm_backward_block<true, T, W, 8, 1, 512>)
INSTANTIATE("rms_norm_backward_block4_aligned", "_float", rms_norm_backward_block<true, float, float, 4, 1, 1024>)

#define INSTANTIATE_TYPES(types, T, W)                                           \
  INSTANTIATE("rms_norm_backward_thread", types, rms_norm_backward_thread<T, W>) \
  INSTANTIATE_ROWS("", false, types, T, W)                                       \
  INSTANTIATE_ROWS("_aligned", true, types, T, W)

INSTANTIATE_TYPES("_float", float, float)
INSTANTIATE_TYPES("_half", half, half)
INSTANTIATE_TYPES("_bfloat", bfloat, bfloat)
INSTANTIATE_TYPES("_half_float", half, float)
INSTANTIATE_TYPES("_bfloat_float", bfloat, float)

INSTANTIATE_LONG("_half", half, half)
INSTANTIATE_LONG("_bfloat", bfloat, bfloat)
INSTANTIATE_LONG("_half_float", half, float)
INSTANTIATE_LONG("_bfloat_float", bfloat, float)

INSTANTIATE("rms_norm_weight_partial", "_float", rms_norm_weight_partial<float>)
INSTANTIATE("rms_norm_weight_partial", "_half", rms_norm_weight_partial<half>)
INSTANTIATE("rms_norm_weight_partial", "_bfloat", rms_norm_weight_partial<bfloat>)
