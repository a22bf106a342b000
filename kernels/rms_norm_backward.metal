// The derivative of rms_norm. With s the scale of a row and g the output's gradient times the weight,
//   gx = s (g - x s^2 mean(g x)),
// plus `residual`, the gradient that reaches x + residual by itself. The weight's gradient is the sum over rows of the
// output's gradient times s x, made in two stages without atomics, so that the order of the additions is always the
// same: first `partial` sums, which the simd and block kernels make of the rows that pass through their registers and a
// kernel of its own for the others, which leave s in `scales`; then the sum of these.
#include "common/norm_rows.h"

// What draws a gradient towards x: scale^2 mean(g x).
inline float pull_of(float product, float scale, constant RmsNormParams& params) {
  return scale * scale * (product / static_cast<float>(params.length));
}

template <typename T, typename W>
kernel void rms_norm_backward_thread(device const T* grad [[buffer(0)]],
                                     device const T* x [[buffer(1)]],
                                     device const W* weight [[buffer(2)]],
                                     device const T* residual [[buffer(3)]],
                                     device T* gx [[buffer(4)]],
                                     device float* scales [[buffer(5)]],
                                     constant RmsNormParams& params [[buffer(6)]],
                                     uint row [[thread_position_in_grid]]) {
  const uint length = params.length;
  const bool has_weight = params.has_weight;
  const bool has_residual = params.has_residual;
  grad += row * params.grad_stride;
  x += row * params.x_stride;
  gx += ulong(row) * length;
  residual += row * params.residual_stride;
  float squares = 0.0f;
  float product = 0.0f;
  for (uint start = 0; start < length; start += kSumBlock) {
    const uint end = min(start + kSumBlock, length);
    float square_part = 0.0f;
    float product_part = 0.0f;
    for (uint i = start; i < end; ++i) {
      const float v = static_cast<float>(x[i]);
      const float g = static_cast<float>(grad[i]);
      square_part += v * v;
      product_part += (has_weight ? g * static_cast<float>(weight[i]) : g) * v;
    }
    squares += square_part;
    product += product_part;
  }
  const float scale = scale_of(squares, params);
  const float pull = pull_of(product, scale, params);
  scales[row] = scale;
  for (uint i = 0; i < length; ++i) {
    const float g = static_cast<float>(grad[i]);
    const float weighted = has_weight ? g * static_cast<float>(weight[i]) : g;
    const float value = scale * (weighted - static_cast<float>(x[i]) * pull);
    gx[i] = static_cast<T>(has_residual ? value + static_cast<float>(residual[i]) : value);
  }
}

template <uint R, typename T, typename Share, typename Raw, uint RAWS>
inline void fetch_rows(Share share, thread Raw (&bits)[R][RAWS], device const T* rows, long stride, ulong first,
                       constant RmsNormParams& params) {
#pragma unroll
  for (uint r = 0; r < R; ++r)
    share.fetch(bits[r], rows + min(first + r, ulong(params.rows - 1)) * stride, params.length);
}

