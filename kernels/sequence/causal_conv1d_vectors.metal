// causal_conv1d and its derivative for windows of up to four positions of whole sequences without a state, where
// vectors of four neighbours in memory begin at multiples of their size. All that a thread needs is in its registers:
// of neighbouring channels a walk along positions, of one channel some neighbouring positions.
#include "sequence/conv1d_tile.h"

constexpr constant uint kWindow = CONV1D_NARROW;

template <typename V>
struct Taps {
  V weights[kWindow];  // by how far back
  V addend;

  V product(thread const V (&taken)[kWindow]) const {
    V sum = addend;
#pragma unroll
    for (uint s = 0; s < kWindow; ++s) sum += weights[s] * taken[s];
    return sum;
  }
};
template <typename T>
inline Taps<float> taps_of(device const uchar* weight, device const uchar* bias, constant CausalConv1dParams& params,
                           uint channel) {
  Taps<float> found;
  const Window<kWindow> weights = weights_of<kWindow, T>(weight, params.wide, params.width, channel);
#pragma unroll
  for (uint s = 0; s < kWindow; ++s) found.weights[s] = weights.value[s];
  found.addend = params.has_bias ? parameter_at<T>(bias, params.wide, channel) : 0.0f;
  return found;
}
// Those of four channels.
template <typename T>
inline Taps<float4> four_taps_of(device const uchar* weight, device const uchar* bias,
                                 constant CausalConv1dParams& params, uint channel) {
  Taps<float4> found;
#pragma unroll
  for (uint i = 0; i < 4; ++i) {
    const Taps<float> taps = taps_of<T>(weight, bias, params, channel + i);
#pragma unroll
    for (uint s = 0; s < kWindow; ++s) found.weights[s][i] = taps.weights[s];
    found.addend[i] = taps.addend;
  }
  return found;
}

template <typename T>
inline float activated(float x, constant CausalConv1dParams& params) {
  return params.silu ? Silu<T>::forward(x) : x;
}
template <typename T>
inline float4 activated(float4 x, constant CausalConv1dParams& params) {
  return float4(activated<T>(x.x, params), activated<T>(x.y, params), activated<T>(x.z, params),
                activated<T>(x.w, params));
}
template <typename T>
inline float gradient(float x, float grad, constant CausalConv1dParams& params) {
  return params.silu ? SiluGradient<T>::forward(x, grad) : grad;
}
template <typename T>
inline float4 gradient(float4 x, float4 grad, constant CausalConv1dParams& params) {
  return float4(gradient<T>(x.x, grad.x, params), gradient<T>(x.y, grad.y, params), gradient<T>(x.z, grad.z, params),
                gradient<T>(x.w, grad.w, params));
}

// Four neighbours, or zeros.
template <typename T>
inline float4 four_of(device const T* x, bool given) {
  return given ? static_cast<float4>(*reinterpret_cast<device const vec<T, 4>*>(x)) : float4(0.0f);
}
// The same, which are words until somebody computes with them.
template <typename T>
struct Four {
  uint2 words;
  Four() = default;
  Four(device const T* x, bool given) : words(given ? *reinterpret_cast<device const uint2*>(x) : uint2(0u)) {}
  float4 numbers() const { return static_cast<float4>(as_type<vec<T, 4>>(words)); }
};
template <>
struct Four<float> {
  float4 words;
  Four() = default;
  Four(device const float* x, bool given) : words(four_of(x, given)) {}
  float4 numbers() const { return words; }
};
template <typename T>
inline void put_four(device T* to, float4 values) {
  *reinterpret_cast<device vec<T, 4>*>(to) = static_cast<vec<T, 4>>(values);
}
template <typename V>
inline void push(thread V (&window)[kWindow], V next) {
#pragma unroll
  for (uint s = kWindow - 1; s > 0; --s) window[s] = window[s - 1];
  window[0] = next;
}

// A thread's four channels, and its positions of the walk.
struct Strip {
  uint channel, segment, batch, begin, end;

