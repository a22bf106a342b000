// Partial pivoting without moving rows: each row stays in its lane and knows its place in the order that exchanges of
// rows would have brought about, which is what LAPACK's pivots tell. Rows whose place is before k are finished.
#pragma once

#include <metal_stdlib>

#include "householder.h"

// What a row brings to the search of pivot k: more than 0 if it takes part. A NaN is above all numbers.
inline uint pivot_key(float value, uint place, uint k, bool takes_part) {
  return takes_part && place >= k ? as_type<uint>(metal::abs(value)) + 1 : 0;
}

// Over the LANES lanes that share a matrix; every lane gets the result.
template <uint LANES>
inline uint lanes_max(uint value) {
  if (LANES == 32) return metal::simd_max(value);
  value = metal::quad_max(value);
  if (LANES >= 8) value = metal::max(value, metal::simd_shuffle_xor(value, 4));
  if (LANES >= 16) value = metal::max(value, metal::simd_shuffle_xor(value, 8));
  return value;
}

// The place of the row with the largest key; of several the first, as LAPACK's.
template <uint LANES>
inline uint first_of_largest(uint key, uint place) {
  return ~lanes_max<LANES>(key == lanes_max<LANES>(key) ? ~place : 0);
}

// A row's place after the row at `pivot` and the one at `k` have changed places.
inline uint exchanged(uint place, uint k, uint pivot) { return place == pivot ? k : (place == k ? pivot : place); }

// Division of many numbers by one: times the reciprocal of it, which a power of two keeps a normal number.
struct Divisor {
  float inverse, scale;
};
inline Divisor divisor(float value) {
  const float scale = scale_to_one(metal::abs(value));
  return {1.0f / (value * scale), scale};
}
template <typename T>
inline T operator/(T value, Divisor by) {
  return (value * by.inverse) * by.scale;
}

// What a row below the pivot is to subtract the pivot's row times: rounded as a division, so that equal rows cancel to
// zeros. With pivoting a zero pivot means zeros below it.
inline float multiplier(float value, float pivot, Divisor by, bool pivoting) {
  if (pivoting && pivot == 0.0f) return value;
  const float quotient = value / by;
  return metal::fma(metal::fma(-quotient, pivot * by.scale, value * by.scale), by.inverse, quotient);
}

// The quads of a row, each one place further to the front, the first to the end: loops over the columns of a row take
// the first quad as theirs, and stay one copy, as an index known at run time only would force registers into memory.
template <uint QUADS>
inline void rotate(thread float4 (&row)[QUADS]) {
  const float4 first = row[0];
#pragma unroll
  for (uint i = 0; i + 1 < QUADS; ++i) row[i] = row[i + 1];
  row[QUADS - 1] = first;
}

template <uint QUADS>
inline void rotate_back(thread float4 (&row)[QUADS]) {
  const float4 last = row[QUADS - 1];
#pragma unroll
  for (uint i = QUADS - 1; i > 0; --i) row[i] = row[i - 1];
  row[0] = last;
}

// v[i]; an index known at run time only would force v into memory.
inline float component(float4 v, uint i) { return i < 2 ? (i == 0 ? v.x : v.y) : (i == 2 ? v.z : v.w); }