// A stream's rows, R of them at once and then those streams * R further on, by one team; and their part of the weight's
// gradient where it is wanted. Rows are on their way while those before them are at work.
template <bool aligned, uint N, uint R, typename T, typename W, typename Team>
inline void differentiate_rows(device const T* grad, device const T* x, device const W* weight,
                               device const T* residual, device T* gx, device float* partial,
                               constant RmsNormParams& params, Team team, uint stream) {
  typedef typename Share<T, N>::Raw Raw;
  constexpr uint kRaws = Share<T, N>::kRaws;
  constexpr bool ahead = aligned && sizeof(T) == 2;  // of others the registers could not hold two
  const uint length = params.length;
  const float inverse_length = 1.0f / static_cast<float>(length);
  const ulong last = params.rows - 1;
  const Share<T, N> share(team.thread_index, team.threads);
  Raw next_v[R][kRaws];
  Raw next_g[R][kRaws];
  float4 w[N];
  float4 gw[N];
  if constexpr (ahead) {
    fetch_rows(share, next_v, x, params.x_stride, stream * R, params);
    fetch_rows(share, next_g, grad, params.grad_stride, stream * R, params);
  }
  load_weight<aligned>(share, w, weight, params);
  for (uint n = 0; n < N; ++n) gw[n] = float4(0.0f);
  uint parity = 0;  // a reduction's scratch is used again only after another one
  for (ulong first = stream * R; first < params.rows; first += params.streams * R) {
    float4 v[R][N];
    float4 g[R][N];
    float2 sums[R];
#pragma unroll
    for (uint r = 0; r < R; ++r) {
      if constexpr (ahead) {
        share.widen(v[r], next_v[r]);
        share.widen(g[r], next_g[r]);
      } else {
        share.template load_any<aligned>(v[r], x + min(first + r, last) * params.x_stride, length);
        share.template load_any<aligned>(g[r], grad + min(first + r, last) * params.grad_stride, length);
      }
    }
    Raw added[R][kRaws];
    if constexpr (ahead) {
      if (params.has_residual) fetch_rows(share, added, residual, params.residual_stride, first, params);
      fetch_rows(share, next_v, x, params.x_stride, first + params.streams * R, params);
      fetch_rows(share, next_g, grad, params.grad_stride, first + params.streams * R, params);
    }
#pragma unroll
    for (uint r = 0; r < R; ++r) {
      sums[r] = float2(0.0f);
      for (uint n = 0; n < N; ++n) {
        const float2 part = float2(sum4(v[r][n] * v[r][n]), sum4(g[r][n] * v[r][n] * w[n]));
        sums[r] += share.holds(n, length) ? part : float2(0.0f);
      }
    }
    team.sum(sums, parity);
    parity ^= 1;
#pragma unroll
    for (uint r = 0; r < R; ++r) {
      const ulong row = first + r;
      if (row > last) continue;
      const float scale = rsqrt(fma(sums[r].x, inverse_length, params.eps));
      const float factor = -scale * (scale * (scale * (sums[r].y * inverse_length)));  // in range where scale^3 is not
      for (uint n = 0; n < N; ++n) {
        gw[n] = fma(g[r][n] * v[r][n], float4(scale), gw[n]);
        v[r][n] = fma(v[r][n], float4(factor), g[r][n] * w[n] * scale);
      }
      if (params.has_residual) {
        if constexpr (ahead)
          share.widen(g[r], added[r]);
        else
          share.template load_any<aligned>(g[r], residual + row * params.residual_stride, length);
        for (uint n = 0; n < N; ++n) v[r][n] += g[r][n];
      }
      share.template store<aligned>(v[r], gx + row * length, length);
    }
  }
  if (params.partial) share.template store<false>(gw, partial + ulong(stream) * length, length);
}

template <typename T, typename W, uint N>
kernel void rms_norm_backward_simd(device const T* grad [[buffer(0)]],
                                   device const T* x [[buffer(1)]],
                                   device const W* weight [[buffer(2)]],
                                   device const T* residual [[buffer(3)]],
                                   device T* gx [[buffer(4)]],
                                   device float* partial [[buffer(5)]],
                                   constant RmsNormParams& params [[buffer(6)]],
                                   uint group [[threadgroup_position_in_grid]],
                                   uint lane [[thread_index_in_simdgroup]],
                                   uint simdgroup [[simdgroup_index_in_threadgroup]],
                                   uint simdgroups [[simdgroups_per_threadgroup]]) {
  const uint stream = group * simdgroups + simdgroup;
  if (stream >= params.streams) return;
  if (params.aligned)
    differentiate_rows<true, N, 1>(grad, x, weight, residual, gx, partial, params, Simdgroup(lane), stream);
  else
    differentiate_rows<false, N, 1>(grad, x, weight, residual, gx, partial, params, Simdgroup(lane), stream);
}

