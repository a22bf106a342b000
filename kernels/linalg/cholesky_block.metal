// Cholesky factorization of matrices that fit the registers of one threadgroup, one thread for each tile of T x T.
#include <metal_stdlib>
using namespace metal;

#include "cholesky.h"
#include "cholesky_tile.h"

template <uint T, uint TILES>
[[kernel]] [[max_total_threads_per_threadgroup((TILES * (TILES + 1) / 2 + 31) / 32 * 32)]] void cholesky_block(
    device const float* a [[buffer(0)]], device float* l [[buffer(1)]], device int* info [[buffer(2)]],
    constant CholeskyParams& p [[buffer(3)]], uint matrix [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup float4 factor[T * T / 4];
  threadgroup float inverse[T];
  threadgroup float4 below[T * TILES * T / 4];
  threadgroup uint failure;
  const CholeskyShared<T> shared = {factor, inverse, below, TILES * T / 4, &failure};

  const uint tiles = (p.n + T - 1) / T;
  const TilePlace at = place_in_triangle(thread_index, tiles);
  const bool mine = at.column < tiles, diagonal = at.row == at.column;
  const uint rows = mine ? p.n - at.row * T : 0, columns = mine ? p.n - at.column * T : 0;

  CholeskyTile<T> tile;
  load_tile(tile, a + matrix * p.a_batch + at.row * T * p.a_row + at.column * T * p.a_column, p.a_row, p.a_column,
            rows, columns, diagonal);
  const uint failed = factor_tiles(tile, at, tiles, 0, shared);
  if (!mine) return;
  device float* const to = l + matrix * p.l_batch;
  store_tile(tile, to + at.row * T * p.l_row + at.column * T * p.l_column, p.l_row, p.l_column, rows, columns,
             diagonal);
  if (thread_index == 0) info[matrix] = failed;
  if (diagonal) return;
  device float* const above = to + at.column * T * p.l_row + at.row * T * p.l_column;
#pragma unroll
  for (uint c = 0; c < T; ++c) {
#pragma unroll
    for (uint r = 0; r < T; ++r)
      if (c < rows) above[r * p.l_row + c * p.l_column] = 0.0f;
  }
}

#define INSTANTIATE(t, tiles, n)                                                                      \
  template [[host_name("cholesky_block_" #n)]] [[kernel]] void cholesky_block<t, tiles>(              \
      device const float*, device float*, device int*, constant CholeskyParams&, uint, uint);

INSTANTIATE(4, 16, 64)
INSTANTIATE(8, 16, 128)
INSTANTIATE(8, 32, 256)