  Strip(constant CausalConv1dParams& params, uint index) {
    const uint strips = params.channels / 4;
    channel = index % strips * 4;
    segment = index / strips % params.segments;
    batch = index / strips / params.segments;
    begin = segment * params.run;
    end = min(begin + params.run, params.length);
  }
};
template <typename T>
[[kernel]] [[max_total_threads_per_threadgroup(CONV1D_THREADS)]] void causal_conv1d_channels(
    device const T* x [[buffer(0)]], device const uchar* weight [[buffer(1)]], device const uchar* bias [[buffer(2)]],
    device T* y [[buffer(3)]], constant CausalConv1dParams& params [[buffer(4)]],
    uint index [[thread_position_in_grid]]) {
  constexpr uint kSome = 8 / sizeof(T);  // positions whose loads do not wait for each other
  const Strip strip(params, index);
  x += strip.batch * params.x[0] + strip.channel;
  y += strip.batch * params.out[0] + strip.channel;
  const Taps<float4> taps = four_taps_of<T>(weight, bias, params, strip.channel);
  float4 window[kWindow];
#pragma unroll
  for (uint s = 0; s + 1 < kWindow; ++s)
    window[s] = four_of(x + (long(strip.begin) - 1 - s) * params.x[2], strip.begin > s);
  Four<T> ahead[kSome];
#pragma unroll
  for (uint i = 0; i < kSome; ++i) ahead[i] = Four<T>(x + (strip.begin + i) * params.x[2], strip.begin + i < strip.end);
  for (uint first = strip.begin; first < strip.end; first += kSome) {
    Four<T> next[kSome];
#pragma unroll
    for (uint i = 0; i < kSome; ++i) next[i] = ahead[i];
#pragma unroll
    for (uint i = 0; i < kSome; ++i)
      ahead[i] = Four<T>(x + (first + kSome + i) * params.x[2], first + kSome + i < strip.end);
#pragma unroll
    for (uint i = 0; i < kSome; ++i) {
      push(window, next[i].numbers());
      const float4 result = activated<T>(taps.product(window), params);
      if (first + i < strip.end) put_four(y + (first + i) * params.out[2], result);
    }
  }
}

template <typename T>
[[kernel]] [[max_total_threads_per_threadgroup(CONV1D_THREADS)]] void causal_conv1d_channels_backward(
    device const T* grad [[buffer(0)]], device const T* x [[buffer(1)]], device const uchar* weight [[buffer(2)]],
    device const uchar* bias [[buffer(3)]], device T* gx [[buffer(4)]], device float* parts [[buffer(5)]],
    constant CausalConv1dParams& params [[buffer(6)]], uint index [[thread_position_in_grid]]) {
  constexpr uint kSome = 8 / sizeof(T);  // positions whose loads do not wait for each other
  const Strip strip(params, index);
  x += strip.batch * params.x[0] + strip.channel;
  grad += strip.batch * params.grad[0] + strip.channel;
  gx += strip.batch * params.out[0] + strip.channel;
  const Taps<float4> taps = four_taps_of<T>(weight, bias, params, strip.channel);
  float4 window[kWindow], grads[kWindow], sums[kWindow], sum = float4(0.0f);
#pragma unroll
  for (uint s = 0; s < kWindow; ++s) {
    grads[s] = sums[s] = float4(0.0f);
    window[s] = s + 1 < kWindow ? four_of(x + (long(strip.begin) - 1 - s) * params.x[2], strip.begin > s) : 0.0f;
  }
  // The gradient of a position needs those of the next ones.
  for (uint first = strip.begin; first < strip.end + kWindow - 1; first += kSome) {
    float4 next[kSome], given[kSome];
#pragma unroll
    for (uint i = 0; i < kSome; ++i) {
      const bool inside = first + i < min(strip.end + kWindow - 1, params.length);
      next[i] = four_of(x + (first + i) * params.x[2], inside);
      given[i] = four_of(grad + (first + i) * params.grad[2], inside);
    }
#pragma unroll
    for (uint i = 0; i < kSome; ++i) {
      const uint position = first + i;
      push(window, next[i]);
      push(grads, gradient<T>(taps.product(window), given[i], params));
      if (position < strip.end) {
        sum += grads[0];
#pragma unroll
        for (uint s = 0; s < kWindow; ++s) sums[s] += grads[0] * window[s];
      }
      float4 found = float4(0.0f);
#pragma unroll
      for (uint s = 0; s < kWindow; ++s) found += taps.weights[s] * grads[kWindow - 1 - s];
      if (position >= strip.begin + kWindow - 1 && position < strip.end + kWindow - 1)
        put_four(gx + (position - (kWindow - 1)) * params.out[2], found);
    }
  }
  if (!params.parameters_wanted) return;
  const uint width = params.width;
  parts += (ulong(strip.batch) * params.segments + strip.segment) * params.channels * (width + params.has_bias);
#pragma unroll
  for (uint i = 0; i < 4; ++i) {
    const uint channel = strip.channel + i;
#pragma unroll
    for (uint s = 0; s < kWindow; ++s)
      if (s < width) parts[channel * width + width - 1 - s] = sums[s][i];
    if (params.has_bias) parts[params.channels * width + channel] = sum[i];
  }
}

constexpr constant uint kNeighbours = CONV1D_NEIGHBOURS, kBefore = kWindow - 1;

// `count` neighbouring positions and those before and behind them, as far as the sequence has them.
template <uint kFours, typename T>
inline void fetch_fours(thread float (&values)[4 * kFours], device const T* x, int begin, uint length) {
#pragma unroll
  for (uint i = 0; i < kFours; ++i) {
    const int at = begin + static_cast<int>(4 * i);
    const float4 four = four_of(x + at, at >= 0 && at < static_cast<int>(length));
#pragma unroll
    for (uint n = 0; n < 4; ++n) values[4 * i + n] = four[n];
  }
}
template <typename T>
inline void put_neighbours(device T* to, thread const float (&values)[kNeighbours], uint begin, uint length) {
#pragma unroll
  for (uint i = 0; i < kNeighbours; i += 4)
    if (begin + i < length) put_four(to + begin + i, float4(values[i], values[i + 1], values[i + 2], values[i + 3]));
}

