// Partial pivoting without moving rows: each row stays in its lane and knows its place in the order that exchanges of rows
// would have brought about, which is what LAPACK's pivots tell. Rows whose place is before k are finished.
#pragma once

#include <metal_stdlib>

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

// What a row below the pivot is to subtract the pivot's row times. With pivoting a zero pivot means zeros below it.
inline float multiplier(float value, float pivot, bool pivoting) {
  return pivoting && pivot == 0.0f ? value : value / pivot;
}

// v[i], and v[i] = value; an index known at run time only would force registers into memory.
inline float component(float4 v, uint i) { return i < 2 ? (i == 0 ? v.x : v.y) : (i == 2 ? v.z : v.w); }
inline float4 with_component(float4 v, uint i, float value) {
  return metal::select(v, float4(value), uint4(0, 1, 2, 3) == i);
}
