// Cholesky factorization of matrices in the registers of a threadgroup. A thread holds a tile of the lower triangle,
// four columns of four entries. A column of tiles takes two barriers: the thread with the diagonal tile factors it, the
// threads below solve with its factor, and all threads on their right subtract the product of the solved tiles.
#pragma once

#include <metal_stdlib>

#include "cholesky.h"
#include "cholesky_pivot.h"
#include "triangle.h"

struct CholeskyTile {
  float4 x[CHOLESKY_TILE];
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

// Missing entries are the identity's.
inline CholeskyTile load_tile(TileMemory<device const float*> from, bool diagonal) {
  CholeskyTile tile;
  if (from.access == CHOLESKY_ROWS && from.rows != 0) {
    float4 rows[4];
#pragma unroll
    for (uint r = 0; r < 4; ++r) rows[r] = *(device const float4*)(from.at + r * from.row);
#pragma unroll
    for (uint c = 0; c < 4; ++c) tile.x[c] = float4(rows[0][c], rows[1][c], rows[2][c], rows[3][c]);
  } else if (from.access == CHOLESKY_COLUMNS && from.rows != 0) {
#pragma unroll
    for (uint c = 0; c < 4; ++c) tile.x[c] = *(device const float4*)(from.at + c * from.column);
  } else {
#pragma unroll
    for (uint c = 0; c < 4; ++c) {
#pragma unroll
      for (uint r = 0; r < 4; ++r) {
        const bool there = r < from.rows && c < from.columns && (!diagonal || r >= c);
        tile.x[c][r] = there ? from.at[r * from.row] : diagonal && r == c ? 1.0f : 0.0f;
      }
      from.at += from.column;
    }
  }
  return tile;
}

// Writes zeros above the diagonal of a diagonal tile.
inline void store_tile(CholeskyTile tile, TileMemory<device float*> to, bool diagonal) {
  if (diagonal) {
#pragma unroll
    for (uint c = 1; c < 4; ++c) tile.x[c] = metal::select(tile.x[c], float4(0.0f), uint4(0, 1, 2, 3) < c);
  }
  if (to.access == CHOLESKY_ROWS) {
    if (to.rows == 0) return;
#pragma unroll
    for (uint r = 0; r < 4; ++r)
      *(device float4*)(to.at + r * to.row) = float4(tile.x[0][r], tile.x[1][r], tile.x[2][r], tile.x[3][r]);
  } else if (to.access == CHOLESKY_COLUMNS) {
    if (to.rows == 0) return;
#pragma unroll
    for (uint c = 0; c < 4; ++c) *(device float4*)(to.at + c * to.column) = tile.x[c];
  } else {
#pragma unroll
    for (uint c = 0; c < 4; ++c) {
#pragma unroll
      for (uint r = 0; r < 4; ++r)
        if (r < to.rows && c < to.columns) to.at[r * to.row] = tile.x[c][r];
      to.at += to.column;
    }
  }
}

// The data that a threadgroup shares: the diagonal tile's factor with the inverses of its diagonal, and the tiles below
// it.
struct CholeskyShared {
  threadgroup float4* factor;  // four columns, then the inverses
  threadgroup float4* below;   // four columns, `pitch` apart
  uint pitch;
  threadgroup uint* failed;
};

// Factors the tile. Gives 0, or the order of its first leading minor that is not positive-definite.
inline uint factor_tile(thread CholeskyTile& tile, thread float4& inverse) {
  uint failed = 0;
#pragma unroll
  for (uint c = 0; c < 4; ++c) {
    const float pivot = tile.x[c][c];
    if (failed == 0 && !is_pivot(pivot)) failed = c + 1;
    inverse[c] = metal::rsqrt(pivot);
    tile.x[c] *= inverse[c];
#pragma unroll
    for (uint s = 1; s < 4; ++s)
      if (s > c) tile.x[s] = metal::fma(float4(-tile.x[c][s]), tile.x[c], tile.x[s]);
    const float root = pivot * inverse[c];  // and a Newton step
    tile.x[c][c] = metal::fma(metal::fma(-root, root, pivot), 0.5f * inverse[c], root);
  }
  return failed;
}

inline CholeskyTile zero_tile() { return {{float4(0.0f), float4(0.0f), float4(0.0f), float4(0.0f)}}; }

// Makes the tile's columns from `first` on the identity's.
inline void end_tile(thread CholeskyTile& tile, uint first) {
#pragma unroll
  for (uint c = 0; c < 4; ++c)
    if (c >= first) tile.x[c] = metal::select(float4(0.0f), float4(1.0f), uint4(0, 1, 2, 3) == c);
}

inline void share_factor(CholeskyTile tile, float4 inverse, CholeskyShared shared) {
#pragma unroll
  for (uint c = 0; c < 4; ++c) shared.factor[c] = tile.x[c];
  shared.factor[4] = inverse;
}

// tile = tile F⁻ᵀ for the shared factor F, and shares the result as tile `row`.
inline void solve_tile(thread CholeskyTile& tile, CholeskyShared shared, uint row) {
  const float4 inverse = shared.factor[4];
#pragma unroll
  for (uint c = 0; c < 4; ++c) {
    const float4 factor = shared.factor[c];
    tile.x[c] *= inverse[c];
    shared.below[c * shared.pitch + row] = tile.x[c];
#pragma unroll
    for (uint s = 1; s < 4; ++s)
      if (s > c) tile.x[s] = metal::fma(float4(-factor[s]), tile.x[c], tile.x[s]);
  }
}

// tile -= (shared tile `row`) (shared tile `column`)ᵀ
inline void update_tile(thread CholeskyTile& tile, CholeskyShared shared, TilePlace at) {
#pragma unroll
  for (uint k = 0; k < 4; ++k) {
    const float4 left = shared.below[k * shared.pitch + at.row], right = shared.below[k * shared.pitch + at.column];
#pragma unroll
    for (uint s = 0; s < 4; ++s) tile.x[s] = metal::fma(float4(-right[s]), left, tile.x[s]);
  }
}

// Factors `tiles` columns of tiles. A thread without a tile has a column outside of them. Gives the order of the first
// leading minor that is not positive-definite; a `failed` that is not 0 is the order of an earlier one, and is given
// instead. The columns from there on become the identity's. A factor of zeros then makes the tiles below zeros, so all
// other tiles keep their values.
inline uint factor_tiles(thread CholeskyTile& tile, TilePlace at, uint tiles, uint failed, CholeskyShared shared) {
  for (uint k = 0; k < tiles; ++k) {
    if (at.column == k && at.row == k) {
      if (k > 0) failed = *shared.failed;
      float4 inverse;
      const uint order = factor_tile(tile, inverse);
      if (failed == 0 && order == 0) {
        share_factor(tile, inverse, shared);
      } else {
        share_factor(zero_tile(), float4(0.0f), shared);
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
