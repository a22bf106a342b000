// causal_conv1d and its derivative for whole sequences without a state, where channels are neighbours in memory. A
// thread has some neighbouring channels and walks along positions; all that it needs is in its registers.
#include "sequence/conv1d_vectors.h"

// Neighbouring channels of a thread, and the last positions that it read of them.
template <uint N>
struct Channels {
  Taps taps[N];
  float windows[N][kWindow];
};
template <uint N, typename T>
inline void push_all(thread Channels<N>& channels, Neighbours<N, T> next) {
  float values[N];
  next.spread(values);
#pragma unroll
  for (uint i = 0; i < N; ++i) push(channels.windows[i], values[i]);
}
// Reads the positions before `begin`, which is x's.
template <uint N, typename T>
inline void read_before(thread Channels<N>& channels, device const T* x, long stride, uint begin) {
#pragma unroll
  for (uint i = 0; i < N; ++i) {
#pragma unroll
    for (uint s = 0; s < kWindow; ++s) channels.windows[i][s] = 0.0f;
  }
#pragma unroll
  for (uint s = kBefore; s > 0; --s) push_all(channels, Neighbours<N, T>(x - s * stride, begin >= s));
}
template <typename T, uint N>
inline void read_taps(thread Channels<N>& channels, device const uchar* weight, device const uchar* bias,
                      constant CausalConv1dParams& params, uint width, uint channel) {
#pragma unroll
  for (uint i = 0; i < N; ++i) channels.taps[i] = taps_of<T>(weight, bias, params, width, channel + i);
}

constexpr constant uint kChannels = CONV1D_ACROSS;
constexpr constant uint kAhead = 16;  // positions whose loads are on their way, by the size of an element
// A thread's walk along `count` positions from `begin` on. `usual` says that there is silu and a whole window, which
// the compiler then need not ask for each number.
template <bool usual, typename T>
inline void walk_channels(device const T* x, device const uchar* weight, device const uchar* bias, device T* y,
                          constant CausalConv1dParams& params, uint channel, uint begin, uint count) {
  constexpr uint N = kChannels, kSome = kAhead / sizeof(T);
  const uint width = usual ? kWindow : params.width;
  const bool silu = usual || params.silu;
  Channels<N> channels;
  read_before(channels, x, params.x[2], begin);
  Neighbours<N, T> next[kSome];
#pragma unroll
  for (uint i = 0; i < kSome; ++i, x += params.x[2]) next[i] = Neighbours<N, T>(x, i < count);
  read_taps<T>(channels, weight, bias, params, width, channel);
  for (uint first = 0; first < count; first += kSome) {
#pragma unroll
    for (uint i = 0; i < kSome; ++i, x += params.x[2], y += params.out[2]) {
      push_all(channels, next[i]);
      next[i] = Neighbours<N, T>(x, first + kSome + i < count);
      float results[N];
#pragma unroll
      for (uint n = 0; n < N; ++n)
        results[n] = activated<T>(channels.taps[n].product(channels.windows[n], width), silu);
      if (first + i < count) put<N>(y, results);
    }
  }
}
template <typename T>
[[kernel]] [[max_total_threads_per_threadgroup(CONV1D_THREADS)]] void causal_conv1d_channels(
    device const T* x [[buffer(0)]], device const uchar* weight [[buffer(1)]], device const uchar* bias [[buffer(2)]],
    device T* y [[buffer(3)]], constant CausalConv1dParams& params [[buffer(4)]],
    uint index [[thread_position_in_grid]]) {
  const uint strips = params.channels / kChannels, channel = index % strips * kChannels;
  const uint segment = index / strips % params.segments, batch = index / strips / params.segments;
  const uint begin = segment * params.run, count = min(params.run, params.length - begin);
  x += batch * params.x[0] + channel + begin * params.x[2];
  y += batch * params.out[0] + channel + begin * params.out[2];
  if (params.silu && params.width == kWindow)
    walk_channels<true>(x, weight, bias, y, params, channel, begin, count);
  else
    walk_channels<false>(x, weight, bias, y, params, channel, begin, count);
}

