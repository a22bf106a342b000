// rms_norm of groups, and a gate: with a the activation of the gate,
//   y = x s weight a,    s = 1 / sqrt(mean(x^2) + eps),        or, with the gate first,
//   y = x a s weight,    s = 1 / sqrt(mean((x a)^2) + eps).
// Its derivative, with u what is normalized (x, or x a) and c the gradient of u s weight (g a, or g):
//   du = s (c weight - u s^2 mean(c weight u)),
// and from there dx = du, da = g x s weight, or dx = du a, da = du x. The weight's gradient is the sum over rows of
// g x a s either way; rms_norm_gated_weight_partial makes parts of it, which normalization/column_sums.metal adds up.
// A team holds its group in registers, N float4s a thread, or, where that is too long or not aligned, walks it twice. T
// is the type of the rows, W of the weight.
#include "normalization/norm_rows.h"

// The activation of four gates, and its derivative.
struct Activation {
  float4 value;
  float4 slope;

  Activation(float4 gate, bool silu) {
    const float4 s = 1.0f / (1.0f + exp(-gate));
    value = silu ? gate * s : s;
    slope = silu ? s * (1.0f + gate * (1.0f - s)) : s * (1.0f - s);
  }
};

// A team's group of a row: where it begins in tensors with strides, in contiguous ones, and among the parameters.
struct Place {
  ulong row;
  ulong column;
  ulong flat;

  Place(ulong index, constant RmsNormGatedParams& params)
      : row(index / params.groups),
        column(ulong(uint(index % params.groups)) * params.length),
        flat(index * params.length) {}
};

inline float scale_of(float squares, constant RmsNormGatedParams& params) {
  return rsqrt(squares / static_cast<float>(params.length) + params.eps);
}

template <bool aligned, bool held, uint N, typename T, typename W, typename Team>
inline void normalize_gated(device const T* x, device const T* gate, device const W* weight, device T* y,
                            constant RmsNormGatedParams& params, Place place, Team team) {
  typedef Slice<aligned, T, N> RowSlice;
  const uint length = params.length, step = team.threads * 4 * N;
  x += row_at(params.x, place.row) + place.column;
  gate += row_at(params.gate, place.row) + place.column;
  y += place.flat;
  LongSum<float> squares;
  typename RowSlice::template Of<T> v;
  typename RowSlice::template Of<T> g;
  for (uint start = 0; start < length; start += step) {
    const RowSlice slice(team.thread_index, start);
    slice.fetch(v, x, length);
    if (held || params.gate_first) slice.fetch(g, gate, length);
    float part = 0.0f;
#pragma unroll
    for (uint n = 0; n < N; ++n) {
      const float4 u = params.gate_first ? v[n] * Activation(g[n], params.silu).value : v[n];
      part += slice.holds(n, length) ? sum4(u * u) : 0.0f;
    }
    squares.add(part);
  }
  const float scale = scale_of(team.sum(squares.total(), 0), params);
  typename RowSlice::template Of<W> w;
  for (uint start = 0; start < length; start += step) {
    const RowSlice slice(team.thread_index, start);
    if constexpr (!held) {
      slice.fetch(v, x, length);
      slice.fetch(g, gate, length);
    }
    fetch_weight(slice, w, weight + place.column, params, length);
#pragma unroll
    for (uint n = 0; n < N; ++n) v.round(n, v[n] * Activation(g[n], params.silu).value * scale * w[n]);
    slice.store(v, y, length);
  }
}

template <bool aligned, uint N, typename T, typename W>
kernel void rms_norm_gated_simd(device const T* x [[buffer(0)]], device const T* gate [[buffer(1)]],
                                device const W* weight [[buffer(2)]], device T* y [[buffer(3)]],
                                constant RmsNormGatedParams& params [[buffer(4)]],
                                uint group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]],
                                uint simdgroup [[simdgroup_index_in_threadgroup]],
                                uint simdgroups [[simdgroups_per_threadgroup]]) {
  const ulong index = ulong(group) * simdgroups + simdgroup;
  if (index >= ulong(params.rows) * params.groups) return;
  normalize_gated<aligned, true, N>(x, gate, weight, y, params, Place(index, params), Simdgroup(lane));
}

