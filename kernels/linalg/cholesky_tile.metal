// Cholesky factorization of matrices in the registers of a threadgroup. A thread holds a tile of the lower triangle,
// four columns of four entries. A column of tiles takes two barriers: the thread with the diagonal tile factors it, the
// threads below solve with its factor, and all threads on their right subtract the product of the solved tiles.
#include <metal_stdlib>
using namespace metal;

#include "cholesky.h"
#include "fours.h"
#include "hermitian.h"

template <typename T>
struct CholeskyTile {
  typename FourOf<T>::Type x[CHOLESKY_TILE];
};

// The place of a thread's tile.
struct TilePlace {
  uint row, column;
};

// The place of tile `index` of a triangle. Tiles are counted down the columns, so that the threads that finish first
// are neighbours. Threads beyond the last tile get a column outside of the triangle.
inline TilePlace place_in_triangle(uint index, uint tiles) {
  const uint count = triangle_start(tiles);
  if (index >= count) return {tiles, tiles};
  const uint back = count - 1 - index, row = triangle_row(back);
  return {tiles - 1 - (back - triangle_start(row)), tiles - 1 - row};
}

// The place of a tile in memory, and how many rows and columns it has there.
template <typename Pointer>
struct TileMemory {
  Pointer at;
  int64_t row, column;  // strides
  uint access;          // CHOLESKY_ELEMENTS, or for a complete tile CHOLESKY_ROWS or CHOLESKY_COLUMNS
  uint rows, columns;
};

// The fours' entries i.
template <typename T>
inline typename FourOf<T>::Type across(thread const typename FourOf<T>::Type (&fours)[4], uint i) {
  typename FourOf<T>::Type result;
#pragma unroll
  for (uint e = 0; e < 4; ++e) set_entry(result, e, entry(fours[e], i));
  return result;
}

// Missing entries are the identity's.
template <typename T>
inline CholeskyTile<T> load_tile(TileMemory<device const T*> from, bool diagonal) {
  typedef typename FourOf<T>::Type Four;
  CholeskyTile<T> tile;
  if (from.access == CHOLESKY_ROWS && from.rows != 0) {
    Four rows[4];
#pragma unroll
    for (uint r = 0; r < 4; ++r) rows[r] = four_at(from.at + r * from.row);
#pragma unroll
    for (uint c = 0; c < 4; ++c) tile.x[c] = across<T>(rows, c);
  } else if (from.access == CHOLESKY_COLUMNS && from.rows != 0) {
#pragma unroll
    for (uint c = 0; c < 4; ++c) tile.x[c] = four_at(from.at + c * from.column);
  } else {
#pragma unroll
    for (uint c = 0; c < 4; ++c) {
#pragma unroll
      for (uint r = 0; r < 4; ++r) {
        const bool there = r < from.rows && c < from.columns && (!diagonal || r >= c);
        set_entry(tile.x[c], r, there ? from.at[r * from.row] : number<T>(diagonal && r == c ? 1.0f : 0.0f));
      }
      from.at += from.column;
    }
  }
  return tile;
}

// Writes zeros above the diagonal of a diagonal tile.
template <typename T>
inline void store_tile(CholeskyTile<T> tile, TileMemory<device T*> to, bool diagonal) {
  if (diagonal) {
#pragma unroll
    for (uint c = 1; c < 4; ++c) tile.x[c] = choose(tile.x[c], four_of(T(0.0f)), uint4(0, 1, 2, 3) < c);
  }
  if (to.access == CHOLESKY_ROWS) {
    if (to.rows == 0) return;
#pragma unroll
    for (uint r = 0; r < 4; ++r) set_four_at(to.at + r * to.row, across<T>(tile.x, r));
  } else if (to.access == CHOLESKY_COLUMNS) {
    if (to.rows == 0) return;
#pragma unroll
    for (uint c = 0; c < 4; ++c) set_four_at(to.at + c * to.column, tile.x[c]);
  } else {
#pragma unroll
    for (uint c = 0; c < 4; ++c) {
#pragma unroll
      for (uint r = 0; r < 4; ++r)
        if (r < to.rows && c < to.columns) to.at[r * to.row] = entry(tile.x[c], r);
      to.at += to.column;
    }
  }
}

// The data that a threadgroup shares: the diagonal tile's factor with the inverses of its diagonal, and the tiles below
// it.
template <typename T>
struct CholeskyShared {
  typedef typename FourOf<T>::Type Four;
  threadgroup Four* factor;      // four columns
  threadgroup float4* inverses;  // of its diagonal
  threadgroup Four* below;       // four columns, `pitch` apart
  uint pitch;
  threadgroup uint* failed;
};

