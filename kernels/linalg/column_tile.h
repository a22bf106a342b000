// Householder reflections of a matrix whose columns are in registers. G lanes of one simdgroup share a column: lane g
// of them holds the rows 4 (g + G q) + {0, 1, 2, 3} for every q in QUADS. A column's sums then need log2(G) shuffles
// and no barrier. The reflector that is applied to all columns goes through threadgroup memory, as G QUADS float4 and
// tau.
//
// Rows are finished from the top, so all functions take the first quad that is not finished. For reflector k this is
// the quad that holds row k, and only in this quad are rows treated differently. Loops over quads have constant
// lengths: the compiler unrolls them, so that constants index the registers, which would otherwise be in memory.
#pragma once

#include <metal_stdlib>

#include "householder.h"

template <uint G, uint QUADS>
struct ColumnTile {
  static constexpr constant uint kBlock = 4 * G;          // rows that share a quad index
  static constexpr constant uint kSlots = G * QUADS + 1;  // of a published reflector, in float4

  float4 x[QUADS];

  static uint4 rows_of(uint quad, uint g) { return 4 * (g + G * quad) + uint4(0, 1, 2, 3); }
};

// Reduces over the G lanes that share a column. Every lane gets the result.
template <uint G>
inline float column_sum(float value) {
  if (G == 1) return value;
  if (G == 32) return metal::simd_sum(value);
  value = metal::quad_sum(value);
  if (G >= 8) value += metal::simd_shuffle_xor(value, 4);
  if (G >= 16) value += metal::simd_shuffle_xor(value, 8);
  return value;
}

template <uint G>
inline float column_max(float value) {
  if (G == 1) return value;
  if (G == 32) return metal::simd_max(value);
  value = metal::quad_max(value);
  if (G >= 8) value = metal::max(value, metal::simd_shuffle_xor(value, 4));
  if (G >= 16) value = metal::max(value, metal::simd_shuffle_xor(value, 8));
  return value;
}

// The value of the lane that holds row `row`, for the lanes that share its column.
template <uint G>
inline float from_row(float value, uint row, uint lane) {
  if (G == 1) return value;
  return metal::simd_shuffle(value, lane - lane % G + row / 4 % G);
}

// v[i]. A run-time index would force the registers into memory.
inline float component(float4 v, uint i) { return i < 2 ? (i == 0 ? v.x : v.y) : (i == 2 ? v.z : v.w); }

inline float sum_of(float4 v) { return (v.x + v.y) + (v.z + v.w); }
inline float max_of(float4 v) { return metal::max(metal::max(v.x, v.y), metal::max(v.z, v.w)); }

// Makes reflector k of column k, which this simdgroup holds in the lanes where `owner` is set. beta and v stay in the
// column's registers. v, with zeros above and its one, goes to `published`, and tau behind it.
template <uint G, uint QUADS>
inline void make_and_publish(thread ColumnTile<G, QUADS>& tile, uint first, uint lane, uint k, bool owner,
                             threadgroup float4* published, thread float& tau) {
  const uint g = lane % G;
  const uint4 row = ColumnTile<G, QUADS>::rows_of(first, g);
  const float4 below = metal::select(float4(0.0f), tile.x[first], row > k);
  const float alpha = from_row<G>(component(tile.x[first], k % 4), k, lane);
  float4 most = metal::abs(below);
#pragma unroll
  for (uint q = 0; q < QUADS; ++q)
    if (q > first) most = metal::max(most, metal::abs(tile.x[q]));
  const float largest = column_max<G>(max_of(most));
  const float scale = scale_to_one(metal::max(largest, metal::abs(alpha)));
  float4 squares = (below * scale) * (below * scale);
#pragma unroll
  for (uint q = 0; q < QUADS; ++q)
    if (q > first) squares = metal::fma(tile.x[q] * scale, tile.x[q] * scale, squares);
  const Reflector h = make_reflector(alpha, largest, column_sum<G>(sum_of(squares)), scale);
  if (owner) {
    tau = h.tau;
    const float4 v = (below * scale) * h.inverse;
    tile.x[first] = metal::select(metal::select(tile.x[first], v, row > k), float4(h.beta), row == k);
    published[first * G + g] = metal::select(v, float4(1.0f), row == k);
#pragma unroll
    for (uint q = 0; q < QUADS; ++q) {
      if (q <= first) continue;
      tile.x[q] = (tile.x[q] * scale) * h.inverse;
      published[q * G + g] = tile.x[q];
    }
    if (g == 0) published[QUADS * G].x = h.tau;
  }
}

// Keeps only v below the diagonal in a column with a reflector, and makes the other columns the identity's.
template <uint G, uint QUADS>
inline void keep_reflectors(thread ColumnTile<G, QUADS>& tile, uint g, uint column, uint count) {
#pragma unroll
  for (uint q = 0; q < QUADS; ++q) {
    const uint4 row = ColumnTile<G, QUADS>::rows_of(q, g);
    if (column < count)
      tile.x[q] = metal::select(float4(0.0f), tile.x[q], row > column);
    else
      tile.x[q] = metal::select(float4(0.0f), float4(1.0f), row == column);
  }
}

// Publishes reflector k from the owner's registers and puts e_k in its place: reflector k is the first that changes
// this column of the identity.
template <uint G, uint QUADS>
inline void publish_and_reset(thread ColumnTile<G, QUADS>& tile, uint first, uint g, uint k, bool owner,
                              threadgroup float4* published, float tau) {
  if (!owner) return;
  const uint4 row = ColumnTile<G, QUADS>::rows_of(first, g);
  const float4 e = metal::select(float4(0.0f), float4(1.0f), row == k);
  published[first * G + g] = metal::select(e, tile.x[first], row > k);
  tile.x[first] = e;
#pragma unroll
  for (uint q = 0; q < QUADS; ++q) {
    if (q <= first) continue;
    published[q * G + g] = tile.x[q];
    tile.x[q] = float4(0.0f);
  }
  if (g == 0) published[QUADS * G].x = tau;
}

// vᵀ x of this lane's column and the published reflector.
template <uint G, uint QUADS>
inline float dot_with(thread const ColumnTile<G, QUADS>& tile, uint first, uint g,
                      threadgroup const float4* published) {
  float4 sum = published[first * G + g] * tile.x[first];
#pragma unroll
  for (uint q = 0; q < QUADS; ++q)
    if (q > first) sum = metal::fma(published[q * G + g], tile.x[q], sum);
  return column_sum<G>(sum_of(sum));
}

// x -= v times `factor`.
template <uint G, uint QUADS>
inline void subtract(thread ColumnTile<G, QUADS>& tile, uint first, uint g, threadgroup const float4* published,
                     float factor) {
#pragma unroll
  for (uint q = 0; q < QUADS; ++q)
    if (q >= first) tile.x[q] = metal::fma(float4(-factor), published[q * G + g], tile.x[q]);
}
