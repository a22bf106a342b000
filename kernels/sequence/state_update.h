// What kernels of selective_state_update read: numbers of two types, and vectors of four.
#pragma once

#include "common/pack.h"
#include "common/sums.h"
#include "sequence/scan_tile.h"

// Where a number lies among others of type T, or of float where `wide` says so.
template <typename T>
inline device const T* place_of(device const T* numbers, bool wide, long at) {
  return numbers + (sizeof(T) < sizeof(float) && wide ? 2 * at : at);
}

// Such a number, which is words until somebody computes with it, as in common/pack.h. A compiler that has a load for
// each type waits for the one before it asks for the other, so floats are read by halves.
template <typename T>
struct Number {
  ushort high, low;
  Number() = default;
  Number(device const T* place, bool wide) {
    device const ushort* const halves = reinterpret_cast<device const ushort*>(place);
    high = halves[wide ? 1 : 0], low = halves[0];
  }
  float value(bool wide) const {
    return wide ? as_type<float>(static_cast<uint>(high) << 16 | low) : static_cast<float>(as_type<T>(high));
  }
};
template <>
struct Number<float> {
  float words;
  Number() = default;
  Number(device const float* place, bool) : words(*place) {}
  float value(bool) const { return words; }
};
template <typename T>
inline float number(device const T* numbers, bool wide, long at) {
  return Number<T>(place_of(numbers, wide, at), wide).value(wide);
}

// The same where it is given, else 0. It is read in any case, so that no load waits behind a branch for another one:
// `any` is a place that can be read.
template <typename T>
inline float optional(bool given, device const T* numbers, bool wide, long at, device const T* any) {
  const float found = number(given ? numbers : any, given && wide, given ? at : 0);
  return given ? found : 0.0f;
}

// Four neighbouring numbers, which are words until somebody computes with them, as in common/pack.h.
template <typename T>
struct Quad {
  uint2 words;
  Quad() = default;
  Quad(vec<T, 4> values) : words(as_type<uint2>(values)) {}
  float4 numbers() const { return static_cast<float4>(as_type<vec<T, 4>>(words)); }
};
template <>
struct Quad<float> {
  float4 words;
  Quad() = default;
  Quad(float4 values) : words(values) {}
  float4 numbers() const { return words; }
};

// A lane's four numbers of a row from `begin` on: a vector, or one by one with zeros behind the row's end.
template <bool VECTORS, typename T>
inline Quad<T> quad_of(device const T* row, long stride, uint begin, uint count) {
  if (VECTORS) return *reinterpret_cast<device const Quad<T>*>(row + (begin < count ? begin : 0));
  vec<T, 4> values = vec<T, 4>(static_cast<T>(0.0f));
#pragma unroll
  for (uint n = 0; n < 4; ++n)
    if (begin + n < count) values[n] = row[(begin + n) * stride];
  return values;
}
inline uint4 in_pack(Quad<float> quad) { return as_type<uint4>(quad.words); }
template <typename S>
inline uint4 in_pack(Quad<S> quad) {
  return uint4(quad.words, 0u, 0u);
}
