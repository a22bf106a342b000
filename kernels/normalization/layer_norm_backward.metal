// The derivative of layer_norm. With s the scale of a row, h = (x - mean) s, and g the output's gradient times the
// weight,
//   gx = s (g - mean(g) - h mean(g h)),
// plus `residual`, the gradient that reaches x + residual by itself. g is rounded as it is in its mean, so that a row
// of one element leaves nothing that s would multiply: fma(a, b, -0.0f) is a product that compilers do not contract
// into a difference. The parameters' gradients are sums over rows: of the output's gradient times h, and of the
// output's gradient. Partial sums have the weight's columns first and then the bias's. The simd and block kernels make
// them of the rows that pass through their registers, and layer_norm_partial does it for the others.
// normalization/column_sums.metal adds them up.
#include "normalization/norm_rows.h"
#include "normalization/normalization.h"

template <typename T>
kernel void layer_norm_backward_thread(device const T* grad [[buffer(0)]], device const T* x [[buffer(1)]],
                                       device const float* means [[buffer(2)]],
                                       device const float* scales [[buffer(3)]], device const T* weight [[buffer(4)]],
                                       device const T* residual [[buffer(5)]], device T* gx [[buffer(6)]],
                                       device float* partial [[buffer(7)]],
                                       constant LayerNormParams& params [[buffer(8)]],
                                       uint row [[thread_position_in_grid]]) {
  const uint length = params.length;
  const bool has_weight = params.has_weight;
  const bool has_residual = params.has_residual;
  const float mean = means[row];
  const float scale = scales[row];
  grad += row_at(params.grad, row);
  x += row_at(params.x, row);
  residual += row_at(params.residual, row);
  gx += ulong(row) * length;
  LongSum<float2> sums;  // of gradients and of products
  for (uint start = 0; start < length; start += kSumBlock) {
    const uint end = min(start + kSumBlock, length);
    float2 part = float2(0.0f);
    for (uint i = start; i < end; ++i) {
      const float g = static_cast<float>(grad[i]) * (has_weight ? static_cast<float>(weight[i]) : 1.0f);
      part.x += g;
      part.y += g * ((static_cast<float>(x[i]) - mean) * scale);
    }
    sums.add(part);
  }
  const float2 row_means = sums.total() / static_cast<float>(length);
  const float total = row_means.x;
  const float product = row_means.y;
  for (uint i = 0; i < length; ++i) {
    const float g = fma(static_cast<float>(grad[i]), has_weight ? static_cast<float>(weight[i]) : 1.0f, -0.0f);
    const float normal = (static_cast<float>(x[i]) - mean) * scale;
    const float value = (g - total - normal * product) * scale;
    gx[i] = static_cast<T>(has_residual ? value + static_cast<float>(residual[i]) : value);
  }
}

// The sums, up to element `end`, of g and of g h over a thread's slice. kRun float4s, of which the row has all or none,
// are added up before it is asked whether it has them.
template <uint N, typename Slice, typename Weight>
inline float2 sums_of(Slice slice, thread const float4 (&v)[N], thread const float4 (&g)[N], thread const Weight& w,
                      float scale, uint end) {
  float2 sums = float2(0.0f);
  for (uint first = 0; first < N; first += Slice::kRun) {
    float4 totals = g[first] * w[first];
    float4 products = totals * v[first];
    for (uint n = first + 1; n < first + Slice::kRun; ++n) {
      const float4 weighted = g[n] * w[n];
      totals += weighted;
      products = fma(weighted, v[n], products);
    }
    sums += slice.holds(first, end) ? float2(sum4(totals), sum4(products)) : float2(0.0f);
  }
  return float2(sums.x, sums.y * scale);
}

// The means and scales of the R rows from `first` on; of those past the last one that one's. A lane has one number, the
// mean of row lane / 2 or its scale: numbers that all lanes load are waited for where they are loaded, by a compiler
// that moves them to registers of the simdgroup.
template <uint R>
inline float fetch_statistic(device const float* means, device const float* scales, uint first, uint lane,
                             constant LayerNormParams& params) {
  return (lane % 2 ? scales : means)[R == 1 ? first : min(first + lane / 2 % R, params.rows - 1)];
}