template <bool aligned, bool held, uint N, typename T, typename W>
[[kernel]] [[max_total_threads_per_threadgroup(512)]] void rms_norm_gated_block(
    device const T* x [[buffer(0)]], device const T* gate [[buffer(1)]], device const W* weight [[buffer(2)]],
    device T* y [[buffer(3)]], constant RmsNormGatedParams& params [[buffer(4)]],
    uint index [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]]) {
  threadgroup float scratch[32];
  normalize_gated<aligned, held, N>(x, gate, weight, y, params, Place(index, params),
                                    Threadgroup(thread_index, threads, scratch));
}

// The scale of the group is left in `scales`.
template <bool aligned, bool held, uint N, typename T, typename W, typename Team>
inline void differentiate_gated(device const T* grad, device const T* x, device const T* gate, device const W* weight,
                                device T* gx, device T* ggate, device float* scales,
                                constant RmsNormGatedParams& params, ulong index, Team team) {
  typedef Slice<aligned, T, N> RowSlice;
  const Place place(index, params);
  const uint length = params.length, step = team.threads * 4 * N;
  grad += row_at(params.grad, place.row) + place.column;
  x += row_at(params.x, place.row) + place.column;
  gate += row_at(params.gate, place.row) + place.column;
  weight += place.column;
  gx += place.flat;
  ggate += place.flat;
  LongSum<float2> running;  // of squares and of products
  typename RowSlice::template Of<T> v;
  typename RowSlice::template Of<T> g;
  typename RowSlice::template Of<T> d;
  typename RowSlice::template Of<W> w;
  for (uint start = 0; start < length; start += step) {
    const RowSlice slice(team.thread_index, start);
    slice.fetch(v, x, length);
    slice.fetch(g, gate, length);
    slice.fetch(d, grad, length);
    fetch_weight(slice, w, weight, params, length);
    float2 part = float2(0.0f);
#pragma unroll
    for (uint n = 0; n < N; ++n) {
      const float4 gated = v[n] * Activation(g[n], params.silu).value;
      const float4 u = params.gate_first ? gated : v[n];
      part += slice.holds(n, length) ? float2(sum4(u * u), sum4(d[n] * w[n] * gated)) : float2(0.0f);
    }
    running.add(part);
  }
  const float2 total = running.total();
  float sums[2] = {total.x, total.y};
  team.sum(sums, 0);
  const float scale = scale_of(sums[0], params);
  const float factor = -scale * (scale * (scale * (sums[1] / static_cast<float>(length))));
  if (team.thread_index == 0) scales[index] = scale;
  for (uint start = 0; start < length; start += step) {
    const RowSlice slice(team.thread_index, start);
    if constexpr (!held) {
      slice.fetch(v, x, length);
      slice.fetch(g, gate, length);
      slice.fetch(d, grad, length);
      fetch_weight(slice, w, weight, params, length);
    }
#pragma unroll
    for (uint n = 0; n < N; ++n) {
      const Activation act(g[n], params.silu);
      const float4 weighted = d[n] * w[n] * scale;
      const float4 value = v[n];
      if (params.gate_first) {
        const float4 du = fma(value * act.value, float4(factor), weighted);
        v.round(n, du * act.value);
        g.round(n, du * value * act.slope);
      } else {
        v.round(n, fma(value, float4(factor), weighted * act.value));
        g.round(n, weighted * value * act.slope);
      }
    }
    slice.store(v, gx, length);
    slice.store(g, ggate, length);
  }
}

