// Triangular systems of order 33 to TRIANGULAR_PANEL, for small batches. A threadgroup solves for 32 columns of X, one
// per lane, and each of its simdgroups has 32 rows. When a simdgroup has solved its rows, all simdgroups below subtract
// their products at the same time.
#include <metal_stdlib>
using namespace metal;

#include "triangular_tile.h"

constant constexpr uint kTile = TRIANGULAR_TILE;
constant constexpr uint kSimdgroups = TRIANGULAR_PANEL / kTile;
typedef Tile<kTile, kTile> SquareTile;
constant constexpr uint kEach = SquareTile::kFours / 32;

// A simdgroup's tile of L.
inline void load_tile(thread float4 (&fours)[kEach], device const float* corner, constant StridedMatrices& m, uint rows,
                      uint lane, bool triangle) {
#pragma unroll
  for (uint i = 0; i < kEach; ++i) fours[i] = SquareTile::fetch(corner, m, rows, kTile, i * 32 + lane, triangle);
}

inline void store_tile(threadgroup float4* tile, thread float4 (&fours)[kEach], constant StridedMatrices& m,
                       uint lane) {
#pragma unroll
  for (uint i = 0; i < kEach; ++i) SquareTile::store(tile, fours[i], m, i * 32 + lane);
}

[[kernel]] [[max_total_threads_per_threadgroup(32 * kSimdgroups)]] void trsm_panel(
    device const float* a [[buffer(0)]], device const float* b [[buffer(1)]], device float* x [[buffer(2)]],
    constant TriangularParams& p [[buffer(3)]], uint group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float4 tiles[kSimdgroups * SquareTile::kSize];
  threadgroup float4 exchange[2 * 8 * kTile];  // the rows solved last, while the rows before are still read

  threadgroup float4* const tile = tiles + simdgroup * SquareTile::kSize;
  const uint matrix = group / p.column_tiles;
  const uint column = group % p.column_tiles * 32 + lane;
  const uint first = simdgroup * kTile;
  const uint rows = min(kTile, p.order - min(first, p.order));  // a last panel may have fewer than the simdgroups
  const uint live_rows = column < p.columns ? rows : 0;
  a = matrix_at(a, p.a, matrix) + first * p.a.row;
  b = matrix_at(b, p.b, matrix) + first * p.b.row + column * p.b.column;
  x = matrix_at(x, p.x, matrix) + first * p.x.row + column * p.x.column;

  float4 next[kEach];
  load_tile(next, a, p.a, rows, lane, simdgroup == 0);
  float4 values[kTile / 4];
  load_rows(values, b, p.b.row, live_rows);

  for (uint solving = 0; solving * kTile < p.order; ++solving) {
    threadgroup float4* const solved_rows = exchange + solving % 2 * 8 * kTile;
    if (simdgroup >= solving) {
      store_tile(tile, next, p.a, lane);
      simdgroup_barrier(mem_flags::mem_threadgroup);
    }
    if (simdgroup == solving) {
      SquareTile::make_divisor(tile, lane, p.unit);
      simdgroup_barrier(mem_flags::mem_threadgroup);
      substitute(values, tile);
      store_rows(values, x, p.x.row, live_rows);
#pragma unroll
      for (uint q = 0; q < kTile / 4; ++q) solved_rows[q * 32 + lane] = values[q];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (simdgroup > solving) {
      float4 solved[kTile / 4];
#pragma unroll
      for (uint q = 0; q < kTile / 4; ++q) solved[q] = solved_rows[q * 32 + lane];
      load_tile(next, a + (solving + 1) * kTile * p.a.column, p.a, rows, lane, simdgroup == solving + 1);
      subtract_product(values, tile, solved);
      simdgroup_barrier(mem_flags::mem_threadgroup);  // the tile will be written again
    }
  }
}
