// Cholesky factorization of matrices that fit the registers of one threadgroup. A thread holds one tile.
#include <metal_stdlib>
using namespace metal;

#include "cholesky.h"
#include "cholesky_tile.h"

// A thread for each tile of the lower triangle, in whole simdgroups.
template <uint TILES>
[[kernel]] [[max_total_threads_per_threadgroup((TILES * (TILES + 1) / 2 + 31) / 32 * 32)]] void cholesky_block(
    device const float* a [[buffer(0)]], device float* l [[buffer(1)]], device int* info [[buffer(2)]],
    constant CholeskyParams& p [[buffer(3)]], uint matrix [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup float4 factor[5];
  threadgroup float4 below[4 * TILES];
  threadgroup uint failure;

  const uint tiles = (p.n + CHOLESKY_TILE - 1) / CHOLESKY_TILE;
  const TilePlace at = place_in_triangle(thread_index, tiles);
  const bool has_tile = at.column < tiles, diagonal = at.row == at.column;
  const uint row = at.row * CHOLESKY_TILE, column = at.column * CHOLESKY_TILE;
  const uint rows = has_tile ? p.n - row : 0, columns = has_tile ? p.n - column : 0;

  device const float* const from = a + matrix * p.a_batch + row * p.a_row + column * p.a_column;
  CholeskyTile tile = load_tile({from, p.a_row, p.a_column, p.a_vectors, rows, columns}, diagonal);
  const uint failed = factor_tiles(tile, at, tiles, 0, {factor, below, TILES, &failure});
  if (!has_tile) return;
  if (thread_index == 0) info[matrix] = failed;
  l += matrix * p.l_batch;
  device float* const to = l + row * p.l_row + column * p.l_column;
  store_tile(tile, {to, p.l_row, p.l_column, p.l_vectors, rows, columns}, diagonal);
  if (diagonal) return;
  device float* const across = l + column * p.l_row + row * p.l_column;
  store_tile(zero_tile(), {across, p.l_row, p.l_column, p.l_vectors, columns, rows}, false);
}

#define INSTANTIATE(n)                                                                            \
  template [[host_name("cholesky_block_" #n)]] [[kernel]] void cholesky_block<n / CHOLESKY_TILE>( \
      device const float*, device float*, device int*, constant CholeskyParams&, uint, uint);

INSTANTIATE(64)
INSTANTIATE(128)
