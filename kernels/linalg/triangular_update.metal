// X = B - A S: subtracts the product with the solved rows S from the rows that are not solved yet. A threadgroup makes
// 64 x 64 elements, and a thread 8 x 4 of them in registers. A and Sᵀ (whose strides the host gives) go through
// threadgroup memory.
#include <metal_stdlib>
using namespace metal;

#include "triangular_tile.h"

constant constexpr uint kSide = TRIANGULAR_UPDATE;
constant constexpr uint kDepth = 16;  // the columns of A that are loaded at once
constant constexpr uint kThreads = 128;
typedef Tile<kSide, kDepth> Slab;
constant constexpr uint kEach = Slab::kFours / kThreads;

[[kernel]] [[max_total_threads_per_threadgroup(kThreads)]] void trsm_update(
    device const float* a [[buffer(0)]], device const float* solved [[buffer(1)]], device const float* b [[buffer(2)]],
    device float* x [[buffer(3)]], constant TriangularUpdateParams& p [[buffer(4)]],
    uint group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup float4 left[Slab::kSize], right[Slab::kSize];

  const uint tiles = p.row_tiles * p.column_tiles;
  const uint matrix = group / tiles;
  const uint first_row = group % tiles / p.column_tiles * kSide, first_column = group % p.column_tiles * kSide;
  const uint rows = p.rows - first_row, columns = p.columns - first_column;
  const uint row_quad = thread_index / 16, column_quad = thread_index % 16;  // and the row quad 8 further down
  a = matrix_at(a, p.a, matrix) + first_row * p.a.row;
  solved = matrix_at(solved, p.solved, matrix) + first_column * p.solved.row;

  float4 next_left[kEach], next_right[kEach];
#pragma unroll
  for (uint i = 0; i < kEach; ++i) {
    next_left[i] = Slab::fetch(a, p.a, rows, p.depth, i * kThreads + thread_index);
    next_right[i] = Slab::fetch(solved, p.solved, columns, p.depth, i * kThreads + thread_index);
  }
  float4 sums[8];
#pragma unroll
  for (uint i = 0; i < 8; ++i) sums[i] = float4(0.0f);
  for (uint done = 0; done < p.depth;) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
    for (uint i = 0; i < kEach; ++i) {
      Slab::store(left, next_left[i], p.a, i * kThreads + thread_index);
      Slab::store(right, next_right[i], p.solved, i * kThreads + thread_index);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    done += kDepth;
    const uint depth = p.depth - min(done, p.depth);
#pragma unroll
    for (uint i = 0; i < kEach; ++i) {
      const uint at = i * kThreads + thread_index;
      next_left[i] = Slab::fetch(a + done * p.a.column, p.a, rows, depth, at);
      next_right[i] = Slab::fetch(solved + done * p.solved.column, p.solved, columns, depth, at);
    }
#pragma unroll
    for (uint k = 0; k < kDepth; ++k) {
      const float4 r = right[k * Slab::kPitch + column_quad];
#pragma unroll
      for (uint part = 0; part < 2; ++part) {
        const float4 l = left[k * Slab::kPitch + row_quad + 8 * part];
#pragma unroll
        for (uint e = 0; e < 4; ++e) sums[4 * part + e] = fma(float4(l[e]), r, sums[4 * part + e]);
      }
    }
  }

  b = matrix_at(b, p.b, matrix);
  x = matrix_at(x, p.x, matrix);
#pragma unroll
  for (uint i = 0; i < 8; ++i) {
    const uint row = first_row + 4 * row_quad + 32 * (i / 4) + i % 4;
#pragma unroll
    for (uint e = 0; e < 4; ++e) {
      const uint column = first_column + 4 * column_quad + e;
      if (row < p.rows && column < p.columns)
        x[row * p.x.row + column * p.x.column] = b[row * p.b.row + column * p.b.column] - sums[i][e];
    }
  }
}

// Triangular systems of order 33 to TRIANGULAR_PANEL, for small batches. A threadgroup solves for 32 columns of X, one
// per lane, and each of its simdgroups has 32 rows. When a simdgroup has solved its rows, all simdgroups below subtract
// their products at the same time.
constant constexpr uint kTile = TRIANGULAR_TILE;
constant constexpr uint kSimdgroups = TRIANGULAR_PANEL / kTile;
typedef Tile<kTile, kTile> SquareTile;
constant constexpr uint kLaneFours = SquareTile::kFours / 32;

// A simdgroup's tile of L.
inline void load_tile(thread float4 (&fours)[kLaneFours], device const float* corner, constant StridedMatrices& m,
                      uint rows, uint lane, bool triangle) {
#pragma unroll
  for (uint i = 0; i < kLaneFours; ++i) fours[i] = SquareTile::fetch(corner, m, rows, kTile, i * 32 + lane, triangle);
}

inline void store_tile(threadgroup float4* tile, thread float4 (&fours)[kLaneFours], constant StridedMatrices& m,
                       uint lane) {
#pragma unroll
  for (uint i = 0; i < kLaneFours; ++i) SquareTile::store(tile, fours[i], m, i * 32 + lane);
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

  float4 next[kLaneFours];
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
