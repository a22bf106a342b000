// The derivative of group_norm. With s the scale of a group, h = (x - mean) s, and g the output's gradient times the
// weight,
//   gx = s (g - mean(g) - h mean(g h)),
// with means over the group. g is rounded as it is in its mean, so that a group of one element leaves nothing that s
// would multiply: fma(a, b, -0.0f) is a product that compilers do not contract into a difference. A threadgroup walks
// over a group twice: for the sums, and for gx. Its simdgroups have segments of channels, so that no sum of a channel
// crosses threads of two simdgroups. The sums over segments, of the output's gradient times h and of the output's
// gradient, stay in memory, and a small kernel makes the parameters' gradients of them. In `aligned` dispatches
// segments begin and end at multiples of 16 bytes.
#include "common/held.h"
#include "common/sums.h"
#include "normalization/normalization.h"

template <typename T>
inline float weight_of(device const T* weight, constant GroupNormParams& params, uint channel) {
  return params.has_weight ? static_cast<float>(weight[channel]) : 1.0f;
}

template <typename T>
kernel void group_norm_backward_thread(device const T* grad [[buffer(0)]], device const T* x [[buffer(1)]],
                                       device const float* means [[buffer(2)]],
                                       device const float* scales [[buffer(3)]], device const T* weight [[buffer(4)]],
                                       device T* gx [[buffer(5)]], device float2* parts [[buffer(6)]],
                                       constant GroupNormParams& params [[buffer(7)]],
                                       uint row [[thread_position_in_grid]]) {
  const uint length = params.channels * params.area;
  const uint first_channel = row % params.groups * params.channels;
  const float mean = means[row];
  const float scale = scales[row];
  grad += ulong(row) * length;
  x += ulong(row) * length;
  gx += ulong(row) * length;
  parts += ulong(row) * params.channels;
  LongSum<float2> group_sums;
  for (uint channel = 0; channel < params.channels; ++channel) {
    LongSum<float2> sums;
    const uint last = (channel + 1) * params.area;
    for (uint start = channel * params.area; start < last; start += kSumBlock) {
      const uint end = min(start + kSumBlock, last);
      float2 part = float2(0.0f);
      for (uint i = start; i < end; ++i) {
        const float g = static_cast<float>(grad[i]);
        part.x += g * ((static_cast<float>(x[i]) - mean) * scale);
        part.y += g;
      }
      sums.add(part);
    }
    parts[channel] = sums.total();
    group_sums.add(weight_of(weight, params, first_channel + channel) * sums.total());
  }
  const float2 means_of_group = group_sums.total() / static_cast<float>(length);
  const float product = means_of_group.x;
  const float total = means_of_group.y;
  for (uint channel = 0; channel < params.channels; ++channel) {
    const float w = weight_of(weight, params, first_channel + channel);
    for (uint i = channel * params.area; i < (channel + 1) * params.area; ++i) {
      const float normal = (static_cast<float>(x[i]) - mean) * scale;
      const float g = fma(static_cast<float>(grad[i]), w, -0.0f);
      gx[i] = static_cast<T>((g - total - normal * product) * scale);
    }
  }
}