// Factors the tile. Gives 0, or the order of its first leading minor that is not positive-definite.
template <typename T>
inline uint factor_tile(thread CholeskyTile<T>& tile, thread float4& inverse) {
  uint failed = 0;
#pragma unroll
  for (uint c = 0; c < 4; ++c) {
    const float pivot = real_part(entry(tile.x[c], c));
    if (failed == 0 && !is_pivot(pivot)) failed = c + 1;
    inverse[c] = metal::rsqrt(pivot);
    tile.x[c] = scaled_by(tile.x[c], inverse[c]);
#pragma unroll
    for (uint s = 1; s < 4; ++s)
      if (s > c) tile.x[s] = minus_product(tile.x[s], conjugate(entry(tile.x[c], s)), tile.x[c]);
    const float root = pivot * inverse[c];  // and a Newton step
    set_entry(tile.x[c], c, number<T>(metal::fma(metal::fma(-root, root, pivot), 0.5f * inverse[c], root)));
  }
  return failed;
}

template <typename T>
inline CholeskyTile<T> zero_tile() {
  CholeskyTile<T> tile;
#pragma unroll
  for (uint c = 0; c < 4; ++c) tile.x[c] = four_of(T(0.0f));
  return tile;
}

// Makes the tile's columns from `first` on the identity's.
template <typename T>
inline void end_tile(thread CholeskyTile<T>& tile, uint first) {
#pragma unroll
  for (uint c = 0; c < 4; ++c)
    if (c >= first) tile.x[c] = choose(four_of(T(0.0f)), four_of(number<T>(1.0f)), uint4(0, 1, 2, 3) == c);
}

template <typename T>
inline void share_factor(CholeskyTile<T> tile, float4 inverse, CholeskyShared<T> shared) {
#pragma unroll
  for (uint c = 0; c < 4; ++c) shared.factor[c] = tile.x[c];
  *shared.inverses = inverse;
}

// tile = tile F⁻ᴴ for the shared factor F, and shares the result as tile `row`.
template <typename T>
inline void solve_tile(thread CholeskyTile<T>& tile, CholeskyShared<T> shared, uint row) {
  const float4 inverse = *shared.inverses;
#pragma unroll
  for (uint c = 0; c < 4; ++c) {
    const auto factor = shared.factor[c];
    tile.x[c] = scaled_by(tile.x[c], inverse[c]);
    shared.below[c * shared.pitch + row] = tile.x[c];
#pragma unroll
    for (uint s = 1; s < 4; ++s)
      if (s > c) tile.x[s] = minus_product(tile.x[s], conjugate(entry(factor, s)), tile.x[c]);
  }
}

// tile -= (shared tile `row`) (shared tile `column`)ᴴ
template <typename T>
inline void update_tile(thread CholeskyTile<T>& tile, CholeskyShared<T> shared, TilePlace at) {
#pragma unroll
  for (uint k = 0; k < 4; ++k) {
    const auto left = shared.below[k * shared.pitch + at.row], right = shared.below[k * shared.pitch + at.column];
#pragma unroll
    for (uint s = 0; s < 4; ++s) tile.x[s] = minus_product(tile.x[s], conjugate(entry(right, s)), left);
  }
}

// Factors `tiles` columns of tiles. A thread without a tile has a column outside of them. Gives the order of the first
// leading minor that is not positive-definite; a `failed` that is not 0 is the order of an earlier one, and is given
// instead. The columns from there on become the identity's. A factor of zeros then makes the tiles below zeros, so all
// other tiles keep their values.
template <typename T>
inline uint factor_tiles(thread CholeskyTile<T>& tile, TilePlace at, uint tiles, uint failed,
                         CholeskyShared<T> shared) {
  for (uint k = 0; k < tiles; ++k) {
    if (at.column == k && at.row == k) {
      if (k > 0) failed = *shared.failed;
      float4 inverse;
      const uint order = factor_tile(tile, inverse);
      if (failed == 0 && order == 0) {
        share_factor(tile, inverse, shared);
      } else {
        share_factor(zero_tile<T>(), float4(0.0f), shared);
        end_tile(tile, failed == 0 ? order - 1 : 0);
        if (failed == 0) failed = k * CHOLESKY_TILE + order;
      }
      *shared.failed = failed;
    }
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    if (at.column == k && at.row > k) solve_tile(tile, shared, at.row);
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    if (at.column > k && at.column < tiles) update_tile(tile, shared, at);
  }
  return *shared.failed;
}

// Matrices that fit the registers of one threadgroup.