// A stream's rows, R of them at once and then those streams * R further on, by one team; and their part of the
// parameters' gradients where it is wanted. Rows are on their way while those before them are at work.
template <bool aligned, bool nested, bool has_residual, uint N, uint R, typename T, typename Team>
inline void differentiate_rows(device const T* grad, device const T* x, device const float* means,
                               device const float* scales, device const T* weight, device const T* residual,
                               device T* gx, device float* partial, constant LayerNormParams& params, Team team,
                               uint stream) {
  typedef Slice<aligned, T, N> RowSlice;
  typedef typename RowSlice::template Of<conditional_t<aligned, T, float>> Held;  // elements by themselves unpacked
  constexpr bool ahead = N * sizeof(T) <= 4 && (aligned || sizeof(T) == 4);       // of others registers do not hold two
  const uint length = params.length;
  const RowSlice slice(team.thread_index);
  const uint lane = team.thread_index % 32;
  Held next_v[R];
  Held next_g[R];
  typename RowSlice::template Of<T> w;
  float4 gw[N];
  float4 gb[N];
  float next_statistic = fetch_statistic<R>(means, scales, stream * R, lane, params);
  if constexpr (ahead) {
    fetch_rows<nested>(slice, next_v, x, params.x, stream * R, params);
    fetch_rows<nested>(slice, next_g, grad, params.grad, stream * R, params);
  }
  fetch_weight(slice, w, weight, params, length);
  for (uint n = 0; n < N; ++n) gw[n] = gb[n] = float4(0.0f);
  uint parity = 0;  // a reduction's scratch is used again only after another one
  for (uint first = stream * R, next;; first = next) {
    next = row_after<R>(first, params);
    if constexpr (!ahead) {
      fetch_rows<nested>(slice, next_v, x, params.x, first, params);
      fetch_rows<nested>(slice, next_g, grad, params.grad, first, params);
    }
    float scale[R];
    float4 v[R][N];  // less the mean
    float4 g[R][N];
#pragma unroll
    for (uint r = 0; r < R; ++r) {
      const float mean = simd_shuffle(next_statistic, 2 * r);
      scale[r] = simd_shuffle(next_statistic, 2 * r + 1);
      for (uint n = 0; n < N; ++n) {
        v[r][n] = next_v[r][n] - mean;
        g[r][n] = next_g[r][n];
      }
    }
    next_statistic = fetch_statistic<R>(means, scales, next, lane, params);
    if constexpr (ahead) {
      fetch_rows<nested>(slice, next_v, x, params.x, next, params);
      fetch_rows<nested>(slice, next_g, grad, params.grad, next, params);
      simdgroup_barrier(mem_flags::mem_none);  // compilers would move the loads down to the reduction's barrier
    }
    float sums[2 * R];
#pragma unroll
    for (uint r = 0; r < R; ++r) {
      float2 sum = float2(0.0f);
      if (slice.holds(0, length)) sum = sums_of<N>(slice, v[r], g[r], w, scale[r], length);
      sums[2 * r] = sum.x;
      sums[2 * r + 1] = sum.y;
    }
    team.sum(sums, parity);
    parity ^= 1;
    Held added[R];
    if constexpr (has_residual) fetch_rows<nested>(slice, added, residual, params.residual, first, params);
#pragma unroll
    for (uint r = 0; r < R; ++r) {
      const uint row = first + r;
      if (r > 0 && row >= params.rows) continue;
      const float total = sums[2 * r] * params.inverse_length, product = sums[2 * r + 1] * params.inverse_length;
      Held results;
      for (uint n = 0; n < N; ++n) {
        const float4 normal = v[r][n] * scale[r];
        gw[n] = fma(g[r][n], normal, gw[n]);
        gb[n] += g[r][n];
        const float4 value = (fma(g[r][n], w[n], float4(-0.0f)) - total - normal * product) * scale[r];
        if constexpr (has_residual)
          results.round(n, value + added[r][n]);
        else
          results.round(n, value);
      }
      slice.store(results, gx + ulong(row) * length, length);
    }
    if (next == first) break;
  }
  if (!params.partial) return;
  slice.store(gw, partial + 2 * ulong(stream) * length, length);
  slice.store(gb, partial + (2 * ulong(stream) + 1) * length, length);
}

