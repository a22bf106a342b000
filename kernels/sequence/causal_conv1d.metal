// causal_conv1d: y[l] = bias + sum over k of weight[k] x[l - (width - 1) + k] for each channel, and silu of it. What a
// window has before the first position of its sequence is the sequence's state, or 0.
#include "sequence/conv1d_tile.h"

template <uint M, typename T>
[[kernel]] [[max_total_threads_per_threadgroup(CONV1D_THREADS)]] void causal_conv1d(
    device const T* x [[buffer(0)]], device const uchar* weight [[buffer(1)]], device const uchar* bias [[buffer(2)]],
    device const int* numbers [[buffer(3)]], device const T* state [[buffer(4)]], device T* y [[buffer(5)]],
    constant CausalConv1dParams& params [[buffer(6)]], uint group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  constexpr uint R = CONV1D_POSITIONS / kSimdgroups;  // positions of a thread
  constexpr uint kPitch = CONV1D_POSITIONS + kHalo;   // odd, so that lanes use all banks
  threadgroup T tile[CONV1D_CHANNELS * kPitch];
  threadgroup int ages[CONV1D_POSITIONS];
  const Place place(params, group);
  const uint first = place.segment * CONV1D_POSITIONS;
  fetch<kPitch, kPitch>(tile, x, params.x, params, place, static_cast<int>(first) - static_cast<int>(kHalo),
                        thread_index);
  if (thread_index < CONV1D_POSITIONS)
    ages[thread_index] = age_at(numbers, params, place.batch, static_cast<int>(first + thread_index));
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const uint channel = min(place.channel + thread_index % 32, params.channels - 1);
  const uint run = thread_index / 32 * R;
  threadgroup T* const row = tile + thread_index % 32 * kPitch + run;
  const Window<M> weights = weights_of<M, T>(weight, params.wide, params.width, channel);
  const float addend = params.has_bias ? parameter_at<T>(bias, params.wide, channel) : 0.0f;
  Window<M> window;
#pragma unroll
  for (uint s = 0; s < M; ++s) window.value[s] = s + 1 < M ? static_cast<float>(row[kHalo - 1 - s]) : 0.0f;
  float results[R];
#pragma unroll
  for (uint i = 0; i < R; ++i) {
    window.push(static_cast<float>(row[kHalo + i]));
    const int age = ages[run + i];
    float sum;
    if (age + 1 == static_cast<int>(params.width)) {
      sum = window.product(weights, params.width, addend);
    } else {
      device const T* const before =
          state_of(state, numbers, params, place, channel, static_cast<int>(first + run + i));
      sum = window.within(age, params.width, before, params.state[2]).product(weights, params.width, addend);
    }
    results[i] = age < 0 ? 0.0f : params.silu ? Silu<T>::forward(sum) : sum;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
  for (uint i = 0; i < R; ++i) row[i] = static_cast<T>(results[i]);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  store<kPitch>(tile, y, params.out, params, place, first, thread_index);
}

INSTANTIATE_TYPES("causal_conv1d", causal_conv1d)
