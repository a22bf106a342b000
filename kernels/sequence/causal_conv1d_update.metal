// causal_conv1d_update: the next positions of causal_conv1d, whose state is changed in place. A thread has a channel.
// It holds the last positions of the state in registers, which are all that most states keep.
#include "sequence/conv1d_vectors.h"

template <uint M, typename T>
kernel void causal_conv1d_update(device const T* x [[buffer(0)]], device T* state [[buffer(1)]],
                                 device const uchar* weight [[buffer(2)]], device const uchar* bias [[buffer(3)]],
                                 device const int* counts [[buffer(4)]], device const int* rows [[buffer(5)]],
                                 device T* y [[buffer(6)]], constant CausalConv1dUpdateParams& params [[buffer(7)]],
                                 uint2 at [[thread_position_in_grid]]) {
  const uint channel = at.x, batch = at.y;
  const int length = static_cast<int>(params.length), kept = static_cast<int>(params.state_length);
  const int row = params.has_rows ? rows[batch] : static_cast<int>(batch);
  x += batch * params.x[0] + channel * params.x[1];
  y += batch * params.out[0] + channel * params.out[1];
  if (row < 0 || row >= static_cast<int>(params.states)) {
    for (int t = 0; t < length; ++t) y[t * params.out[2]] = static_cast<T>(row < 0 ? 0.0f : NAN);
    return;
  }
  state += row * params.state[0] + channel * params.state[1];
  const long stride = params.state[2];
  const int begin = params.is_ring ? (counts[batch] % kept + kept) % kept : 0;
  const Window<M> weights = weights_of<M, T>(weight, params.wide, params.width, channel);
  const float addend = params.has_bias ? parameter_at<T>(bias, params.wide, channel) : 0.0f;
  Window<M> window;
#pragma unroll
  for (int s = 0; s < static_cast<int>(M); ++s) {
    const int place = kept - 1 - s;
    window.value[s] = place >= 0 ? static_cast<float>(state[(begin + place) % kept * stride]) : 0.0f;
  }
  for (int t = 0; t < length; ++t) {
    const T next = x[t * params.x[2]];
    window.push(static_cast<float>(next));
    const float sum = window.product(weights, params.width, addend);
    y[t * params.out[2]] = static_cast<T>(params.silu ? Silu<T>::forward(sum) : sum);
    if (params.is_ring) state[(begin + t) % kept * stride] = next;
  }
  if (params.is_ring) return;
  for (int i = 0; i < kept - static_cast<int>(M); ++i)
    state[i * stride] = i + length < kept ? state[(i + length) * stride] : x[(i + length - kept) * params.x[2]];
#pragma unroll
  for (int s = 0; s < static_cast<int>(M); ++s)
    if (s < kept) state[(kept - 1 - s) * stride] = static_cast<T>(window.value[s]);
}

INSTANTIATE_TYPES("causal_conv1d_update", causal_conv1d_update)

// One new position, and states that keep `kept` positions side by side: a thread has the channels of a word of x, and
// reads and writes words.
template <uint kept, typename T>
[[kernel]] void causal_conv1d_step(device const T* x [[buffer(0)]], device T* state [[buffer(1)]],
                                   device const uchar* weight [[buffer(2)]], device const uchar* bias [[buffer(3)]],
                                   device const int* rows [[buffer(4)]], device T* y [[buffer(5)]],
                                   constant CausalConv1dUpdateParams& params [[buffer(6)]],
                                   uint2 at [[thread_position_in_grid]]) {
  constexpr uint N = Word<T>::kCount;
  const uint channel = at.x * N, batch = at.y;
  const int row = params.has_rows ? rows[batch] : static_cast<int>(batch);
  x += batch * params.x[0] + channel;
  y += batch * params.out[0] + channel;
  float results[N], numbers[N];
  if (row < 0 || row >= static_cast<int>(params.states)) {
#pragma unroll
    for (uint n = 0; n < N; ++n) results[n] = row < 0 ? 0.0f : NAN;
    put<N>(y, results);
    return;
  }
  state += row * params.state[0] + channel * kept;
  const Neighbours<N, T> next(x, true);
  Neighbours<N, T> words[kept];
#pragma unroll
  for (uint i = 0; i < kept; ++i) words[i] = Neighbours<N, T>(state + i * N, true);
  float before[N * kept], after[N * kept];
#pragma unroll
  for (uint i = 0; i < kept; ++i) words[i].spread(before + i * N);
  next.spread(numbers);
#pragma unroll
  for (uint n = 0; n < N; ++n) {
    const Taps taps = taps_of<T>(weight, bias, params, params.width, channel + n);
    float window[kWindow] = {numbers[n]};
#pragma unroll
    for (uint s = 1; s < kWindow; ++s) window[s] = before[n * kept + kept - s];
#pragma unroll
    for (uint i = 0; i < kept; ++i) after[n * kept + i] = i + 1 < kept ? before[n * kept + i + 1] : numbers[n];
    results[n] = activated<T>(taps.product(window, params.width), params.silu);
  }
#pragma unroll
  for (uint i = 0; i < kept; ++i) {
    float part[N];
#pragma unroll
    for (uint n = 0; n < N; ++n) part[n] = after[i * N + n];
    put<N>(state + i * N, part);
  }
  put<N>(y, results);
}

#define INSTANTIATE_STEPS(types, T)                                    \
  INSTANTIATE("causal_conv1d_step_3", types, causal_conv1d_step<3, T>) \
  INSTANTIATE("causal_conv1d_step_4", types, causal_conv1d_step<4, T>)
INSTANTIATE_STEPS("_float", float)
INSTANTIATE_STEPS("_half", half)
INSTANTIATE_STEPS("_bfloat", bfloat)