template <bool aligned, typename T>
[[kernel]] [[max_total_threads_per_threadgroup(1024)]] void group_norm_backward_looped(
    device const T* grad [[buffer(0)]], device const T* x [[buffer(1)]], device const float* means [[buffer(2)]],
    device const float* scales [[buffer(3)]], device const T* weight [[buffer(4)]], device T* gx [[buffer(5)]],
    device float2* parts [[buffer(6)]], constant GroupNormParams& params [[buffer(7)]],
    uint row [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]]) {
  constexpr uint N = 2;
  typedef Slice<aligned, T, N> Piece;
  threadgroup float scratch[32 * 2];
  const Threadgroup team(thread_index, threads, scratch);
  const uint length = params.channels * params.area;
  const uint units = params.channels * params.segments;
  const uint first_channel = row % params.groups * params.channels;
  const float mean = means[row];
  const float scale = scales[row];
  grad += ulong(row) * length;
  x += ulong(row) * length;
  gx += ulong(row) * length;
  parts += ulong(row) * units;
  float group_sums[2] = {0.0f, 0.0f};
  for (uint unit = team.simdgroup; unit < units; unit += threads / 32) {
    const uint channel = unit / params.segments;
    const Part part(params.area, unit % params.segments, params.segment);
    device const T* const some_x = x + channel * params.area;
    device const T* const some_grad = grad + channel * params.area;
    LongSum<float2> some;
    for (uint start = part.begin; start < part.end; start += 128 * N) {
      const Piece piece(team.lane, start);
      typename Piece::template Of<T> v;
      typename Piece::template Of<T> g;
      piece.fetch(v, some_x, part.end);
      piece.fetch(g, some_grad, part.end);
      for (uint n = 0; n < N; ++n) {
        const float2 found = float2(sum4(g[n] * (v[n] - mean)) * scale, sum4(g[n]));
        some.add(piece.holds(n, part.end) ? found : float2(0.0f));
      }
    }
    const float2 lane_sums = some.total();
    const float2 sums = float2(simd_sum(lane_sums.x), simd_sum(lane_sums.y));
    if (team.lane == 0) {
      parts[unit] = sums;
      const float w = weight_of(weight, params, first_channel + channel);
      group_sums[0] += w * sums.x;
      group_sums[1] += w * sums.y;
    }
  }
  team.sum(group_sums, 0);
  const float product = group_sums[0] / static_cast<float>(length);
  const float total = group_sums[1] / static_cast<float>(length);
  for (uint unit = team.simdgroup; unit < units; unit += threads / 32) {
    const uint channel = unit / params.segments;
    const Part part(params.area, unit % params.segments, params.segment);
    const float w = weight_of(weight, params, first_channel + channel);
    for (uint start = part.begin; start < part.end; start += 128 * N) {
      const Piece piece(team.lane, start);
      typename Piece::template Of<T> v;
      typename Piece::template Of<T> g;
      piece.fetch(v, x + channel * params.area, part.end);
      piece.fetch(g, grad + channel * params.area, part.end);
      for (uint n = 0; n < N; ++n) {
        const float4 weighted = fma(g[n], float4(w), float4(-0.0f));
        v.round(n, (weighted - total - (v[n] - mean) * scale * product) * scale);
      }
      piece.store(v, gx + channel * params.area, part.end);
    }
  }
}

// The parameters' gradients: a simdgroup has a channel.
template <typename T>
kernel void group_norm_weight(device const float2* parts [[buffer(0)]], device T* gw [[buffer(1)]],
                              device T* gb [[buffer(2)]], constant GroupNormWeightParams& params [[buffer(3)]],
                              uint group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]],
                              uint simdgroup [[simdgroup_index_in_threadgroup]],
                              uint simdgroups [[simdgroups_per_threadgroup]]) {
  const uint channel = group * simdgroups + simdgroup;
  if (channel >= params.channels) return;
  LongSum<float2> some;
  for (uint i = lane; i < params.batch * params.segments; i += 32) {
    const uint entry = i / params.segments, segment = i % params.segments;
    some.add(parts[(ulong(entry) * params.channels + channel) * params.segments + segment]);
  }
  const float2 lane_sums = some.total();
  const float2 sums = float2(simd_sum(lane_sums.x), simd_sum(lane_sums.y));
  if (lane > 0) return;
  gw[channel] = static_cast<T>(sums.x);
  gb[channel] = static_cast<T>(sums.y);
}

#define INSTANTIATE(name, types, ...) template[[host_name(name types)]] [[kernel]] decltype(__VA_ARGS__) __VA_ARGS__;

#define INSTANTIATE_TYPES(types, T)                                                             \
  INSTANTIATE("group_norm_backward_thread", types, group_norm_backward_thread<T>)               \
  INSTANTIATE("group_norm_backward_looped", types, group_norm_backward_looped<false, T>)        \
  INSTANTIATE("group_norm_backward_looped_aligned", types, group_norm_backward_looped<true, T>) \
  INSTANTIATE("group_norm_weight", types, group_norm_weight<T>)

INSTANTIATE_TYPES("_float", float)
INSTANTIATE_TYPES("_half", half)
INSTANTIATE_TYPES("_bfloat", bfloat)