// A thread for each tile of the lower triangle, in whole simdgroups.
template <uint TILES, typename T>
[[kernel]] [[max_total_threads_per_threadgroup((TILES * (TILES + 1) / 2 + 31) / 32 * 32)]] void cholesky_block(
    device const T* a [[buffer(0)]], device T* l [[buffer(1)]], device int* info [[buffer(2)]],
    constant CholeskyParams& p [[buffer(3)]], uint matrix [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  typedef typename FourOf<T>::Type Four;
  threadgroup Four factor[4], below[4 * TILES];
  threadgroup float4 inverses;
  threadgroup uint failure;

  const uint tiles = (p.n + CHOLESKY_TILE - 1) / CHOLESKY_TILE;
  const TilePlace at = place_in_triangle(thread_index, tiles);
  const bool has_tile = at.column < tiles, diagonal = at.row == at.column;
  const uint row = at.row * CHOLESKY_TILE, column = at.column * CHOLESKY_TILE;
  const uint rows = has_tile ? p.n - row : 0, columns = has_tile ? p.n - column : 0;

  device const T* const from = a + matrix * p.a_batch + row * p.a_row + column * p.a_column;
  CholeskyTile<T> tile = load_tile<T>({from, p.a_row, p.a_column, p.a_vectors, rows, columns}, diagonal);
  const uint failed = factor_tiles<T>(tile, at, tiles, 0, {factor, &inverses, below, TILES, &failure});
  if (!has_tile) return;
  if (thread_index == 0) info[matrix] = failed;
  l += matrix * p.l_batch;
  device T* const to = l + row * p.l_row + column * p.l_column;
  store_tile<T>(tile, {to, p.l_row, p.l_column, p.l_vectors, rows, columns}, diagonal);
  if (diagonal) return;
  device T* const opposite = l + column * p.l_row + row * p.l_column;
  store_tile<T>(zero_tile<T>(), {opposite, p.l_row, p.l_column, p.l_vectors, columns, rows}, false);
}

#define INSTANTIATE(name, n, type)                                                         \
  template [[host_name(name #n)]] [[kernel]] void cholesky_block<n / CHOLESKY_TILE, type>( \
      device const type*, device type*, device int*, constant CholeskyParams&, uint, uint);

INSTANTIATE("cholesky_block_", 64, float)
INSTANTIATE("cholesky_block_", 128, float)
INSTANTIATE("cholesky_block_complex_", 64, float2)
INSTANTIATE("cholesky_block_complex_", 128, float2)

// The blocked variant's steps between the updates by syrk.metal.

constant constexpr uint kPanelTiles = CHOLESKY_PANEL / CHOLESKY_TILE;
constant constexpr uint kSliceTiles = CHOLESKY_SLICE / CHOLESKY_TILE;
constant constexpr uint kThreads = (kPanelTiles * (kPanelTiles + 1) / 2 + kPanelTiles * kSliceTiles + 31) / 32 * 32;

// Every threadgroup of a panel factors the diagonal block and solves for its own rows below. One threadgroup that
// factors while the others wait would take as long.
[[kernel]] [[max_total_threads_per_threadgroup(kThreads)]] void cholesky_panel(
    device float* l [[buffer(0)]], device float* factors [[buffer(1)]], device atomic_int* info [[buffer(2)]],
    constant CholeskyPanelParams& p [[buffer(3)]], uint group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup float4 factor[4], inverses;
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

  CholeskyTile<float> tile = load_tile<float>({corner, p.l_row, p.l_column, p.l_vectors, rows, columns}, diagonal);
  // The first threadgroup may be writing a failure in this panel. Only a failure in an earlier panel counts here.
  const uint known = p.first == 0 ? 0 : atomic_load_explicit(info + matrix, memory_order_relaxed);
  const uint before = known <= p.first ? known : 0;
  const uint failed =
      factor_tiles<float>(tile, at, tiles, before, {factor, &inverses, below, kPanelTiles + kSliceTiles, &failure});
  if (slice == 0 && thread_index == 0) {
    if (p.first == 0 || (before == 0 && failed != 0))
      atomic_store_explicit(info + matrix, failed == 0 ? 0 : int(p.first + failed), memory_order_relaxed);
  }
  if (solves) {
    store_tile<float>(tile, {corner, p.l_row, p.l_column, p.l_vectors, rows, columns}, false);
  } else if (slice == 0) {
    device float* const to = factors + (ulong(matrix) * p.n + row) * CHOLESKY_PANEL + at.column * CHOLESKY_TILE;
    const uint access = p.l_vectors == CHOLESKY_ELEMENTS ? CHOLESKY_ELEMENTS : CHOLESKY_ROWS;
    store_tile<float>(tile, {to, CHOLESKY_PANEL, 1, access, rows, columns}, diagonal);
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
