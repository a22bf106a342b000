// What a threadgroup of causal_conv1d and of its derivative has: channels and positions of a batch entry, which lie in
// threadgroup memory, so that threads read and write along the axis that is contiguous, and compute along the other. A
// lane has a channel, and a simdgroup some neighbouring positions.
#pragma once

#include "activation/formulas.h"
#include "sequence/causal_conv1d.h"

constexpr constant uint kHalo = CONV1D_WIDTH - 1;  // positions before those of a threadgroup, and behind them
constexpr constant uint kConv1dSimdgroups = CONV1D_THREADS / 32;

struct Place {
  uint channel;  // the first
  uint segment;
  uint batch;

  Place(constant CausalConv1dParams& params, uint group) {
    const uint blocks = (params.channels + CONV1D_CHANNELS - 1) / CONV1D_CHANNELS;
    channel = group % blocks * CONV1D_CHANNELS;
    segment = group / blocks % params.segments;
    batch = group / blocks / params.segments;
  }
  // Whether the tensor has all channels, at `count` positions from `begin` on.
  bool holds_all(constant CausalConv1dParams& params, int begin, uint count) const {
    return channel + CONV1D_CHANNELS <= params.channels && begin >= 0 &&
           static_cast<uint>(begin) + count <= params.length;
  }
};

// Elements of `count` positions and all channels, shared among the threads: their number for a thread, and the places.
// Lanes are neighbours in memory.
template <uint count>
struct Share {
  static constexpr constant uint kSteps = (count + kConv1dSimdgroups - 1) / kConv1dSimdgroups;  // along the channels
  static constexpr constant uint kAcross = (count + 31) / 32, kRows = CONV1D_CHANNELS / kConv1dSimdgroups;
  static constexpr constant uint kElements = kSteps > kAcross* kRows ? kSteps : kAcross * kRows;

  bool along_channels;
  uint lane, simdgroup;
  Share(bool along_channels, uint thread_index)
      : along_channels(along_channels), lane(thread_index % 32), simdgroup(thread_index / 32) {}

  uint channel(uint n) const { return along_channels ? lane : simdgroup + n / kAcross * kConv1dSimdgroups; }
  uint position(uint n) const { return along_channels ? position_along(n) : lane + n % kAcross * 32; }
  uint position_along(uint n) const { return simdgroup + n * kConv1dSimdgroups; }
  bool holds(uint n) const { return n < (along_channels ? kSteps : kAcross * kRows) && position(n) < count; }
};

// Reads `count` positions from `begin` on, all of a thread's at once. There are zeros where the tensor has no such
// position or channel.
template <uint count, uint pitch, typename T, typename U>
inline void fetch(threadgroup U* tile, device const T* x, constant const long (&strides)[3],
                  constant CausalConv1dParams& params, Place place, int begin, uint thread_index) {
  const Share<count> share(strides[1] == 1, thread_index);
  x += place.batch * strides[0] + place.channel * strides[1] + begin * strides[2];
  T values[Share<count>::kElements];
  if (place.holds_all(params, begin, count)) {  // nothing is asked of an element, and its place is near the one before
    if (share.along_channels) {
      x += share.lane + share.simdgroup * strides[2];
#pragma unroll
      for (uint n = 0; n < Share<count>::kSteps; ++n, x += kConv1dSimdgroups * strides[2])
        if (share.position_along(n) < count) values[n] = *x;
    } else {
      x += share.simdgroup * strides[1] + share.lane * strides[2];
#pragma unroll
      for (uint row = 0; row < Share<count>::kRows; ++row, x += kConv1dSimdgroups * strides[1]) {
#pragma unroll
        for (uint n = 0; n < Share<count>::kAcross; ++n)
          if (share.lane + n * 32 < count) values[row * Share<count>::kAcross + n] = x[n * 32 * strides[2]];
      }
    }
  } else {
#pragma unroll
    for (uint n = 0; n < Share<count>::kElements; ++n) {
      const uint channel = share.channel(n), at = share.position(n);
      const bool inside = share.holds(n) && place.channel + channel < params.channels &&
                          static_cast<uint>(begin + static_cast<int>(at)) < params.length;
      values[n] = inside ? x[channel * strides[1] + at * strides[2]] : T(0.0f);
    }
  }
#pragma unroll
  for (uint n = 0; n < Share<count>::kElements; ++n)
    if (share.holds(n)) tile[share.channel(n) * pitch + share.position(n)] = static_cast<U>(values[n]);
}