template <bool aligned, uint N, typename T, typename W>
kernel void rms_norm_gated_backward_simd(
    device const T* grad [[buffer(0)]], device const T* x [[buffer(1)]], device const T* gate [[buffer(2)]],
    device const W* weight [[buffer(3)]], device T* gx [[buffer(4)]], device T* ggate [[buffer(5)]],
    device float* scales [[buffer(6)]], constant RmsNormGatedParams& params [[buffer(7)]],
    uint group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint simdgroups [[simdgroups_per_threadgroup]]) {
  const ulong index = ulong(group) * simdgroups + simdgroup;
  if (index >= ulong(params.rows) * params.groups) return;
  differentiate_gated<aligned, true, N>(grad, x, gate, weight, gx, ggate, scales, params, index, Simdgroup(lane));
}

template <bool aligned, bool held, uint N, typename T, typename W>
[[kernel]] [[max_total_threads_per_threadgroup(512)]] void rms_norm_gated_backward_block(
    device const T* grad [[buffer(0)]], device const T* x [[buffer(1)]], device const T* gate [[buffer(2)]],
    device const W* weight [[buffer(3)]], device T* gx [[buffer(4)]], device T* ggate [[buffer(5)]],
    device float* scales [[buffer(6)]], constant RmsNormGatedParams& params [[buffer(7)]],
    uint index [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]]) {
  threadgroup float scratch[32 * 2];
  differentiate_gated<aligned, held, N>(grad, x, gate, weight, gx, ggate, scales, params, index,
                                        Threadgroup(thread_index, threads, scratch));
}

// A thread has a column and a chunk of the rows.
template <typename T>
kernel void rms_norm_gated_weight_partial(device const T* grad [[buffer(0)]], device const T* x [[buffer(1)]],
                                          device const T* gate [[buffer(2)]], device const float* scales [[buffer(3)]],
                                          device float* partial [[buffer(4)]],
                                          constant RmsNormGatedParams& params [[buffer(5)]],
                                          uint2 at [[thread_position_in_grid]]) {
  const uint column = at.x, group = column / params.length;
  const uint first = at.y * params.chunk_rows, last = min(first + params.chunk_rows, params.rows);
  LongSum<float> sum;
  for (uint row = first; row < last; ++row) {
    const float d = static_cast<float>(grad[row_at(params.grad, row) + column]);
    const float v = static_cast<float>(x[row_at(params.x, row) + column]);
    const float4 g = float4(static_cast<float>(gate[row_at(params.gate, row) + column]));
    sum.add(d * v * Activation(g, params.silu).value.x * scales[ulong(row) * params.groups + group]);
  }
  partial[ulong(at.y) * params.length * params.groups + column] = sum.total();
}

#define INSTANTIATE(name, types, ...) template[[host_name(name types)]] [[kernel]] decltype(__VA_ARGS__) __VA_ARGS__;

#define INSTANTIATE_TYPES(types, T, W)             \
  INSTANTIATE_KERNELS(rms_norm_gated, types, T, W) \
  INSTANTIATE_KERNELS(rms_norm_gated_backward, types, T, W)

#define INSTANTIATE_KERNELS(name, types, T, W)                                   \
  INSTANTIATE(#name "_simd1_aligned", types, name##_simd<true, 1, T, W>)         \
  INSTANTIATE(#name "_simd4_aligned", types, name##_simd<true, 4, T, W>)         \
  INSTANTIATE(#name "_block4_aligned", types, name##_block<true, true, 4, T, W>) \
  INSTANTIATE(#name "_looped", types, name##_block<false, false, 2, T, W>)

INSTANTIATE_TYPES("_float", float, float)
INSTANTIATE_TYPES("_half", half, half)
INSTANTIATE_TYPES("_bfloat", bfloat, bfloat)
INSTANTIATE_TYPES("_half_float", half, float)
INSTANTIATE_TYPES("_bfloat_float", bfloat, float)

INSTANTIATE("rms_norm_gated_weight_partial", "_float", rms_norm_gated_weight_partial<float>)
INSTANTIATE("rms_norm_gated_weight_partial", "_half", rms_norm_gated_weight_partial<half>)
INSTANTIATE("rms_norm_gated_weight_partial", "_bfloat", rms_norm_gated_weight_partial<bfloat>)
