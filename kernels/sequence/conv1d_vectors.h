// What kernels of causal_conv1d with vectors share, for windows of up to four positions: neighbours in memory, which
// begin at multiples of their size, and a channel's weights.
#pragma once

#include "sequence/conv1d_tile.h"

constexpr constant uint kWindow = CONV1D_NARROW, kBefore = kWindow - 1;
constexpr constant uint kSums = kWindow + 1;  // of a channel's gradients: by its weights, and by its bias

// The elements of a word in memory.
template <typename T>
struct Word {
  static constexpr constant uint kCount = 2;
  static void spread(uint word, thread float* to) {
    const float2 pair = static_cast<float2>(as_type<vec<T, 2>>(word));
    to[0] = pair.x;
    to[1] = pair.y;
  }
  static uint of(thread const float* from) { return as_type<uint>(static_cast<vec<T, 2>>(float2(from[0], from[1]))); }
};
template <>
struct Word<float> {
  static constexpr constant uint kCount = 1;
  static void spread(uint word, thread float* to) { to[0] = as_type<float>(word); }
  static uint of(thread const float* from) { return as_type<uint>(from[0]); }
};
// Words that a thread reads and writes at once.
template <uint words>
struct Vector;
template <>
struct Vector<1> {
  uint words[1];
  void load(device const uint* x) { words[0] = *x; }
  void store(device uint* to) const { *to = words[0]; }
};
template <>
struct Vector<2> {
  uint words[2];
  void load(device const uint* x) {
    const uint2 given = *reinterpret_cast<device const uint2*>(x);
    words[0] = given.x, words[1] = given.y;
  }
  void store(device uint* to) const { *reinterpret_cast<device uint2*>(to) = uint2(words[0], words[1]); }
};
template <>
struct Vector<4> {
  uint words[4];
  void load(device const uint* x) {
    const uint4 given = *reinterpret_cast<device const uint4*>(x);
    words[0] = given.x, words[1] = given.y, words[2] = given.z, words[3] = given.w;
  }
  void store(device uint* to) const {
    *reinterpret_cast<device uint4*>(to) = uint4(words[0], words[1], words[2], words[3]);
  }
};
// N elements that are neighbours in memory. They are words until somebody computes with them.
template <uint N, typename T>
struct Neighbours {
  static constexpr constant uint kWords = N / Word<T>::kCount;
  Vector<kWords> vector;

  Neighbours() = default;
  // Zeros where the tensor has no such elements.
  Neighbours(device const T* x, bool given) {
#pragma unroll
    for (uint i = 0; i < kWords; ++i) vector.words[i] = 0;
    if (given) vector.load(reinterpret_cast<device const uint*>(x));
  }
  void spread(thread float* to) const {
#pragma unroll
    for (uint i = 0; i < kWords; ++i) Word<T>::spread(vector.words[i], to + i * Word<T>::kCount);
  }
};
template <uint N, typename T>
inline void put(device T* to, thread const float* values) {
  Vector<N / Word<T>::kCount> vector;
#pragma unroll
  for (uint i = 0; i < N / Word<T>::kCount; ++i) vector.words[i] = Word<T>::of(values + i * Word<T>::kCount);
  vector.store(reinterpret_cast<device uint*>(to));
}

// A channel's weights, by how far back they reach, and its bias.
struct Taps {
  float weights[kWindow];
  float addend;

  // The sum of products with the first `width` of the window: the others have no part in it, whatever they are.
  float product(thread const float (&taken)[kWindow], uint width) const {
    float sum = addend;
#pragma unroll
    for (uint s = 0; s < kWindow; ++s)
      if (s < width) sum += weights[s] * taken[s];
    return sum;
  }
};
// `Params` is CausalConv1dParams or that of the update, and `width` theirs, which may be a constant.
template <typename T, typename Params>
inline Taps taps_of(device const uchar* weight, device const uchar* bias, constant Params& params, uint width,
                    uint channel) {
  Taps found;
  if (width == kWindow) {  // a vector
    float row[kWindow];
    if (params.wide)
      Neighbours<kWindow, float>(reinterpret_cast<device const float*>(weight) + channel * kWindow, true).spread(row);
    else
      Neighbours<kWindow, T>(reinterpret_cast<device const T*>(weight) + channel * kWindow, true).spread(row);
#pragma unroll
    for (uint s = 0; s < kWindow; ++s) found.weights[s] = row[kWindow - 1 - s];
  } else {
    const Window<kWindow> weights = weights_of<kWindow, T>(weight, params.wide, width, channel);
#pragma unroll
    for (uint s = 0; s < kWindow; ++s) found.weights[s] = weights.value[s];
  }
  found.addend = params.has_bias ? parameter_at<T>(bias, params.wide, channel) : 0.0f;
  return found;
}

template <typename T>
inline float activated(float x, bool silu) {
  return silu ? Silu<T>::forward(x) : x;
}
template <typename T>
inline float gradient(float x, float grad, bool silu) {
  return silu ? SiluGradient<T>::forward(x, grad) : grad;
}
inline void push(thread float (&window)[kWindow], float next) {
#pragma unroll
  for (uint s = kWindow - 1; s > 0; --s) window[s] = window[s - 1];
  window[0] = next;
}

#define INSTANTIATE_VECTORS(name, function)    \
  INSTANTIATE(name, "_float", function<float>) \
  INSTANTIATE(name, "_half", function<half>)   \
  INSTANTIATE(name, "_bfloat", function<bfloat>)
