// Selective state spaces: for each channel and state
//
//   h = exp(dt A) h + dt B x;  y = sum over states of C h + D x;  out = y silu(z)
//
// where dt is softplus(dt + bias) within limits. Some lanes share a channel and walk along positions with its states in
// registers; what they read is in threadgroup memory. Source: Gu, Dao, "Mamba", 2023.
#pragma once

#include "activation/formulas.h"
#include "sequence/selective_scan.h"

constexpr constant uint kSimdgroups = SCAN_THREADS / 32;

// log(1 + exp(x)) with a relative error of some roundings. The quotient corrects what 1 + e rounds off.
inline float softplus(float x) {
  const float e = precise::exp(x), sum = 1.0f + e;
  const float log1p = sum == 1.0f ? e : precise::log(sum) * (e / (sum - 1.0f));
  return x > 20.0f ? x : log1p;
}
// The step that a raw number stands for, and what the gradient of the step is multiplied by.
inline float step_of(float raw, constant SelectiveScanParams& params) {
  const float step = params.softplus ? softplus(raw) : raw;
  return isnan(step) ? step : clamp(step, params.low, params.high);
}
inline float step_slope(float raw, constant SelectiveScanParams& params) {
  const float step = params.softplus ? softplus(raw) : raw;
  const float slope = params.softplus && raw <= 20.0f ? 1.0f / (1.0f + precise::exp(-raw)) : 1.0f;
  return step < params.low || step > params.high ? 0.0f : slope;
}

// What a threadgroup has: the positions of a chunk, and neighbouring channels of a group, in tiles.
struct Place {
  uint batch, chunk, group, block;
  uint begin, end;

  Place(constant SelectiveScanParams& params, uint index) {
    block = index % params.blocks;
    group = index / params.blocks % params.groups;
    chunk = index / params.blocks / params.groups % params.chunks;
    batch = index / params.blocks / params.groups / params.chunks;
    begin = chunk * params.chunk;
    end = min(begin + params.chunk, params.length);
  }
};
// The place of a channel's states among those of a chunk and of the batch.
inline ulong state_at(constant SelectiveScanParams& params, uint chunk, uint batch, uint channel) {
  return ((ulong(chunk) * params.batch + batch) * params.channels + channel) * params.states;
}

// The rate of a channel that has one for all states.
inline float shared_rate(device const float* A, constant SelectiveScanParams& params, uint channel) {
  return A[long(channel / params.dim) * params.A[0] + long(channel % params.dim) * params.A[1]];
}

// A tile of positions and channels, of which each thread has some elements: neighbours in memory are lanes' neighbours.
template <uint CHANNELS, uint POSITIONS>
struct Tile {
  static constexpr constant uint kElements = (CHANNELS * POSITIONS + SCAN_THREADS - 1) / SCAN_THREADS;

  bool along_positions;
  uint batch, first, begin, channels_end, end, thread_index;  // first: the first channel

  uint element(uint n) const { return n * SCAN_THREADS + thread_index; }
  bool holds(uint n) const { return element(n) < CHANNELS * POSITIONS; }
  uint position(uint n) const { return along_positions ? element(n) % POSITIONS : element(n) / CHANNELS; }
  uint channel(uint n) const { return along_positions ? element(n) / POSITIONS : element(n) % CHANNELS; }
  bool inside(uint n) const { return holds(n) && begin + position(n) < end && first + channel(n) < channels_end; }
  // Where an element is in a tensor that has these strides.
  long at(uint n, constant const long (&strides)[4], uint dim) const {
    const uint all = first + channel(n);
    return long(batch) * strides[0] + long(begin + position(n)) * strides[1] + long(all / dim) * strides[2] +
           long(all % dim) * strides[3];
  }
  template <typename T>
  float read(uint n, device const T* x, constant const long (&strides)[4], uint dim) const {
    return inside(n) ? static_cast<float>(x[at(n, strides, dim)]) : 0.0f;
  }
  // dt as it is given, and the bias.
  template <typename T>
  float raw_step(uint n, device const T* steps, device const float* bias, constant SelectiveScanParams& params) const {
    const float given = params.wide_steps
                            ? read(n, reinterpret_cast<device const float*>(steps), params.step, params.dim)
                            : read(n, steps, params.step, params.dim);
    return params.has_bias && inside(n) ? given + bias[first + channel(n)] : given;
  }
  float shared_decay(uint n, float step, device const float* A, constant SelectiveScanParams& params) const {
    return inside(n) ? precise::exp(step * shared_rate(A, params, first + channel(n))) : 1.0f;
  }
  // Positions behind the last one have steps of 0, which leave the states as they are.
  float step(uint n, float raw, constant SelectiveScanParams& params) const {
    return inside(n) ? step_of(raw, params) : 0.0f;
  }
};

