// Triangles of tiles, which are counted along their rows: row r begins at r (r + 1) / 2.
#pragma once

#include <metal_stdlib>

inline uint triangle_start(uint row) { return row * (row + 1) / 2; }

// The row of tile `index`. The square root is right except for a rounding up or down.
inline uint triangle_row(uint index) {
  uint row = uint((metal::sqrt(8.0f * float(index) + 1.0f) - 1.0f) * 0.5f);
  if (triangle_start(row) > index) --row;
  if (triangle_start(row + 1) <= index) ++row;
  return row;
}
