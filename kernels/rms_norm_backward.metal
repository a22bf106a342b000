// The derivative of rms_norm. With s the scale of a row and g the output's gradient times the weight,
//   gx = s (g - x s^2 mean(g x)),
// plus `residual`, the gradient that reaches x + residual by itself. The weight's gradient is the sum over rows of the
// output's gradient times s x. The simd and block kernels make `partial` sums of the rows that pass through their
// registers; the others leave s in `scales`, and rms_norm_weight.metal does the rest.
#include "common/norm_rows.h"

// What draws a gradient towards x: scale^2 mean(g x).
inline float pull_of(float product, float scale, constant RmsNormParams& params) {
  return scale * scale * (product / static_cast<float>(params.length));
}

template <typename T, typename W>
kernel void rms_norm_backward_thread(device const T* grad [[buffer(0)]], device const T* x [[buffer(1)]],
                                     device const W* weight [[buffer(2)]], device const T* residual [[buffer(3)]],
                                     device T* gx [[buffer(4)]], device float* scales [[buffer(5)]],
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
  load_weight<aligned>(share, w, weight, params, length);
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
kernel void rms_norm_backward_simd(device const T* grad [[buffer(0)]], device const T* x [[buffer(1)]],
                                   device const W* weight [[buffer(2)]], device const T* residual [[buffer(3)]],
                                   device T* gx [[buffer(4)]], device float* partial [[buffer(5)]],
                                   constant RmsNormParams& params [[buffer(6)]],
                                   uint group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]],
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
    device const T* grad [[buffer(0)]], device const T* x [[buffer(1)]], device const W* weight [[buffer(2)]],
    device const T* residual [[buffer(3)]], device T* gx [[buffer(4)]], device float* partial [[buffer(5)]],
    constant RmsNormParams& params [[buffer(6)]], uint stream [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint threads [[threads_per_threadgroup]]) {
  threadgroup float scratch[2 * 64 * R];
  const Threadgroup team(thread_index, threads, scratch);
  if (params.aligned)
    differentiate_rows<true, N, R>(grad, x, weight, residual, gx, partial, params, team, stream);
  else
    differentiate_rows<false, N, R>(grad, x, weight, residual, gx, partial, params, team, stream);
}

// A row of any length in two walks, through the part of it that a threadgroup has: the sums (of squares, and of g x),
// and the gradients.

template <bool aligned, typename T, typename W>
inline float2 walk_sums(device const T* grad, device const T* x, device const W* weight, constant RmsNormParams& params,
                        Part part, Threadgroup team) {
  constexpr uint N = kStep<T>;
  float4 v[N];
  float4 g[N];
  float4 w[N];
  float2 sums = float2(0.0f);
  for (uint start = part.begin; start < part.end; start += team.threads * 4 * N) {
    const Share<T, N> share(team.thread_index, team.threads, start);
    share.template load<aligned>(v, x, part.end, 0.0f);
    share.template load<aligned>(g, grad, part.end, 0.0f);
    load_weight<aligned>(share, w, weight, params, part.end);
    for (uint n = 0; n < N; ++n) sums += float2(sum4(v[n] * v[n]), sum4(g[n] * w[n] * v[n]));
  }
  return team.sum(sums, 0);
}

template <bool aligned, typename T, typename W>
inline void walk_gradients(device const T* grad, device const T* x, device const W* weight, device const T* residual,
                           device T* gx, constant RmsNormParams& params, Part part, float2 sums, Threadgroup team) {
  constexpr uint N = kStep<T>;
  const float scale = scale_of(sums.x, params);
  const float pull = pull_of(sums.y, scale, params);
  float4 v[N];
  float4 g[N];
  float4 w[N];
  for (uint start = part.begin; start < part.end; start += team.threads * 4 * N) {
    const Share<T, N> share(team.thread_index, team.threads, start);
    share.template load<aligned>(v, x, part.end, 0.0f);
    share.template load<aligned>(g, grad, part.end, 0.0f);
    load_weight<aligned>(share, w, weight, params, part.end);
    for (uint n = 0; n < N; ++n) v[n] = scale * (g[n] * w[n] - v[n] * pull);
    if (params.has_residual) {
      share.template load<aligned>(g, residual, part.end, 0.0f);
      for (uint n = 0; n < N; ++n) v[n] += g[n];
    }
    share.template store<aligned>(v, gx, part.end);
  }
}