template <bool aligned, typename T, uint N>
kernel void layer_norm_backward_simd(device const T* grad [[buffer(0)]], device const T* x [[buffer(1)]],
                                     device const float* means [[buffer(2)]], device const float* scales [[buffer(3)]],
                                     device const T* weight [[buffer(4)]], device const T* residual [[buffer(5)]],
                                     device T* gx [[buffer(6)]], device float* partial [[buffer(7)]],
                                     constant LayerNormParams& params [[buffer(8)]],
                                     uint group [[threadgroup_position_in_grid]],
                                     uint lane [[thread_index_in_simdgroup]],
                                     uint simdgroup [[simdgroup_index_in_threadgroup]],
                                     uint simdgroups [[simdgroups_per_threadgroup]]) {
  const uint stream = group * simdgroups + simdgroup;
  if (stream >= params.streams) return;
  const Simdgroup team(lane);
  if (params.has_residual)
    differentiate_rows<aligned, true, true, N, 1>(grad, x, means, scales, weight, residual, gx, partial, params, team,
                                                  stream);
  else
    differentiate_rows<aligned, true, false, N, 1>(grad, x, means, scales, weight, residual, gx, partial, params, team,
                                                   stream);
}

template <bool aligned, typename T, uint N, uint R, uint MOST>
[[kernel]] [[max_total_threads_per_threadgroup(MOST)]] void layer_norm_backward_block(
    device const T* grad [[buffer(0)]], device const T* x [[buffer(1)]], device const float* means [[buffer(2)]],
    device const float* scales [[buffer(3)]], device const T* weight [[buffer(4)]],
    device const T* residual [[buffer(5)]], device T* gx [[buffer(6)]], device float* partial [[buffer(7)]],
    constant LayerNormParams& params [[buffer(8)]], uint stream [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint threads [[threads_per_threadgroup]]) {
  threadgroup float scratch[2 * 32 * 2 * R];
  const Threadgroup team(thread_index, threads, scratch);
  if (params.has_residual)
    differentiate_rows<aligned, false, true, N, R>(grad, x, means, scales, weight, residual, gx, partial, params, team,
                                                   stream);
  else
    differentiate_rows<aligned, false, false, N, R>(grad, x, means, scales, weight, residual, gx, partial, params, team,
                                                    stream);
}

// A longer row in two walks: the sums, and the results.
template <bool aligned, typename T>
[[kernel]] [[max_total_threads_per_threadgroup(1024)]] void layer_norm_backward_looped(
    device const T* grad [[buffer(0)]], device const T* x [[buffer(1)]], device const float* means [[buffer(2)]],
    device const float* scales [[buffer(3)]], device const T* weight [[buffer(4)]],
    device const T* residual [[buffer(5)]], device T* gx [[buffer(6)]], device float* partial [[buffer(7)]],
    constant LayerNormParams& params [[buffer(8)]], uint row [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint threads [[threads_per_threadgroup]]) {
  constexpr uint N = kColumnStep;
  typedef Slice<aligned, T, N> RowSlice;
  threadgroup float scratch[32 * 2];
  const Threadgroup team(thread_index, threads, scratch);
  const uint length = params.length;
  const float mean = means[row];
  const float scale = scales[row];
  grad += row_at(params.grad, row);
  x += row_at(params.x, row);
  residual += row_at(params.residual, row);
  gx += ulong(row) * length;
  typename RowSlice::template Of<T> v;
  typename RowSlice::template Of<T> g;
  typename RowSlice::template Of<T> w;
  LongSum<float2> some;
  for (uint start = 0; start < length; start += threads * 4 * N) {
    const RowSlice slice(thread_index, start);
    slice.fetch(v, x, length);
    slice.fetch(g, grad, length);
    fetch_weight(slice, w, weight, params, length);
    float4 differences[N];
    float4 gradients[N];
    for (uint n = 0; n < N; ++n) {
      differences[n] = v[n] - mean;
      gradients[n] = g[n];
    }
    some.add(sums_of<N>(slice, differences, gradients, w, scale, length));
  }
  const float2 mine = some.total();
  float sums[2] = {mine.x, mine.y};
  team.sum(sums, 0);
  const float total = sums[0] / static_cast<float>(length), product = sums[1] / static_cast<float>(length);
  for (uint start = 0; start < length; start += threads * 4 * N) {
    const RowSlice slice(thread_index, start);
    typename RowSlice::template Of<T> added;
    slice.fetch(v, x, length);
    slice.fetch(g, grad, length);
    fetch_weight(slice, w, weight, params, length);
    if (params.has_residual) slice.fetch(added, residual, length);
    for (uint n = 0; n < N; ++n) {
      const float4 normal = (v[n] - mean) * scale;
      const float4 value = (fma(g[n], w[n], float4(-0.0f)) - total - normal * product) * scale;
      v.round(n, params.has_residual ? value + added[n] : value);
    }
    slice.store(v, gx, length);
  }
}

// Partial sums of the parameters' gradients by themselves: a thread has four columns and a chunk of the rows.
template <bool aligned, typename T>
inline void sum_chunk(device const T* grad, device const T* x, device const float* means, device const float* scales,
                      device float* partial, constant LayerNormParams& params, uint2 at) {
  const uint column = at.x * 4;
  const uint first = at.y * params.chunk_rows;
  const uint last = min(first + params.chunk_rows, params.rows);
  LongSum<float4> gw, gb;
  for (uint row = first; row < last; ++row) {
    const float4 g = load4<aligned>(grad + row_at(params.grad, row), column, params.length, 0.0f);
    const float4 v = load4<aligned>(x + row_at(params.x, row), column, params.length, 0.0f);
    gw.add(g * ((v - means[row]) * scales[row]));
    gb.add(g);
  }
  store4<false>(partial + 2 * ulong(at.y) * params.length, column, params.length, gw.total());
  store4<false>(partial + (2 * ulong(at.y) + 1) * params.length, column, params.length, gb.total());
}

template <typename T>
kernel void layer_norm_partial(device const T* grad [[buffer(0)]], device const T* x [[buffer(1)]],
                               device const float* means [[buffer(2)]], device const float* scales [[buffer(3)]],
                               device float* partial [[buffer(4)]], constant LayerNormParams& params [[buffer(5)]],
                               uint2 at [[thread_position_in_grid]]) {
  if (params.aligned)
    sum_chunk<true>(grad, x, means, scales, partial, params, at);
  else
    sum_chunk<false>(grad, x, means, scales, partial, params, at);
}

#define INSTANTIATE(name, types, ...) template[[host_name(name types)]] [[kernel]] decltype(__VA_ARGS__) __VA_ARGS__;

// As many rows at once as rms_norm's, whose registers hold as much.
#define INSTANTIATE_ROWS(layout, aligned, types, T)                                                             \
  INSTANTIATE("layer_norm_backward_simd1" layout, types, layer_norm_backward_simd<aligned, T, 1>)               \
  INSTANTIATE("layer_norm_backward_block1" layout, types,                                                       \
              layer_norm_backward_block<aligned, T, 1, RMS_NORM_BLOCK1_ROWS(sizeof(T)), 1024>)                  \
  INSTANTIATE("layer_norm_backward_block2" layout, types, layer_norm_backward_block<aligned, T, 2, 1, 1024>)    \
  INSTANTIATE("layer_norm_backward_block2_512" layout, types, layer_norm_backward_block<aligned, T, 2, 1, 512>) \
  INSTANTIATE("layer_norm_backward_looped" layout, types, layer_norm_backward_looped<aligned, T>)

#define INSTANTIATE_TYPES(types, T)                                               \
  INSTANTIATE("layer_norm_backward_thread", types, layer_norm_backward_thread<T>) \
  INSTANTIATE("layer_norm_partial", types, layer_norm_partial<T>)                 \
  INSTANTIATE_ROWS("", false, types, T)                                           \
  INSTANTIATE_ROWS("_aligned", true, types, T)

INSTANTIATE_TYPES("_float", float)
INSTANTIATE_TYPES("_half", half)
INSTANTIATE_TYPES("_bfloat", bfloat)