constexpr constant uint kWalks = CONV1D_BACK_THREADS / 32;  // of a threadgroup
// A thread's walk along `count` positions of its channels from `begin` on, and along those behind them whose gradients
// have a part in theirs. It adds its positions to `sums`. Steps of 32 bits save registers. `silu` is params.silu, and
// `whole` says that the window is: a compiler then need not ask for each number.
template <bool silu, bool whole, uint N, typename T>
inline void walk_channels_back(thread float (&sums)[N][kSums], device const T* grad, device const T* x,
                               device const uchar* weight, device const uchar* bias, device T* gx,
                               constant CausalConv1dParams& params, uint channel, uint begin, uint count) {
  constexpr uint kSome = 8 / sizeof(T);  // positions whose loads are on their way
  const uint width = whole ? kWindow : params.width;
  const uint given = min(count + kBefore, params.length - begin);
  Channels<N> channels;
  read_before(channels, x, params.x[2], begin);
  Neighbours<N, T> next[kSome], next_grad[kSome];
#pragma unroll
  for (uint i = 0; i < kSome; ++i) {
    next[i] = Neighbours<N, T>(x, i < given);
    next_grad[i] = Neighbours<N, T>(grad, i < given);
    x += static_cast<int>(params.x[2]);
    grad += static_cast<int>(params.grad[2]);
  }
  read_taps<T>(channels, weight, bias, params, width, channel);
  float grads[N][kWindow];
#pragma unroll
  for (uint n = 0; n < N; ++n) {
#pragma unroll
    for (uint s = 0; s < kWindow; ++s) grads[n][s] = 0.0f;
  }
  gx -= kBefore * params.out[2];
  for (uint first = 0; first < count + kBefore; first += kSome) {
#pragma unroll
    for (uint i = 0; i < kSome; ++i) {
      const uint at = first + i;
      float upstream[N], results[N];
      push_all(channels, next[i]);
      next_grad[i].spread(upstream);
      next[i] = Neighbours<N, T>(x, at + kSome < given);
      next_grad[i] = Neighbours<N, T>(grad, at + kSome < given);
#pragma unroll
      for (uint n = 0; n < N; ++n) {
        push(grads[n], gradient<T>(channels.taps[n].product(channels.windows[n], width), upstream[n], silu));
        const float counted = at < count ? grads[n][0] : 0.0f;
        sums[n][kWindow] += counted;
        results[n] = 0.0f;
#pragma unroll
        for (uint s = 0; s < kWindow; ++s) {
          sums[n][s] += counted * channels.windows[n][s];
          if (s < width) results[n] += channels.taps[n].weights[s] * grads[n][kBefore - s];
        }
      }
      if (at - kBefore < count) put<N>(gx, results);
      x += static_cast<int>(params.x[2]);
      grad += static_cast<int>(params.grad[2]);
      gx += static_cast<int>(params.out[2]);
    }
  }
}
template <typename T>
[[kernel]] [[max_total_threads_per_threadgroup(CONV1D_BACK_THREADS)]] void causal_conv1d_channels_backward(
    device const T* grad [[buffer(0)]], device const T* x [[buffer(1)]], device const uchar* weight [[buffer(2)]],
    device const uchar* bias [[buffer(3)]], device T* gx [[buffer(4)]], device float* parts [[buffer(5)]],
    constant CausalConv1dParams& params [[buffer(6)]], uint group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  constexpr uint N = CONV1D_BACK_BYTES / sizeof(T), kColumns = 32 * N;
  threadgroup float totals[kWalks * kSums * kColumns];
  const uint lane = thread_index % 32, simdgroup = thread_index / 32, width = params.width;
  const uint blocks = (params.channels + kColumns - 1) / kColumns, first_channel = group % blocks * kColumns;
  const uint segment = group / blocks % params.segments, batch = group / blocks / params.segments;
  const uint channel = first_channel + lane * N, begin = (segment * kWalks + simdgroup) * params.run;
  float sums[N][kSums];
#pragma unroll
  for (uint n = 0; n < N; ++n) {
#pragma unroll
    for (uint s = 0; s < kSums; ++s) sums[n][s] = 0.0f;
  }
  if (channel < params.channels && begin < params.length) {
    const uint count = min(params.run, params.length - begin);
    x += batch * params.x[0] + channel + begin * params.x[2];
    grad += batch * params.grad[0] + channel + begin * params.grad[2];
    gx += batch * params.out[0] + channel + begin * params.out[2];
    if (params.silu && width == kWindow)
      walk_channels_back<true, true, N>(sums, grad, x, weight, bias, gx, params, channel, begin, count);
    else if (params.silu)
      walk_channels_back<true, false, N>(sums, grad, x, weight, bias, gx, params, channel, begin, count);
    else
      walk_channels_back<false, false, N>(sums, grad, x, weight, bias, gx, params, channel, begin, count);
  }
  if (!params.parameters_wanted) return;
#pragma unroll
  for (uint s = 0; s < kSums; ++s) {
#pragma unroll
    for (uint n = 0; n < N; ++n) totals[(simdgroup * kSums + s) * kColumns + n * 32 + lane] = sums[n][s];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  parts += (ulong(batch) * params.segments + segment) * params.channels * (width + params.has_bias);
  for (uint at = thread_index; at < kSums * kColumns; at += CONV1D_BACK_THREADS) {
    const uint s = at / kColumns, to = first_channel + at % 32 * N + at % kColumns / 32;
    if (to >= params.channels || (s < kWindow ? s >= width : !params.has_bias)) continue;
    float total = 0.0f;
#pragma unroll
    for (uint n = 0; n < kWalks; ++n) total += totals[n * kSums * kColumns + at];
    parts[s < kWindow ? to * width + width - 1 - s : params.channels * width + to] = total;
  }
}

INSTANTIATE_VECTORS("causal_conv1d_channels", causal_conv1d_channels)
INSTANTIATE_VECTORS("causal_conv1d_channels_backward", causal_conv1d_channels_backward)

// causal_conv1d and its derivative for whole sequences without a state, where positions are neighbours in memory. A
// thread has some neighbouring positions of a channel; all that it needs is in its registers.
constexpr constant uint kVectors = CONV1D_VECTORS;
template <bool usual, typename T>
inline void take_positions(device const T* x, device const uchar* weight, device const uchar* bias, device T* y,
                           constant CausalConv1dParams& params, uint channel, int begin) {
  constexpr int N = 16 / sizeof(T), kCount = kVectors;
  const uint width = usual ? kWindow : params.width;
  const bool silu = usual || params.silu;
  const int length = static_cast<int>(params.length), step = static_cast<int>(params.segments) * N;
  Neighbours<N, T> own[kCount];
  Neighbours<4, T> before[kCount];
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    const int at = begin + k * step;
    own[k] = Neighbours<N, T>(x + at, at < length);
    before[k] = Neighbours<4, T>(x + at - 4, at < length && at > 0);
  }
  const Taps taps = taps_of<T>(weight, bias, params, width, channel);
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    const int at = begin + k * step;
    if (at >= length) return;
    float values[N + 4], results[N];
    before[k].spread(values);
    own[k].spread(values + 4);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float taken[kWindow] = {values[i + 4], values[i + 3], values[i + 2], values[i + 1]};
      results[i] = activated<T>(taps.product(taken, width), silu);
    }
    put<N>(y + at, results);
  }
}
template <typename T>
[[kernel]] [[max_total_threads_per_threadgroup(CONV1D_THREADS)]] void causal_conv1d_positions(
    device const T* x [[buffer(0)]], device const uchar* weight [[buffer(1)]], device const uchar* bias [[buffer(2)]],
    device T* y [[buffer(3)]], constant CausalConv1dParams& params [[buffer(4)]],
    uint3 at [[thread_position_in_grid]]) {
  const int begin = static_cast<int>(at.x * (16 / sizeof(T)));
  x += at.z * params.x[0] + at.y * params.x[1];
  y += at.z * params.out[0] + at.y * params.out[1];
  if (params.silu && params.width == kWindow)
    take_positions<true>(x, weight, bias, y, params, at.y, begin);
  else
    take_positions<false>(x, weight, bias, y, params, at.y, begin);
}

