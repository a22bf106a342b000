// Cholesky factorization of matrices that lie in the registers of a threadgroup: a thread holds a tile of the lower
// triangle, four columns of four entries. A column of tiles takes two barriers: the thread with the diagonal tile
// factors it, those below solve with its factor, and all on their right subtract the product of what those have.
#pragma once

#include <metal_stdlib>

#include "cholesky.h"
#include "cholesky_pivot.h"
#include "triangle.h"

struct CholeskyTile {
  float4 x[CHOLESKY_TILE];
};

// Where a thread's tile is.
struct TilePlace {
  uint row, column;
};

// Of the tiles of a triangle, counted down the columns, so that the threads which are done first are neighbours.
// Threads beyond the last have no column of the triangle.
inline TilePlace place_in_triangle(uint index, uint tiles) {
  const uint count = triangle_start(tiles);
  if (index >= count) return {tiles, tiles};
  const uint back = count - 1 - index, row = triangle_row(back);
  return {tiles - 1 - (back - triangle_start(row)), tiles - 1 - row};
}

// Where a tile lies in memory, and how many of its rows and columns there are.
template <typename Pointer>
struct TileMemory {
  Pointer at;
  int64_t row, column;  // strides
  uint vectors;         // as of cholesky.h; only where all rows and columns are there
  uint rows, columns;
};

// Entries that are not there are the identity's.
inline CholeskyTile load_tile(TileMemory<device const float*> from, bool diagonal) {
  CholeskyTile tile;
  if (from.vectors == CHOLESKY_ROWS && from.rows != 0) {
    float4 rows[4];
#pragma unroll
    for (uint r = 0; r < 4; ++r) rows[r] = *(device const float4*)(from.at + r * from.row);
#pragma unroll
    for (uint c = 0; c < 4; ++c) tile.x[c] = float4(rows[0][c], rows[1][c], rows[2][c], rows[3][c]);
  } else if (from.vectors == CHOLESKY_COLUMNS && from.rows != 0) {
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

// Zeros above the diagonal of a diagonal tile.
inline void store_tile(CholeskyTile tile, TileMemory<device float*> to, bool diagonal) {
  if (diagonal) {
#pragma unroll
    for (uint c = 1; c < 4; ++c) tile.x[c] = metal::select(tile.x[c], float4(0.0f), uint4(0, 1, 2, 3) < c);
  }
  if (to.vectors == CHOLESKY_ROWS) {
    if (to.rows == 0) return;
#pragma unroll
    for (uint r = 0; r < 4; ++r)
      *(device float4*)(to.at + r * to.row) = float4(tile.x[0][r], tile.x[1][r], tile.x[2][r], tile.x[3][r]);
  } else if (to.vectors == CHOLESKY_COLUMNS) {
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

// What a threadgroup shares: the diagonal tile's factor with the inverses of its diagonal, and the tiles below it.
struct CholeskyShared {
  threadgroup float4* factor;  // four columns, and the inverses
  threadgroup float4* below;   // four columns of `pitch`
  uint pitch;
  threadgroup uint* failed;
};

// Factors the tile. 0, or the order of its first leading minor that is not positive-definite.
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

// The tile's columns from `first` on become the identity's.
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

// Factors `tiles` columns of tiles; a thread without a tile has a column that is not among them. Gives the order of the
// first leading minor that is not positive-definite, or `failed` where that is not 0, which is that of an earlier one.
// The columns from there on become the identity's; a factor of zeros then leaves nothing of the tiles below, and so all
// others as they are.
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