template <typename T, typename W, uint N, uint R>
[[kernel]] [[max_total_threads_per_threadgroup(1024)]] void rms_norm_backward_block(
    device const T* grad [[buffer(0)]],
    device const T* x [[buffer(1)]],
    device const W* weight [[buffer(2)]],
    device const T* residual [[buffer(3)]],
    device T* gx [[buffer(4)]],
    device float* partial [[buffer(5)]],
    constant RmsNormParams& params [[buffer(6)]],
    uint stream [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]]) {
  threadgroup float scratch[2 * 64 * R];
  const Threadgroup team(thread_index, threads, scratch);
  if (params.aligned)
    differentiate_rows<true, N, R>(grad, x, weight, residual, gx, partial, params, team, stream);
  else
    differentiate_rows<false, N, R>(grad, x, weight, residual, gx, partial, params, team, stream);
}

template <bool aligned, typename T, typename W>
inline void differentiate_long_row(device const T* grad, device const T* x, device const W* weight,
                                   device const T* residual, device T* gx, device float* scales,
                                   constant RmsNormParams& params, Threadgroup team, uint row) {
  constexpr uint N = kStep<T>;
  const uint length = params.length;
  float4 v[N];
  float4 g[N];
  float4 w[N];
  float squares = 0.0f;
  float product = 0.0f;
  for (uint start = 0; start < length; start += team.threads * 4 * N) {
    const Share<T, N> share(team.thread_index, team.threads, start);
    share.template load<aligned>(v, x, length, 0.0f);
    share.template load<aligned>(g, grad, length, 0.0f);
    load_weight<aligned>(share, w, weight, params);
    for (uint n = 0; n < N; ++n) {
      squares += sum4(v[n] * v[n]);
      product += sum4(g[n] * w[n] * v[n]);
    }
  }
  const float2 sums = team.sum(float2(squares, product), 0);
  const float scale = scale_of(sums.x, params);
  const float pull = pull_of(sums.y, scale, params);
  if (team.thread_index == 0) scales[row] = scale;
  for (uint start = 0; start < length; start += team.threads * 4 * N) {
    const Share<T, N> share(team.thread_index, team.threads, start);
    share.template load<aligned>(v, x, length, 0.0f);
    share.template load<aligned>(g, grad, length, 0.0f);
    load_weight<aligned>(share, w, weight, params);
    for (uint n = 0; n < N; ++n) v[n] = scale * (g[n] * w[n] - v[n] * pull);
    if (params.has_residual) {
      share.template load<aligned>(g, residual, length, 0.0f);
      for (uint n = 0; n < N; ++n) v[n] += g[n];
    }
    share.template store<aligned>(v, gx, length);
  }
}

template <typename T, typename W>
[[kernel]] [[max_total_threads_per_threadgroup(1024)]] void rms_norm_backward_looped(
    device const T* grad [[buffer(0)]],
    device const T* x [[buffer(1)]],
    device const W* weight [[buffer(2)]],
    device const T* residual [[buffer(3)]],
    device T* gx [[buffer(4)]],
    device float* scales [[buffer(5)]],
    constant RmsNormParams& params [[buffer(6)]],
    uint row [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]]) {
  threadgroup float scratch[64];
  const Threadgroup team(thread_index, threads, scratch);
  grad += row * params.grad_stride;
  x += row * params.x_stride;
  residual += row * params.residual_stride;
  gx += ulong(row) * params.length;
  if (params.aligned)
    differentiate_long_row<true>(grad, x, weight, residual, gx, scales, params, team, row);
  else
    differentiate_long_row<false>(grad, x, weight, residual, gx, scales, params, team, row);
}

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
kernel void rms_norm_weight_partial(device const T* grad [[buffer(0)]],
                                    device const T* x [[buffer(1)]],
                                    device const float* scales [[buffer(2)]],
                                    device float* partial [[buffer(3)]],
                                    constant RmsNormWeightParams& params [[buffer(4)]],
                                    uint2 at [[thread_position_in_grid]]) {
  if (params.aligned)
    sum_chunk<true>(grad, x, scales, partial, params, at);
  else
    sum_chunk<false>(grad, x, scales, partial, params, at);
}

