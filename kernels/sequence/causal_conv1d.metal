// causal_conv1d: y[l] = bias + sum over k of weight[k] x[l - (width - 1) + k] for each channel, and silu of it. What a
// window has before the first position of its sequence is the sequence's state, or 0.
#include "sequence/conv1d_tile.h"

template <uint M, typename T>
[[kernel]] [[max_total_threads_per_threadgroup(CONV1D_THREADS)]] void causal_conv1d(
    device const T* x [[buffer(0)]], device const uchar* weight [[buffer(1)]], device const uchar* bias [[buffer(2)]],
    device const int* numbers [[buffer(3)]], device const T* state [[buffer(4)]], device T* y [[buffer(5)]],
    constant CausalConv1dParams& params [[buffer(6)]], uint group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  constexpr uint R = CONV1D_POSITIONS / kConv1dSimdgroups;  // positions of a thread
  constexpr uint kPitch = CONV1D_POSITIONS + kHalo;         // odd, so that lanes use all banks
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

INSTANTIATE_CONV1D("causal_conv1d", causal_conv1d)

// The derivative of causal_conv1d. With g the gradient of what silu takes,
//   gx[l] = sum over s of weight[width - 1 - s] g[l + s], for positions l + s of the same sequence,
//   gw[k] = sum over l of g[l] x[l - (width - 1) + k],  gb = sum over l of g[l].
// A threadgroup computes g for its positions and the halo behind them, and keeps it in float32. It walks over a segment
// of positions; the sums over segments stay in memory, a row of them for each segment, and column_sums adds them up.

template <uint M, typename T>
[[kernel]] [[max_total_threads_per_threadgroup(CONV1D_THREADS)]] void causal_conv1d_backward(
    device const T* grad [[buffer(0)]], device const T* x [[buffer(1)]], device const uchar* weight [[buffer(2)]],
    device const uchar* bias [[buffer(3)]], device const int* numbers [[buffer(4)]],
    device const T* state [[buffer(5)]], device T* gx [[buffer(6)]], device T* gstate [[buffer(7)]],
    device float* parts [[buffer(8)]], constant CausalConv1dParams& params [[buffer(9)]],
    uint group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  constexpr uint R = CONV1D_POSITIONS / kConv1dSimdgroups;            // positions of a thread
  constexpr uint S = R + 1;                                           // … and of those with the halo
  constexpr uint kBehind = kConv1dSimdgroups * S;                     // positions with the halo behind them
  constexpr uint kPitch = kHalo + kBehind, kGradPitch = kBehind + 1;  // odd
  threadgroup T tile[CONV1D_CHANNELS * kPitch];
  threadgroup float gradients[CONV1D_CHANNELS * kGradPitch];
  threadgroup int ages[kBehind];
  const Place place(params, group);
  const uint lane = thread_index % 32, simdgroup = thread_index / 32;
  const uint channel = min(place.channel + lane, params.channels - 1);
  const uint width = params.width;
  const Window<M> weights = weights_of<M, T>(weight, params.wide, width, channel);
  const float addend = params.has_bias ? parameter_at<T>(bias, params.wide, channel) : 0.0f;
  Window<M> sums;
  float sum = 0.0f;
#pragma unroll
  for (uint s = 0; s < M; ++s) sums.value[s] = 0.0f;
  for (uint step = 0; step < params.tiles; ++step) {
    const uint first = (place.segment * params.tiles + step) * CONV1D_POSITIONS;
    threadgroup_barrier(mem_flags::mem_threadgroup);  // until the last part is stored
    fetch<kPitch, kPitch>(tile, x, params.x, params, place, static_cast<int>(first) - static_cast<int>(kHalo),
                          thread_index);
    threadgroup_barrier(mem_flags::mem_none);  // registers hold one tensor's elements at a time
    fetch<kBehind, kGradPitch>(gradients, grad, params.grad, params, place, static_cast<int>(first), thread_index);
    if (thread_index < kBehind)
      ages[thread_index] = age_at(numbers, params, place.batch, static_cast<int>(first + thread_index));
    threadgroup_barrier(mem_flags::mem_threadgroup);
    threadgroup T* const row = tile + lane * kPitch;
    threadgroup float* const grad_row = gradients + lane * kGradPitch;
    const uint from = simdgroup * S;
    Window<M> window;
#pragma unroll
    for (uint s = 0; s < M; ++s) window.value[s] = s + 1 < M ? static_cast<float>(row[from + kHalo - 1 - s]) : 0.0f;
    for (uint i = from; i < from + S; ++i) {
      window.push(static_cast<float>(row[kHalo + i]));
      const int age = ages[i];
      Window<M> taken = window;
      if (age + 1 != static_cast<int>(width)) {
        device const T* const before = state_of(state, numbers, params, place, channel, static_cast<int>(first + i));
        taken = window.within(age, width, before, params.state[2]);
      }
      float g = age < 0 ? 0.0f : grad_row[i];
      if (params.silu && age >= 0) g = SiluGradient<T>::forward(taken.product(weights, width, addend), g);
      grad_row[i] = g;
      if (i >= CONV1D_POSITIONS || age < 0 || first + i >= params.length) continue;
      sum += g;
#pragma unroll
      for (uint s = 0; s < M; ++s)
        if (s < width) sums.value[s] += g * taken.value[s];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = simdgroup * R; i < (simdgroup + 1) * R; ++i) {
      float found = 0.0f;
      bool same = ages[i] >= 0;
#pragma unroll
      for (uint s = 0; s < M; ++s) {
        same = same && s < width && ages[i + s] >= static_cast<int>(s);
        if (same) found += weights.value[s] * grad_row[i + s];
      }
      row[i] = static_cast<T>(found);
      // The first position of a sequence has the gradient of its state as well.
      if (!params.has_state || ages[i] != 0 || first + i >= params.length || place.channel + lane >= params.channels)
        continue;
      const uint sequence = sequence_of(numbers, params, place, static_cast<int>(first + i));
      if (sequence >= params.sequences) continue;
      for (uint j = 0; j + 1 < width; ++j) {
        float by_state = 0.0f;
        for (uint t = 0; t <= j && ages[i + t] == static_cast<int>(t); ++t)
          if (first + i + t < params.length)
            by_state += parameter_at<T>(weight, params.wide, ulong(channel) * width + j - t) * grad_row[i + t];
        gstate[(ulong(sequence) * params.channels + channel) * (width - 1) + j] = static_cast<T>(by_state);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    store<kPitch>(tile, gx, params.out, params, place, first, thread_index);
  }
  if (!params.parameters_wanted) return;
  device float* const part =
      parts + (ulong(place.batch) * params.segments + place.segment) * params.channels * (width + params.has_bias);
#pragma unroll
  for (uint s = 0; s <= M; ++s) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    gradients[thread_index] = s < M ? sums.value[s % M] : sum;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (simdgroup > 0 || place.channel + lane >= params.channels || (s < M ? s >= width : !params.has_bias)) continue;
    float total = 0.0f;
    for (uint n = 0; n < kConv1dSimdgroups; ++n) total += gradients[n * 32 + lane];
    part[s < M ? channel * width + width - 1 - s : params.channels * width + channel] = total;
  }
}

INSTANTIATE_CONV1D("causal_conv1d_backward", causal_conv1d_backward)
