// Triangular systems of order above 32. A threadgroup solves for some columns of X, one per thread, from the first rows
// to the last. L goes through threadgroup memory tile by tile. Solved rows of X are read back from X.
#include <metal_stdlib>
using namespace metal;

#include "triangular_tile.h"

constant constexpr uint kTile = TRIANGULAR_TILE;
typedef Tile<kTile, kTile> SquareTile;

// While one tile is used, the next one is loaded into registers.
template <uint SIMDGROUPS>
[[kernel]] [[max_total_threads_per_threadgroup(32 * SIMDGROUPS)]] void trsm_block(
    device const float* a [[buffer(0)]], device const float* b [[buffer(1)]], device float* x [[buffer(2)]],
    constant TriangularParams& p [[buffer(3)]], uint group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  constexpr uint kThreads = 32 * SIMDGROUPS;
  constexpr uint kEach = SquareTile::kFours / kThreads;
  threadgroup float4 tile[SquareTile::kSize];

  const uint matrix = group / p.column_tiles;
  const uint column = group % p.column_tiles * kThreads + thread_index;
  const bool live = column < p.columns;
  a = matrix_at(a, p.a, matrix);
  b = matrix_at(b, p.b, matrix) + column * p.b.column;
  x = matrix_at(x, p.x, matrix) + column * p.x.column;

  float4 next[kEach];
#pragma unroll
  for (uint i = 0; i < kEach; ++i)
    next[i] = SquareTile::fetch(a, p.a, p.order, p.order, i * kThreads + thread_index, true);

  for (uint first = 0; first < p.order; first += kTile) {
    const uint rows = min(kTile, p.order - first);
    float4 values[kTile / 4];
    load_rows(values, b + first * p.b.row, p.b.row, live ? rows : 0);
    for (uint before = 0; before <= first; before += kTile) {
      const bool diagonal = before == first;
      float4 solved[kTile / 4];
      load_rows(solved, x + before * p.x.row, p.x.row, live && !diagonal ? kTile : 0);
      threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
      for (uint i = 0; i < kEach; ++i) SquareTile::store(tile, next[i], p.a, i * kThreads + thread_index);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      if (diagonal && thread_index < kTile) SquareTile::make_divisor(tile, thread_index, p.unit);
      threadgroup_barrier(mem_flags::mem_threadgroup);

      const uint row = diagonal ? first + kTile : first, column = diagonal ? 0 : before + kTile;
      const uint next_rows = p.order - min(row, p.order);
#pragma unroll
      for (uint i = 0; i < kEach; ++i)
        next[i] = SquareTile::fetch(a + row * p.a.row + column * p.a.column, p.a, next_rows, kTile,
                                    i * kThreads + thread_index, row == column);
      if (diagonal)
        substitute(values, tile);
      else
        subtract_product(values, tile, solved);
    }
    store_rows(values, x + first * p.x.row, p.x.row, live ? rows : 0);
  }
}

#define INSTANTIATE(columns, simdgroups)                                                 \
  template [[host_name("trsm_block_" #columns)]] [[kernel]] void trsm_block<simdgroups>( \
      device const float*, device const float*, device float*, constant TriangularParams&, uint, uint);

INSTANTIATE(32, 1)
INSTANTIATE(64, 2)
INSTANTIATE(128, 4)