// The sum of the partial ones: few of them column by column, a thread for each …
template <typename W>
kernel void rms_norm_weight_thread(device const float* partial [[buffer(0)]],
                                   device W* gw [[buffer(1)]],
                                   constant RmsNormWeightParams& params [[buffer(2)]],
                                   uint column [[thread_position_in_grid]]) {
  float sum = 0.0f;
  for (uint chunk = 0; chunk < params.chunks; ++chunk) sum += partial[ulong(chunk) * params.length + column];
  gw[column] = static_cast<W>(sum);
}

// … many of them by threadgroups of 32 simdgroups for 32 columns: each simdgroup has every 32nd of them, a few on their
// way at once.
constexpr constant uint kAtOnce = 8;

template <typename W>
[[kernel]] [[max_total_threads_per_threadgroup(1024)]] void rms_norm_weight_block(
    device const float* partial [[buffer(0)]],
    device W* gw [[buffer(1)]],
    constant RmsNormWeightParams& params [[buffer(2)]],
    uint group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup float sums[32 * 33];  // an odd stride lets a simdgroup read a column of it at once
  const uint column = min(group * 32 + lane, params.length - 1);
  float sum = 0.0f;
  for (uint first = simdgroup; first < params.chunks; first += 32 * kAtOnce) {
    float values[kAtOnce];
#pragma unroll
    for (uint i = 0; i < kAtOnce; ++i)
      values[i] = first + 32 * i < params.chunks ? partial[ulong(first + 32 * i) * params.length + column] : 0.0f;
#pragma unroll
    for (uint i = 0; i < kAtOnce; ++i) sum += values[i];
  }
  sums[simdgroup * 33 + lane] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const float total = simd_sum(sums[lane * 33 + simdgroup]);
  if (lane == 0 && group * 32 + simdgroup < params.length) gw[group * 32 + simdgroup] = static_cast<W>(total);
}

#define INSTANTIATE(name, types, ...) \
  template [[host_name(name types)]] [[kernel]] decltype(__VA_ARGS__) __VA_ARGS__;

#define INSTANTIATE_TYPES(types, T, W)                                                                   \
  INSTANTIATE("rms_norm_backward_thread", types, rms_norm_backward_thread<T, W>)                         \
  INSTANTIATE("rms_norm_backward_simd1", types, rms_norm_backward_simd<T, W, 1>)                         \
  INSTANTIATE("rms_norm_backward_block1", types, rms_norm_backward_block<T, W, 1, RMS_NORM_BLOCK1_ROWS>) \
  INSTANTIATE("rms_norm_backward_block2", types, rms_norm_backward_block<T, W, 2, 1>)                    \
  INSTANTIATE("rms_norm_backward_looped", types, rms_norm_backward_looped<T, W>)

INSTANTIATE_TYPES("_float", float, float)
INSTANTIATE_TYPES("_half", half, half)
INSTANTIATE_TYPES("_bfloat", bfloat, bfloat)
INSTANTIATE_TYPES("_half_float", half, float)
INSTANTIATE_TYPES("_bfloat_float", bfloat, float)

#define INSTANTIATE_WEIGHT(types, T)                                            \
  INSTANTIATE("rms_norm_weight_partial", types, rms_norm_weight_partial<T>)     \
  INSTANTIATE("rms_norm_weight_thread", types, rms_norm_weight_thread<T>)       \
  INSTANTIATE("rms_norm_weight_block", types, rms_norm_weight_block<T>)

INSTANTIATE_WEIGHT("_float", float)
INSTANTIATE_WEIGHT("_half", half)
INSTANTIATE_WEIGHT("_bfloat", bfloat)