template <typename T>
[[kernel]] [[max_total_threads_per_threadgroup(CONV1D_THREADS)]] void causal_conv1d_positions(
    device const T* x [[buffer(0)]], device const uchar* weight [[buffer(1)]], device const uchar* bias [[buffer(2)]],
    device T* y [[buffer(3)]], constant CausalConv1dParams& params [[buffer(4)]],
    uint index [[thread_position_in_grid]]) {
  const uint begin = index % params.segments * kNeighbours, channel = index / params.segments % params.channels;
  const uint batch = index / params.segments / params.channels;
  x += batch * params.x[0] + channel * params.x[1];
  y += batch * params.out[0] + channel * params.out[1];
  float values[kNeighbours + 4], results[kNeighbours];
  fetch_fours<kNeighbours / 4 + 1>(values, x, static_cast<int>(begin) - 4, params.length);
  const Taps<float> taps = taps_of<T>(weight, bias, params, channel);
#pragma unroll
  for (uint i = 0; i < kNeighbours; ++i) {
    const float taken[kWindow] = {values[i + 4], values[i + 3], values[i + 2], values[i + 1]};
    results[i] = activated<T>(taps.product(taken), params);
  }
  put_neighbours(y, results, begin, params.length);
}

// A simdgroup has a channel, and walks along positions of which each lane has some neighbours.
template <typename T>
[[kernel]] [[max_total_threads_per_threadgroup(CONV1D_THREADS)]] void causal_conv1d_positions_backward(
    device const T* grad [[buffer(0)]], device const T* x [[buffer(1)]], device const uchar* weight [[buffer(2)]],
    device const uchar* bias [[buffer(3)]], device T* gx [[buffer(4)]], device float* parts [[buffer(5)]],
    constant CausalConv1dParams& params [[buffer(6)]], uint index [[thread_position_in_grid]]) {
  const uint lane = index % 32, walk = index / 32, channel = walk / params.segments % params.channels;
  const uint segment = walk % params.segments, batch = walk / params.segments / params.channels;
  x += batch * params.x[0] + channel * params.x[1];
  grad += batch * params.grad[0] + channel * params.grad[1];
  gx += batch * params.out[0] + channel * params.out[1];
  const Taps<float> taps = taps_of<T>(weight, bias, params, channel);
  float sums[kWindow] = {0.0f, 0.0f, 0.0f, 0.0f}, sum = 0.0f;
  const uint end = min((segment + 1) * params.run, params.length);
  for (uint begin = segment * params.run + lane * kNeighbours; begin < end; begin += 32 * kNeighbours) {
    float values[kNeighbours + 8], given[kNeighbours + 4], grads[kNeighbours + kBefore], results[kNeighbours];
    fetch_fours<kNeighbours / 4 + 2>(values, x, static_cast<int>(begin) - 4, params.length);
    fetch_fours<kNeighbours / 4 + 1>(given, grad, static_cast<int>(begin), params.length);
#pragma unroll
    for (uint i = 0; i < kNeighbours + kBefore; ++i) {
      const float taken[kWindow] = {values[i + 4], values[i + 3], values[i + 2], values[i + 1]};
      grads[i] = gradient<T>(taps.product(taken), given[i], params);
      if (i >= kNeighbours) continue;
      sum += grads[i];
#pragma unroll
      for (uint s = 0; s < kWindow; ++s) sums[s] += grads[i] * taken[s];
    }
#pragma unroll
    for (uint i = 0; i < kNeighbours; ++i) {
      results[i] = 0.0f;
#pragma unroll
      for (uint s = 0; s < kWindow; ++s) results[i] += taps.weights[s] * grads[i + s];
    }
    put_neighbours(gx, results, begin, params.length);
  }
  if (!params.parameters_wanted) return;
  const uint width = params.width;
  parts += (ulong(batch) * params.segments + segment) * params.channels * (width + params.has_bias);
#pragma unroll
  for (uint s = 0; s < kWindow; ++s) {
    const float total = simd_sum(sums[s]);
    if (lane == 0 && s < width) parts[channel * width + width - 1 - s] = total;
  }
  sum = simd_sum(sum);
  if (lane == 0 && params.has_bias) parts[params.channels * width + channel] = sum;
}

#define INSTANTIATE_VECTORS(name, function)    \
  INSTANTIATE(name, "_float", function<float>) \
  INSTANTIATE(name, "_half", function<half>)   \
  INSTANTIATE(name, "_bfloat", function<bfloat>)
INSTANTIATE_VECTORS("causal_conv1d_channels", causal_conv1d_channels)
INSTANTIATE_VECTORS("causal_conv1d_channels_backward", causal_conv1d_channels_backward)
INSTANTIATE_VECTORS("causal_conv1d_positions", causal_conv1d_positions)
INSTANTIATE_VECTORS("causal_conv1d_positions_backward", causal_conv1d_positions_backward)
