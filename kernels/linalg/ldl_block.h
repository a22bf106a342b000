// A diagonal block of D in A = L D Lᵀ or L D Lᴴ, of one or two rows, and division by it.
#pragma once

#include <metal_stdlib>

#include "scalars.h"

inline float reciprocal(float a) { return 1.0f / a; }
inline float2 reciprocal(float2 a) { return quotient(float2(1.0f, 0.0f), a); }

template <typename Number>
struct Pair {
  Number first, second;
};

template <typename Number>
struct Block {
  // The entries times `scale`, a power of two that keeps products of two of them normal. `inverse` is that of the
  // determinant, or of the only entry.
  Number first, below, right, second, inverse;
  float scale;
  bool is_pair;

  // D⁻¹ times a column with these entries, or with `from_right` a row times D⁻¹.
  Pair<Number> divide(Number x, Number y, bool from_right) thread const {
    if (!is_pair) return {times(inverse, x) * scale, Number(0.0f)};
    const Number of_first = from_right ? below : right, of_second = from_right ? right : below;
    return {times(inverse, add_product(times(second, x), -of_first, y)) * scale,
            times(inverse, add_product(times(first, y), -of_second, x)) * scale};
  }
};

// The block in rows k and, if there are two, k + 1.
template <typename Number, typename Rows>
inline Block<Number> block_at(Rows h, ulong row_stride, ulong column_stride, uint k, uint rows, bool hermitian) {
  const ulong at = k * (row_stride + column_stride);
  Block<Number> block;
  block.is_pair = rows == 2;
  block.scale = scale_to_one(size_of(h[at + (rows == 2 ? row_stride : 0)]));
  block.first = h[at] * block.scale;
  block.inverse = reciprocal(block.first);
  if (rows == 1) return block;
  block.below = h[at + row_stride] * block.scale;
  block.right = hermitian ? conjugate(block.below) : block.below;
  block.second = h[at + row_stride + column_stride] * block.scale;
  block.inverse = reciprocal(add_product(times(block.first, block.second), -block.below, block.right));
  return block;
}
