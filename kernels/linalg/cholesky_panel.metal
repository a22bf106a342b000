// The blocked variant's steps between the updates by syrk.metal.
#include <metal_stdlib>
using namespace metal;

#include "cholesky.h"
#include "cholesky_tile.h"

constant constexpr uint kPanelTiles = CHOLESKY_PANEL / CHOLESKY_TILE;
constant constexpr uint kSliceTiles = CHOLESKY_SLICE / CHOLESKY_TILE;
constant constexpr uint kThreads = (kPanelTiles * (kPanelTiles + 1) / 2 + kPanelTiles * kSliceTiles + 31) / 32 * 32;

// Every threadgroup of a panel factors the diagonal block and solves for its own rows below. One threadgroup that
// factors while the others wait would take as long.
[[kernel]] [[max_total_threads_per_threadgroup(kThreads)]] void cholesky_panel(
    device float* l [[buffer(0)]], device float* factors [[buffer(1)]], device atomic_int* info [[buffer(2)]],
    constant CholeskyPanelParams& p [[buffer(3)]], uint group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup float4 factor[5];
  threadgroup float4 below[4 * (kPanelTiles + kSliceTiles)];
  threadgroup uint failure;

  const uint matrix = group / p.slices, slice = group % p.slices;
  const uint tiles = (p.width + CHOLESKY_TILE - 1) / CHOLESKY_TILE;
  const bool solves = thread_index >= triangle_start(tiles);
  TilePlace at = place_in_triangle(thread_index, tiles);
  if (solves) {
    const uint index = thread_index - triangle_start(tiles);
    at = {tiles + index % kSliceTiles, index / kSliceTiles};
  }
  const bool has_tile = at.column < tiles, diagonal = at.row == at.column;
  const uint row = p.first + at.row * CHOLESKY_TILE + (solves ? slice * CHOLESKY_SLICE : 0);  // of L
  const uint end = solves ? p.n : p.first + p.width;
  const uint rows = has_tile && row < end ? end - row : 0, columns = has_tile ? p.width - at.column * CHOLESKY_TILE : 0;
  device float* const corner =
      l + ulong(matrix) * p.n * p.n + row * p.l_row + (p.first + at.column * CHOLESKY_TILE) * p.l_column;

  CholeskyTile tile = load_tile({corner, p.l_row, p.l_column, p.l_vectors, rows, columns}, diagonal);
  // The first threadgroup may be writing a failure in this panel. Only a failure in an earlier panel counts here.
  const uint known = p.first == 0 ? 0 : atomic_load_explicit(info + matrix, memory_order_relaxed);
  const uint before = known <= p.first ? known : 0;
  const uint failed = factor_tiles(tile, at, tiles, before, {factor, below, kPanelTiles + kSliceTiles, &failure});
  if (slice == 0 && thread_index == 0) {
    if (p.first == 0 || (before == 0 && failed != 0))
      atomic_store_explicit(info + matrix, failed == 0 ? 0 : int(p.first + failed), memory_order_relaxed);
  }
  if (solves) {
    store_tile(tile, {corner, p.l_row, p.l_column, p.l_vectors, rows, columns}, false);
  } else if (slice == 0) {
    device float* const to = factors + (ulong(matrix) * p.n + row) * CHOLESKY_PANEL + at.column * CHOLESKY_TILE;
    const uint access = p.l_vectors == CHOLESKY_ELEMENTS ? CHOLESKY_ELEMENTS : CHOLESKY_ROWS;
    store_tile(tile, {to, CHOLESKY_PANEL, 1, access, rows, columns}, diagonal);
  }
}

// Copies L's rows from A's, once per matrix. A threadgroup takes one row.
[[kernel]] void cholesky_triangle(device const float* a [[buffer(0)]], device float* l [[buffer(1)]],
                                  constant CholeskyTriangleParams& p [[buffer(2)]],
                                  uint group [[threadgroup_position_in_grid]],
                                  uint thread_index [[thread_index_in_threadgroup]]) {
  const uint matrix = group / p.n, row = group % p.n;
  device const float* const from = a + matrix * p.a_batch + row * p.a_row;
  device float* const to = l + ulong(group) * p.n;
  for (uint column = thread_index; column < p.n; column += CHOLESKY_ROW_THREADS) {
    const bool kept = p.upper ? row <= column : row >= column;
    to[column] = kept ? from[column * p.a_column] : 0.0f;
  }
}

// Copies the factors of the diagonal blocks to their places in L. A threadgroup takes one row.
[[kernel]] void cholesky_diagonal(device const float* factors [[buffer(0)]], device float* l [[buffer(1)]],
                                  constant CholeskyPanelParams& p [[buffer(2)]],
                                  uint group [[threadgroup_position_in_grid]],
                                  uint column [[thread_index_in_threadgroup]]) {
  const uint row = group % p.n, first = row / CHOLESKY_PANEL * CHOLESKY_PANEL;
  if (first + column > row) return;
  l[ulong(group / p.n) * p.n * p.n + row * p.l_row + (first + column) * p.l_column] =
      factors[ulong(group) * CHOLESKY_PANEL + column];
}
