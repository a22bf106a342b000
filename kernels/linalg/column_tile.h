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

#include "fours.h"

template <uint G, uint QUADS, typename T = float>
struct ColumnTile {
  typedef typename FourOf<T>::Type Four;
  static constexpr constant uint kBlock = 4 * G;          // rows that share a quad index
  static constexpr constant uint kSlots = G * QUADS + 1;  // of a published reflector, in fours

  Four x[QUADS];

  static uint4 rows_of(uint quad, uint g) { return 4 * (g + G * quad) + uint4(0, 1, 2, 3); }
};

// Reduces over the G lanes that share a column. Every lane gets the result.
template <uint G, typename T>
inline T column_sum(T value) {
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
template <uint G, typename T>
inline T from_row(T value, uint row, uint lane) {
  if (G == 1) return value;
  return metal::simd_shuffle(value, lane - lane % G + row / 4 % G);
}

inline float sum_of(float4 v) { return (v.x + v.y) + (v.z + v.w); }
inline float2 sum_of(Complex4 v) { return float2(sum_of(v.re), sum_of(v.im)); }
inline float max_of(float4 v) { return metal::max(metal::max(v.x, v.y), metal::max(v.z, v.w)); }

// Makes reflector k of column k, which this simdgroup holds in the lanes where `owner` is set. beta and v stay in the
// column's registers. v, with zeros above and its one, goes to `published`, and tau behind it.
template <uint G, uint QUADS, typename T>
inline void make_and_publish(thread ColumnTile<G, QUADS, T>& tile, uint first, uint lane, uint k, bool owner,
                             threadgroup typename FourOf<T>::Type* published, thread T& tau) {
  const uint g = lane % G;
  const uint4 row = ColumnTile<G, QUADS, T>::rows_of(first, g);
  typedef typename FourOf<T>::Type Four;
  const Four zero = four_of(T(0.0f)), one = four_of(number<T>(1.0f));
  const Four below = choose(zero, tile.x[first], row > k);
  const T alpha = from_row<G>(component(tile.x[first], k % 4), k, lane);
  float4 most = sizes_of(below);
#pragma unroll
  for (uint q = 0; q < QUADS; ++q)
    if (q > first) most = metal::max(most, sizes_of(tile.x[q]));
  const float largest = column_max<G>(max_of(most));
  const float scale = scale_to_one(metal::max(largest, size_of(alpha)));
  float4 squares = squares_of(scaled_by(below, scale));
#pragma unroll
  for (uint q = 0; q < QUADS; ++q)
    if (q > first) squares = add_squares(squares, scaled_by(tile.x[q], scale));
  const auto h = make_reflector(alpha, largest, column_sum<G>(sum_of(squares)), scale);
  if (owner) {
    tau = h.tau;
    const Four v = times(scaled_by(below, scale), h.inverse);
    tile.x[first] = choose(choose(tile.x[first], v, row > k), four_of(h.beta), row == k);
    published[first * G + g] = choose(v, one, row == k);
#pragma unroll
    for (uint q = 0; q < QUADS; ++q) {
      if (q <= first) continue;
      tile.x[q] = times(scaled_by(tile.x[q], scale), h.inverse);
      published[q * G + g] = tile.x[q];
    }
    if (g == 0) put(published + QUADS * G, 0, h.tau);
  }
}

// Keeps only v below the diagonal in a column with a reflector, and makes the other columns the identity's.
template <uint G, uint QUADS, typename T>
inline void keep_reflectors(thread ColumnTile<G, QUADS, T>& tile, uint g, uint column, uint count) {
#pragma unroll
  for (uint q = 0; q < QUADS; ++q) {
    const uint4 row = ColumnTile<G, QUADS, T>::rows_of(q, g);
    if (column < count)
      tile.x[q] = choose(four_of(T(0.0f)), tile.x[q], row > column);
    else
      tile.x[q] = choose(four_of(T(0.0f)), four_of(number<T>(1.0f)), row == column);
  }
}

// Publishes reflector k from the owner's registers and puts e_k in its place: reflector k is the first that changes
// this column of the identity.
template <uint G, uint QUADS, typename T>
inline void publish_and_reset(thread ColumnTile<G, QUADS, T>& tile, uint first, uint g, uint k, bool owner,
                              threadgroup typename FourOf<T>::Type* published, T tau) {
  if (!owner) return;
  const uint4 row = ColumnTile<G, QUADS, T>::rows_of(first, g);
  const auto e = choose(four_of(T(0.0f)), four_of(number<T>(1.0f)), row == k);
  published[first * G + g] = choose(e, tile.x[first], row > k);
  tile.x[first] = e;
#pragma unroll
  for (uint q = 0; q < QUADS; ++q) {
    if (q <= first) continue;
    published[q * G + g] = tile.x[q];
    tile.x[q] = four_of(T(0.0f));
  }
  if (g == 0) put(published + QUADS * G, 0, tau);
}

// vᴴ x of this lane's column and the published reflector.
template <uint G, uint QUADS, typename T>
inline T dot_with(thread const ColumnTile<G, QUADS, T>& tile, uint first, uint g,
                  threadgroup const typename FourOf<T>::Type* published) {
  auto sum = products_of(published[first * G + g], tile.x[first]);
#pragma unroll
  for (uint q = 0; q < QUADS; ++q)
    if (q > first) add_products(sum, published[q * G + g], tile.x[q]);
  return column_sum<G>(sum_of(sum));
}

// The published reflector's tau.
template <uint G, uint QUADS, typename T>
inline T tau_of(thread const ColumnTile<G, QUADS, T>&, threadgroup const typename FourOf<T>::Type* published) {
  return taken(published + QUADS * G, 0);
}

// x -= v times `factor`.
template <uint G, uint QUADS, typename T>
inline void subtract(thread ColumnTile<G, QUADS, T>& tile, uint first, uint g,
                     threadgroup const typename FourOf<T>::Type* published, T factor) {
#pragma unroll
  for (uint q = 0; q < QUADS; ++q)
    if (q >= first) tile.x[q] = minus_product(tile.x[q], factor, published[q * G + g]);
}