// A lane's positions and those before them, or zeros where the sequence has no such positions.
template <typename T>
struct Around {
  static constexpr constant int N = 16 / sizeof(T);
  Neighbours<4, T> before;
  Neighbours<N, T> own, grad;
  Around(device const T* x, device const T* g, int at, bool given)
      : before(x + at - 4, given && at > 0), own(x + at, given), grad(g + at, given) {}
};
// A simdgroup's walk towards its first position, `begin`. A lane adds its positions to `sums`. The gradient of a
// position needs those of the next ones, which the next lane has, or for the last lane the first one from the step
// before.
template <bool silu, bool whole, typename T>
inline void walk_positions_back(thread float (&sums)[kSums], device const T* grad, device const T* x,
                                device const uchar* weight, device const uchar* bias, device T* gx,
                                constant CausalConv1dParams& params, uint channel, int begin, int end, uint lane) {
  constexpr int N = Around<T>::N, kStep = 32 * N, kBehind = kBefore;
  const uint width = whole ? kWindow : params.width;
  const int length = static_cast<int>(params.length), own = static_cast<int>(lane) * N;
  int first = begin + (end - begin - 1) / kStep * kStep;  // of a step
  gx += first + own;
  Around<T> next(x, grad, first + own, own < length - first);
  const Taps taps = taps_of<T>(weight, bias, params, width, channel);
  float behind[kBehind];  // gradients of the positions behind a step
  {
    const bool given = first < length - kStep;
    float values[8], upstream[4];
    Neighbours<4, T>(x + first + kStep - 4, given).spread(values);
    Neighbours<4, T>(x + first + kStep, given).spread(values + 4);
    Neighbours<4, T>(grad + first + kStep, given).spread(upstream);
#pragma unroll
    for (int i = 0; i < kBehind; ++i) {
      const float taken[kWindow] = {values[i + 4], values[i + 3], values[i + 2], values[i + 1]};
      behind[i] = gradient<T>(taps.product(taken, width), upstream[i], silu);
    }
  }
  for (; first >= begin; first -= kStep) {
    float values[N + 4], upstream[N], grads[N + kBehind], results[N];
    next.before.spread(values);
    next.own.spread(values + 4);
    next.grad.spread(upstream);
    next = Around<T>(x, grad, first - kStep + own, first > begin);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float taken[kWindow] = {values[i + 4], values[i + 3], values[i + 2], values[i + 1]};
      grads[i] = gradient<T>(taps.product(taken, width), upstream[i], silu);
      sums[kWindow] += grads[i];
#pragma unroll
      for (uint s = 0; s < kWindow; ++s) sums[s] += grads[i] * taken[s];
    }
#pragma unroll
    for (int i = 0; i < kBehind; ++i) {
      grads[N + i] = simd_shuffle(lane == 0 ? behind[i] : grads[i], static_cast<ushort>((lane + 1) % 32));
      behind[i] = grads[i];
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
      results[i] = 0.0f;
#pragma unroll
      for (uint s = 0; s < kWindow; ++s)
        if (s < width) results[i] += taps.weights[s] * grads[i + s];
    }
    if (own < length - first) put<N>(gx, results);
    gx -= kStep;
  }
}
// A simdgroup has a channel, and walks along positions of which each lane has some neighbours.
template <typename T>
[[kernel]] [[max_total_threads_per_threadgroup(CONV1D_THREADS)]] void causal_conv1d_positions_backward(
    device const T* grad [[buffer(0)]], device const T* x [[buffer(1)]], device const uchar* weight [[buffer(2)]],
    device const uchar* bias [[buffer(3)]], device T* gx [[buffer(4)]], device float* parts [[buffer(5)]],
    constant CausalConv1dParams& params [[buffer(6)]], uint index [[thread_position_in_grid]]) {
  const uint lane = index % 32, walk = index / 32, channel = walk / params.segments % params.channels;
  const uint segment = walk % params.segments, batch = walk / params.segments / params.channels, width = params.width;
  x += batch * params.x[0] + channel * params.x[1];
  grad += batch * params.grad[0] + channel * params.grad[1];
  gx += batch * params.out[0] + channel * params.out[1];
  const int begin = static_cast<int>(segment * params.run);
  const int end = static_cast<int>(min((segment + 1) * params.run, params.length));
  float sums[kSums];
#pragma unroll
  for (uint s = 0; s < kSums; ++s) sums[s] = 0.0f;
  if (params.silu && width == kWindow)
    walk_positions_back<true, true>(sums, grad, x, weight, bias, gx, params, channel, begin, end, lane);
  else if (params.silu)
    walk_positions_back<true, false>(sums, grad, x, weight, bias, gx, params, channel, begin, end, lane);
  else
    walk_positions_back<false, false>(sums, grad, x, weight, bias, gx, params, channel, begin, end, lane);
  if (!params.parameters_wanted) return;
  parts += (ulong(batch) * params.segments + segment) * params.channels * (width + params.has_bias);
#pragma unroll
  for (uint s = 0; s < kSums; ++s) {
    const float total = simd_sum(sums[s]);
    if (lane != 0 || (s < kWindow ? s >= width : !params.has_bias)) continue;
    parts[s < kWindow ? channel * width + width - 1 - s : params.channels * width + channel] = total;
  }
}

INSTANTIATE_VECTORS("causal_conv1d_positions", causal_conv1d_positions)
INSTANTIATE_VECTORS("causal_conv1d_positions_backward", causal_conv1d_positions_backward)
