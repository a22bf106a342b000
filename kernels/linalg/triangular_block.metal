// Triangular systems of order above 32. A threadgroup solves for some columns of X, one per thread, from the first rows
// to the last. L goes through threadgroup memory tile by tile. Solved rows of X are read back from X.
#include <metal_stdlib>
using namespace metal;

#include "triangular_tile.h"

// With AHEAD the next tile is loaded into registers while one is used.
template <uint SIMDGROUPS, bool AHEAD, uint kTile = TRIANGULAR_TILE, typename T = float>
[[kernel]] [[max_total_threads_per_threadgroup(32 * SIMDGROUPS)]] void trsm_block(
    device const T* a [[buffer(0)]], device const T* b [[buffer(1)]], device T* x [[buffer(2)]],
    constant TriangularParams& p [[buffer(3)]], uint group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  typedef typename FourOf<T>::Type Four;
  typedef Tile<kTile, kTile, T> SquareTile;
  constexpr uint kThreads = 32 * SIMDGROUPS;
  constexpr uint kEach = SquareTile::kFours / kThreads;
  threadgroup Four tile[SquareTile::kSize];

  const uint matrix = group / p.column_tiles;
  const uint column = group % p.column_tiles * kThreads + thread_index;
  const bool live = column < p.columns;
  a = matrix_at(a, p.a, matrix);
  b = matrix_at(b, p.b, matrix) + column * p.b.column;
  x = matrix_at(x, p.x, matrix) + column * p.x.column;

  Four next[AHEAD ? kEach : 1];
  if constexpr (AHEAD) {
#pragma unroll
    for (uint i = 0; i < kEach; ++i)
      next[i] = SquareTile::fetch(a, p.a, p.order, p.order, i * kThreads + thread_index, true);
  }

  for (uint first = 0; first < p.order; first += kTile) {
    const uint rows = min(kTile, p.order - first);
    Four values[kTile / 4];
    load_rows(values, b + first * p.b.row, p.b.row, live ? rows : 0);
    for (uint before = 0; before <= first; before += kTile) {
      const bool diagonal = before == first;
      Four solved[kTile / 4];
      load_rows(solved, x + before * p.x.row, p.x.row, live && !diagonal ? kTile : 0);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      if constexpr (AHEAD) {
#pragma unroll
        for (uint i = 0; i < kEach; ++i) SquareTile::store(tile, next[i], p.a, i * kThreads + thread_index);
      } else {
        device const T* const corner = a + first * p.a.row + before * p.a.column;
        for (uint at = thread_index; at < SquareTile::kFours; at += kThreads)
          SquareTile::store(tile, SquareTile::fetch(corner, p.a, rows, kTile, at, diagonal), p.a, at);
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      if (diagonal && thread_index < kTile) SquareTile::make_divisor(tile, thread_index, p.unit);
      threadgroup_barrier(mem_flags::mem_threadgroup);

      if constexpr (AHEAD) {
        const uint row = diagonal ? first + kTile : first, column = diagonal ? 0 : before + kTile;
        const uint next_rows = p.order - min(row, p.order);
#pragma unroll
        for (uint i = 0; i < kEach; ++i)
          next[i] = SquareTile::fetch(a + row * p.a.row + column * p.a.column, p.a, next_rows, kTile,
                                      i * kThreads + thread_index, row == column);
      }
      if (diagonal)
        substitute(values, tile);
      else
        subtract_product(values, tile, solved);
    }
    store_rows(values, x + first * p.x.row, p.x.row, live ? rows : 0);
  }
}

#define INSTANTIATE(name, simdgroups, ahead)                                  \
  template [[host_name(name)]] [[kernel]] void trsm_block<simdgroups, ahead>( \
      device const float*, device const float*, device float*, constant TriangularParams&, uint, uint);
#define INSTANTIATE_COMPLEX(name, simdgroups)                                                                  \
  template [[host_name(name)]] [[kernel]] void trsm_block<simdgroups, false, TRIANGULAR_COMPLEX_TILE, float2>( \
      device const float2*, device const float2*, device float2*, constant TriangularParams&, uint, uint);

INSTANTIATE("trsm_block_32", 1, true)
INSTANTIATE("trsm_block_64", 2, true)
INSTANTIATE("trsm_block_128", 4, true)
// For GPUs whose threads have few registers.
INSTANTIATE("trsm_lean_32", 1, false)
INSTANTIATE("trsm_lean_64", 2, false)
INSTANTIATE("trsm_lean_128", 4, false)

INSTANTIATE_COMPLEX("trsm_block_complex_32", 1)
INSTANTIATE_COMPLEX("trsm_block_complex_64", 2)
INSTANTIATE_COMPLEX("trsm_block_complex_128", 4)
