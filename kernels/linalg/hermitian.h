// Hermitian matrices that are given by one triangle.
#pragma once

#include <metal_stdlib>

// Entry (row, column) of a Hermitian matrix, from the one that its lower triangle has. With `conjugated` this is the
// transpose of the upper triangle.
inline float of_triangle(float a, uint, uint, uint) { return a; }
inline float2 of_triangle(float2 a, uint row, uint column, uint conjugated) {
  return float2(a.x, row == column ? 0.0f : (row > column) == (conjugated != 0) ? -a.y : a.y);
}
