// What kernels of Hermitian matrices share: entries of matrices that are given by one triangle, triangles of tiles, and
// the pivots of Cholesky factorizations.
#pragma once

#include <metal_stdlib>

// Entry (row, column) of a Hermitian matrix, from the one that its lower triangle has. With `conjugated` this is the
// transpose of the upper triangle.
inline float of_triangle(float a, uint, uint, uint) { return a; }
inline float2 of_triangle(float2 a, uint row, uint column, uint conjugated) {
  return float2(a.x, row == column ? 0.0f : (row > column) == (conjugated != 0) ? -a.y : a.y);
}

// Tiles of a triangle are counted along their rows: row r begins at r (r + 1) / 2.
inline uint triangle_start(uint row) { return row * (row + 1) / 2; }

// The row of tile `index`. The square root is right except for a rounding up or down.
inline uint triangle_row(uint index) {
  uint row = uint((metal::sqrt(8.0f * float(index) + 1.0f) - 1.0f) * 0.5f);
  if (triangle_start(row) > index) --row;
  if (triangle_start(row + 1) <= index) ++row;
  return row;
}

// Whether a value is positive and finite.
inline bool is_pivot(float value) { return value > 0.0f && value < INFINITY; }