// Brings the rows of B or C of POSITIONS positions into threadgroup memory, which has ROW numbers for each.
template <uint ROW, uint POSITIONS, typename T>
inline void fetch_rows(threadgroup float* tile, device const T* rows, constant const long (&strides)[4],
                       constant SelectiveScanParams& params, Place place, uint begin, uint thread_index) {
  rows += place.batch * strides[0] + place.group * strides[2];
  const bool along_positions = strides[3] != 1;
#pragma unroll 4
  for (uint i = thread_index; i < ROW * POSITIONS; i += SCAN_THREADS) {
    const uint position = along_positions ? i % POSITIONS : i / ROW, n = along_positions ? i / POSITIONS : i % ROW;
    const bool inside = begin + position < place.end && n < params.states;
    tile[position * ROW + n] =
        inside ? static_cast<float>(rows[long(begin + position) * strides[1] + long(n) * strides[3]]) : 0.0f;
  }
}

// Whether a sequence begins at a position behind another one, by the sequences' numbers.
inline bool begins(device const int* numbers, constant SelectiveScanParams& params, uint batch, uint position) {
  if (!params.has_numbers || position == 0 || position >= params.length) return false;
  numbers += ulong(batch) * params.length + position;
  return numbers[0] != numbers[-1];
}

// Sums the first COUNT values, a power of two, over LANES lanes that are STRIDE apart: lane i of these gets the sums of
// the values from i * COUNT / LANES on, COUNT / LANES of them or one.
template <ushort STRIDE, uint LANES, uint COUNT, uint N>
inline void strided_sums(thread float (&values)[N], uint lane) {
  if constexpr (LANES > 1) {
    constexpr ushort across = STRIDE * LANES / 2;
    constexpr uint kept = COUNT > 1 ? COUNT / 2 : 1;
    const bool upper = lane & across;
#pragma unroll
    for (uint i = 0; i < kept; ++i) {
      const float low = values[i], high = COUNT > 1 ? values[(i + kept) % N] : low;
      values[i] = (upper ? high : low) + simd_shuffle_xor(upper ? low : high, across);
    }
    strided_sums<STRIDE, LANES / 2, kept>(values, lane);
  }
}

// The four states that a lane has of a channel. States that a channel does not have are 0.
inline float4 load_states(device const float* from, bool given, uint states, uint part, long stride = 1) {
  float4 values = float4(0.0f);
#pragma unroll
  for (uint i = 0; i < 4; ++i)
    if (given && part * 4 + i < states) values[i] = from[long(part * 4 + i) * stride];
  return values;
}
inline void store_states(float4 values, device float* to, bool wanted, uint states, uint part) {
#pragma unroll
  for (uint i = 0; i < 4; ++i)
    if (wanted && part * 4 + i < states) to[part * 4 + i] = values[i];
}
inline float4 load_rates(device const float* A, constant SelectiveScanParams& params, uint channel, bool holds,
                         uint part) {
  return load_states(A + long(channel / params.dim) * params.A[0] + long(channel % params.dim) * params.A[1], holds,
                     params.states, part, params.A[2]);
}

template <typename T>
inline float4 decay_of(float step, float4 rates) {
  const float4 x = step * rates;
  return float4(Math<T>::exp(x.x), Math<T>::exp(x.y), Math<T>::exp(x.z), Math<T>::exp(x.w));
}
inline float sum(float4 x) { return (x.x + x.y) + (x.z + x.w); }

#define INSTANTIATE(name, types, ...) template[[host_name(name types)]] [[kernel]] decltype(__VA_ARGS__) __VA_ARGS__;
// Channels of up to 16, 64 and 128 states: lanes that share a channel, channels of a lane, and whether a channel has
// one rate for all states, whose decays are computed once.
#define INSTANTIATE_STATES(name, types, function, T)                               \
  INSTANTIATE(name "_16", types, function<4, 1, false, T>)                         \
  INSTANTIATE(name "_64", types, function<16, 1, false, T>)                        \
  INSTANTIATE(name "_128", types, function<32, 1, false, T>)                       \
  INSTANTIATE(name "_shared_64", types, function<16, SCAN_LANE_CHANNELS, true, T>) \
  INSTANTIATE(name "_shared_128", types, function<32, SCAN_LANE_CHANNELS, true, T>)
#define INSTANTIATE_TYPES(name, function)             \
  INSTANTIATE_STATES(name, "_float", function, float) \
  INSTANTIATE_STATES(name, "_half", function, half)   \
  INSTANTIATE_STATES(name, "_bfloat", function, bfloat)
