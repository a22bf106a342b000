// Cholesky factorization of matrices that lie in the registers of a threadgroup: a thread holds a tile of T x T entries
// of the lower triangle, T columns of T / 4 float4. A column of tiles takes two barriers: the thread with the diagonal
// tile factors it, those below solve with its factor, and all on their right subtract the product of what those have.
#pragma once

#include <metal_stdlib>

#include "cholesky_pivot.h"

template <uint T>
struct CholeskyTile {
  float4 x[T][T / 4];
};

// Where a thread's tile is. The tiles of the triangle are counted down the columns, so that the threads which are done
// first are neighbours.
struct TilePlace {
  uint row, column;
};
inline TilePlace place_in_triangle(uint index, uint tiles) {
  uint column = 0;
  while (index >= tiles - column && column < tiles) {
    index -= tiles - column;
    ++column;
  }
  return {column + index, column};
}

// `rows` and `columns` are how many of the tile's are there; the others are those of the identity.
template <uint T>
inline void load_tile(thread CholeskyTile<T>& tile, device const float* from, int64_t row_stride,
                      int64_t column_stride, uint rows, uint columns, bool diagonal) {
#pragma unroll
  for (uint c = 0; c < T; ++c) {
#pragma unroll
    for (uint r = 0; r < T; ++r) {
      const bool there = r < rows && c < columns && (!diagonal || r >= c);
      tile.x[c][r / 4][r % 4] = there ? from[r * row_stride] : diagonal && r == c ? 1.0f : 0.0f;
    }
    from += column_stride;
  }
}

template <uint T>
inline void store_tile(thread const CholeskyTile<T>& tile, device float* to, int64_t row_stride, int64_t column_stride,
                       uint rows, uint columns, bool diagonal) {
#pragma unroll
  for (uint c = 0; c < T; ++c) {
#pragma unroll
    for (uint r = 0; r < T; ++r)
      if (r < rows && c < columns) to[r * row_stride] = diagonal && r < c ? 0.0f : tile.x[c][r / 4][r % 4];
    to += column_stride;
  }
}

// What a threadgroup shares: the diagonal tile's factor with the inverses of its diagonal, and the tiles below it.
template <uint T>
struct CholeskyShared {
  threadgroup float4* factor;  // T columns of T / 4
  threadgroup float* inverse;  // T
  threadgroup float4* below;   // T columns of `pitch`
  uint pitch;
  threadgroup uint* failed;
};

// Factors the tile, and shares it. 0, or the order of the tile's first leading minor that is not positive-definite.
template <uint FIRST, uint T>
inline uint factor_columns(thread CholeskyTile<T>& tile, thread const CholeskyShared<T>& shared, uint failed) {
#pragma unroll
  for (uint c = FIRST; c < FIRST + 4; ++c) {
    const float pivot = tile.x[c][c / 4][c % 4];
    if (failed == 0 && !is_pivot(pivot)) failed = c + 1;
    if (failed == 0) {
      const float inverse = metal::rsqrt(pivot);
      shared.inverse[c] = inverse;
#pragma unroll
      for (uint q = FIRST / 4; q < T / 4; ++q) {
        tile.x[c][q] *= inverse;
        shared.factor[c * (T / 4) + q] = tile.x[c][q];
      }
#pragma unroll
      for (uint s = FIRST; s < T; ++s) {
        if (s <= c) continue;
#pragma unroll
        for (uint q = FIRST / 4; q < T / 4; ++q)
          tile.x[s][q] = metal::fma(float4(-tile.x[c][s / 4][s % 4]), tile.x[c][q], tile.x[s][q]);
      }
      const float root = pivot * inverse;  // and a Newton step
      tile.x[c][c / 4][c % 4] = metal::fma(metal::fma(-root, root, pivot), 0.5f * inverse, root);
    }
  }
  return failed;
}

template <uint T>
inline uint factor_tile(thread CholeskyTile<T>& tile, thread const CholeskyShared<T>& shared) {
  const uint failed = factor_columns<0>(tile, shared, 0);
  return T == 4 ? failed : factor_columns<T - 4>(tile, shared, failed);
}

// tile = tile F⁻ᵀ for the shared factor F, and shares the result as tile `row`.
template <uint T>
inline void solve_tile(thread CholeskyTile<T>& tile, thread const CholeskyShared<T>& shared, uint row) {
#pragma unroll
  for (uint c = 0; c < T; ++c) {
    const float inverse = shared.inverse[c];
#pragma unroll
    for (uint q = 0; q < T / 4; ++q) {
      tile.x[c][q] *= inverse;
      shared.below[c * shared.pitch + row * (T / 4) + q] = tile.x[c][q];
    }
#pragma unroll
    for (uint s = 0; s < T; ++s) {
      if (s <= c) continue;
      const float factor = shared.factor[c * (T / 4) + s / 4][s % 4];
#pragma unroll
      for (uint q = 0; q < T / 4; ++q) tile.x[s][q] = metal::fma(float4(-factor), tile.x[c][q], tile.x[s][q]);
    }
  }
}

// tile -= (shared tile `row`) (shared tile `column`)ᵀ
template <uint T>
inline void update_tile(thread CholeskyTile<T>& tile, thread const CholeskyShared<T>& shared, uint row, uint column) {
#pragma unroll
  for (uint k = 0; k < T; ++k) {
    threadgroup const float4* const entries = shared.below + k * shared.pitch;
    float4 left[T / 4], right[T / 4];
#pragma unroll
    for (uint q = 0; q < T / 4; ++q) {
      left[q] = entries[row * (T / 4) + q];
      right[q] = entries[column * (T / 4) + q];
    }
#pragma unroll
    for (uint s = 0; s < T; ++s) {
#pragma unroll
      for (uint q = 0; q < T / 4; ++q)
        tile.x[s][q] = metal::fma(float4(-right[s / 4][s % 4]), left[q], tile.x[s][q]);
    }
  }
}

// Factors `tiles` columns of tiles; a thread without a tile has a column that is not among them. `failed` is not 0 where
// there is nothing to be done any more. Gives it back, or the order of the first leading minor that is not
// positive-definite; the columns from its own on, and rows below its tile, are then unfinished.
template <uint T>
inline uint factor_tiles(thread CholeskyTile<T>& tile, TilePlace at, uint tiles, uint failed,
                         thread const CholeskyShared<T>& shared) {
  for (uint k = 0; k < tiles; ++k) {
    if (at.column == k && at.row == k) {
      if (failed == 0) {
        const uint order = factor_tile(tile, shared);
        if (order != 0) failed = k * T + order;
      }
      *shared.failed = failed;
    }
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    failed = *shared.failed;
    if (failed == 0 && at.column == k && at.row > k) solve_tile(tile, shared, at.row);
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    if (failed == 0 && at.column > k && at.column < tiles) update_tile(tile, shared, at.row, at.column);
  }
  return failed;
}
