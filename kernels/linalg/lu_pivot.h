// Partial pivoting that moves no rows: each row stays in its lane and keeps its place in the order that exchanges of
// rows would make, which LAPACK's pivots describe. Rows whose place is before k are finished.
#pragma once

#include <metal_stdlib>

#include "fours.h"

// A row's key in the search of pivot k, which is more than 0 if the row takes part. A NaN is above all numbers.
// A complex number counts as the sum of its parts' magnitudes, as in LAPACK.
template <typename T>
inline uint pivot_key(T value, uint place, uint k, bool takes_part) {
  return takes_part && place >= k ? as_type<uint>(length_of(value)) + 1 : 0;
}

// Reduces over the LANES lanes that share a matrix. Every lane gets the result.
template <uint LANES>
inline uint lanes_max(uint value) {
  if (LANES == 32) return metal::simd_max(value);
  value = metal::quad_max(value);
  if (LANES >= 8) value = metal::max(value, metal::simd_shuffle_xor(value, 4));
  if (LANES >= 16) value = metal::max(value, metal::simd_shuffle_xor(value, 8));
  return value;
}

// The place of the row with the largest key, and of the first of several, as in LAPACK.
template <uint LANES>
inline uint first_of_largest(uint key, uint place) {
  return ~lanes_max<LANES>(key == lanes_max<LANES>(key) ? ~place : 0);
}

// A row's place after the row at `pivot` and the one at `k` have changed places.
inline uint exchanged(uint place, uint k, uint pivot) { return place == pivot ? k : (place == k ? pivot : place); }

// The row that `count` exchanges from row `first` on move to row `to`: the exchanges are undone from the last one on.
inline uint source_row(uint to, uint first, uint count, threadgroup const uint* pivot_of) {
  for (uint k = first + count; k-- > first;) to = exchanged(to, k, pivot_of[k]);
  return to;
}

// Divides many numbers by one number: by its reciprocal, which a power of two keeps normal.
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

// The divisor of complex numbers.
struct ComplexDivisor {
  float2 inverse;
  float scale;
};
inline ComplexDivisor divisor(float2 value) {
  const float scale = scale_to_one(size_of(value));
  const float2 scaled = value * scale;
  return {conjugate(scaled) / add_square(0.0f, scaled), scale};
}
inline Complex4 operator/(Complex4 value, ComplexDivisor by) { return times(scaled_by(value, by.scale), by.inverse); }

// The factor by which a row below the pivot subtracts the pivot's row. It is rounded as a division, so that equal rows
// cancel to zeros. With pivoting a zero pivot means zeros below it.
inline float multiplier(float value, float pivot, Divisor by, bool pivoting) {
  if (pivoting && pivot == 0.0f) return value;
  const float quotient = value / by;
  return metal::fma(metal::fma(-quotient, pivot * by.scale, value * by.scale), by.inverse, quotient);
}

// Equal rows cancel to zeros here too.
inline float2 multiplier(float2 value, float2 pivot, ComplexDivisor, bool pivoting) {
  if (pivoting && size_of(pivot) == 0.0f) return value;
  return value.x == pivot.x && value.y == pivot.y ? number<float2>(1.0f) : quotient(value, pivot);
}

// Moves the quads of a row one place to the front, and the first one to the end. Loops over the columns of a row then
// use the first quad, without being unrolled: a run-time index would force the registers into memory.
template <typename Four, uint QUADS>
inline void rotate(thread Four (&row)[QUADS]) {
  const Four first = row[0];
#pragma unroll
  for (uint i = 0; i + 1 < QUADS; ++i) row[i] = row[i + 1];
  row[QUADS - 1] = first;
}

template <typename Four, uint QUADS>
inline void rotate_back(thread Four (&row)[QUADS]) {
  const Four last = row[QUADS - 1];
#pragma unroll
  for (uint i = QUADS - 1; i > 0; --i) row[i] = row[i - 1];
  row[0] = last;
}