template <bool aligned, typename T, typename W>
inline void differentiate_long_row(device const T* grad, device const T* x, device const W* weight,
                                   device const T* residual, device T* gx, device float* scales,
                                   constant RmsNormParams& params, Threadgroup team, uint row) {
  const Part part(params.length);
  const float2 sums = walk_sums<aligned>(grad, x, weight, params, part, team);
  if (team.thread_index == 0) scales[row] = scale_of(sums.x, params);
  walk_gradients<aligned>(grad, x, weight, residual, gx, params, part, sums, team);
}

template <typename T, typename W>
[[kernel]] [[max_total_threads_per_threadgroup(1024)]] void rms_norm_backward_looped(
    device const T* grad [[buffer(0)]], device const T* x [[buffer(1)]], device const W* weight [[buffer(2)]],
    device const T* residual [[buffer(3)]], device T* gx [[buffer(4)]], device float* scales [[buffer(5)]],
    constant RmsNormParams& params [[buffer(6)]], uint row [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint threads [[threads_per_threadgroup]]) {
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

// Few long rows: several threadgroups share one, and leave the sums of their parts to a second dispatch.

template <typename T, typename W>
[[kernel]] [[max_total_threads_per_threadgroup(256)]] void rms_norm_backward_split_sums(
    device const T* grad [[buffer(0)]], device const T* x [[buffer(1)]], device const W* weight [[buffer(2)]],
    device float2* parts [[buffer(3)]], constant RmsNormParams& params [[buffer(4)]],
    uint2 group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]],
    uint2 threads [[threads_per_threadgroup]]) {
  threadgroup float scratch[64];
  const Threadgroup team(thread_index, threads.x, scratch);
  const Part part(params.length, group.x, params.share);
  grad += group.y * params.grad_stride;
  x += group.y * params.x_stride;
  const float2 sums = params.aligned ? walk_sums<true>(grad, x, weight, params, part, team)
                                     : walk_sums<false>(grad, x, weight, params, part, team);
  if (thread_index == 0) parts[group.y * params.splits + group.x] = sums;
}

template <typename T, typename W>
[[kernel]] [[max_total_threads_per_threadgroup(256)]] void rms_norm_backward_split(
    device const T* grad [[buffer(0)]], device const T* x [[buffer(1)]], device const W* weight [[buffer(2)]],
    device const T* residual [[buffer(3)]], device T* gx [[buffer(4)]], device float* scales [[buffer(5)]],
    constant RmsNormParams& params [[buffer(6)]], device const float2* parts [[buffer(7)]],
    uint2 group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]],
    uint2 threads [[threads_per_threadgroup]]) {
  threadgroup float scratch[64];
  const Threadgroup team(thread_index, threads.x, scratch);
  const Part part(params.length, group.x, params.share);
  grad += group.y * params.grad_stride;
  x += group.y * params.x_stride;
  residual += group.y * params.residual_stride;
  gx += ulong(group.y) * params.length;
  const bool present = thread_index < params.splits;
  const float2 sums = team.sum(present ? parts[group.y * params.splits + thread_index] : float2(0.0f), 0);
  if (thread_index == 0 && group.x == 0) scales[group.y] = scale_of(sums.x, params);
  if (params.aligned)
    walk_gradients<true>(grad, x, weight, residual, gx, params, part, sums, team);
  else
    walk_gradients<false>(grad, x, weight, residual, gx, params, part, sums, team);
}

#define INSTANTIATE(name, types, ...) template[[host_name(name types)]] [[kernel]] decltype(__VA_ARGS__) __VA_ARGS__;

#define INSTANTIATE_TYPES(types, T, W)                                                                   \
  INSTANTIATE("rms_norm_backward_thread", types, rms_norm_backward_thread<T, W>)                         \
  INSTANTIATE("rms_norm_backward_simd1", types, rms_norm_backward_simd<T, W, 1>)                         \
  INSTANTIATE("rms_norm_backward_block1", types, rms_norm_backward_block<T, W, 1, RMS_NORM_BLOCK1_ROWS>) \
  INSTANTIATE("rms_norm_backward_block2", types, rms_norm_backward_block<T, W, 2, 1>)                    \
  INSTANTIATE("rms_norm_backward_looped", types, rms_norm_backward_looped<T, W>)                         \
  INSTANTIATE("rms_norm_backward_split_sums", types, rms_norm_backward_split_sums<T, W>)                 \
  INSTANTIATE("rms_norm_backward_split", types, rms_norm_backward_split<T, W>)

INSTANTIATE_TYPES("_float", float, float)
INSTANTIATE_TYPES("_half", half, half)
INSTANTIATE_TYPES("_bfloat", bfloat, bfloat)
INSTANTIATE_TYPES("_half_float", half, float)
INSTANTIATE_TYPES("_bfloat_float", bfloat, float)