template <uint pitch, typename T>
inline void store(threadgroup const T* tile, device T* y, constant const long (&strides)[3],
                  constant CausalConv1dParams& params, Place place, uint begin, uint thread_index) {
  const bool along_channels = strides[1] == 1;
  y += place.batch * strides[0];
  if (place.holds_all(params, static_cast<int>(begin), CONV1D_POSITIONS)) {
    constexpr uint kStep = CONV1D_THREADS / CONV1D_CHANNELS, kRows = CONV1D_THREADS / CONV1D_POSITIONS;
    const uint channel = along_channels ? thread_index % CONV1D_CHANNELS : thread_index / CONV1D_POSITIONS;
    const uint at = along_channels ? thread_index / CONV1D_CHANNELS : thread_index % CONV1D_POSITIONS;
    const long step = along_channels ? kStep * strides[2] : kRows * strides[1];
    y += (place.channel + channel) * strides[1] + (begin + at) * strides[2];
    tile += channel * pitch + at;
#pragma unroll
    for (uint n = 0; n < CONV1D_POSITIONS * CONV1D_CHANNELS / CONV1D_THREADS; ++n, y += step)
      *y = tile[along_channels ? n * kStep : n * kRows * pitch];
    return;
  }
#pragma unroll
  for (uint n = 0; n < CONV1D_POSITIONS * CONV1D_CHANNELS / CONV1D_THREADS; ++n) {
    const uint i = n * CONV1D_THREADS + thread_index;
    const uint channel = along_channels ? i % CONV1D_CHANNELS : i / CONV1D_POSITIONS;
    const uint at = along_channels ? i / CONV1D_CHANNELS : i % CONV1D_POSITIONS;
    if (begin + at < params.length && place.channel + channel < params.channels)
      y[(place.channel + channel) * strides[1] + (begin + at) * strides[2]] = tile[channel * pitch + at];
  }
}

// How many sequences end at or before a position: the number of its sequence.
inline uint sequence_at(device const int* numbers, constant CausalConv1dParams& params, int position) {
  uint low = 0, high = params.sequences;
  while (low < high) {
    const uint middle = (low + high) / 2;
    if (numbers[middle + 1] <= position)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

// How many positions of its sequence lie before a position: width - 1 for all that have so many, and -1 for padding.
inline int age_at(device const int* numbers, constant CausalConv1dParams& params, uint batch, int position) {
  const int most = static_cast<int>(params.width) - 1;
  if (position >= static_cast<int>(params.length)) return 0;
  if (params.sequencing == CONV1D_WHOLE) return min(position, most);
  if (params.sequencing == CONV1D_ENDS) {
    const uint sequence = sequence_at(numbers, params, position);
    return sequence == 0 ? min(position, most) : clamp(position - numbers[sequence], 0, most);
  }
  device const int* const row = numbers + ulong(batch) * params.length;
  if (row[position] < 0) return -1;
  int age = 0;
  while (age < most && age < position && row[position - age - 1] == row[position]) ++age;
  return age;
}

// The number of a position's sequence among those with states; params.sequences past the last of them.
inline uint sequence_of(device const int* numbers, constant CausalConv1dParams& params, Place place, int position) {
  return params.sequencing == CONV1D_ENDS ? sequence_at(numbers, params, position) : place.batch;
}

// Where the state of a position's sequence begins, if it has one.
template <typename T>
inline device const T* state_of(device const T* state, device const int* numbers, constant CausalConv1dParams& params,
                                Place place, uint channel, int position) {
  if (!params.has_state) return nullptr;
  const uint sequence = sequence_of(numbers, params, place, position);
  if (sequence >= params.sequences) return nullptr;
  return state + sequence * params.state[0] + channel * params.state[1];
}

template <typename T>
inline float parameter_at(device const uchar* numbers, uint wide, ulong i) {
  return wide ? reinterpret_cast<device const float*>(numbers)[i]
              : static_cast<float>(reinterpret_cast<device const T*>(numbers)[i]);
}

// A channel's window, of up to M positions: the numbers of each, and the weights, by how far back they are.
template <uint M>
struct Window {
  float value[M];

  void push(float next) {
#pragma unroll
    for (uint s = M - 1; s > 0; --s) value[s] = value[s - 1];
    value[0] = next;
  }
  // The sum of products with the first `width` of the window.
  float product(thread const Window& weights, uint width, float sum) const {
#pragma unroll
    for (uint s = 0; s < M; ++s)
      if (s < width) sum += weights.value[s] * value[s];
    return sum;
  }
  // The same window, in which the sequence's state precedes its first position.
  template <typename T>
  Window within(int age, uint width, device const T* state, long stride) const {
    Window found;
#pragma unroll
    for (uint s = 0; s < M; ++s) {
      const int behind = static_cast<int>(s) - age;  // 1 for the last of the state
      found.value[s] = value[s];
      if (behind > 0)
        found.value[s] = state != nullptr && s < width
                             ? static_cast<float>(state[(static_cast<int>(width) - 1 - behind) * stride])
                             : 0.0f;
    }
    return found;
  }
};

template <uint M, typename T>
inline Window<M> weights_of(device const uchar* weight, uint wide, uint width, uint channel) {
  Window<M> found;
#pragma unroll
  for (uint s = 0; s < M; ++s)
    found.value[s] = s < width ? parameter_at<T>(weight, wide, ulong(channel) * width + width - 1 - s) : 0.0f;
  return found;
}

#define INSTANTIATE(name, types, ...) template[[host_name(name types)]] [[kernel]] decltype(__VA_ARGS__) __VA_ARGS__;
#define INSTANTIATE_WIDTHS(name, types, function, T) \
  INSTANTIATE(name "_narrow", types, function<4, T>) \
  INSTANTIATE(name "_wide", types, function<CONV1D_WIDTH, T>)
#define INSTANTIATE_CONV1D(name, function)            \
  INSTANTIATE_WIDTHS(name, "_float", function, float) \
  INSTANTIATE_WIDTHS(name, "_half", function, half)   \
  INSTANTIATE_WIDTHS(name, "_bfloat", function, bfloat)
