// Pieces of matrices of any strides in threadgroup memory, as quads of neighbouring rows, column by column.
#pragma once

#include <metal_stdlib>

#include "householder.h"
#include "triangular.h"

inline device const float* matrix_at(device const float* elements, constant StridedMatrices& m, uint matrix) {
  return elements + (m.first + matrix * m.batch);
}
inline device float* matrix_at(device float* elements, constant StridedMatrices& m, uint matrix) {
  return elements + (m.first + matrix * m.batch);
}

// A divisor as a power of two and the inverse of the rest. The first product of a division by it is the quotient to a
// factor of four, so that no product vanishes, as 1/value itself might.
inline float2 divisor(float value) {
  const float scale = scale_to_one(metal::abs(value));
  return float2(scale, 1.0f / (value * scale));
}
template <typename V>
inline V divide(V value, float2 by) {
  return (value * by.x) * by.y;
}

// ROWS x COLUMNS elements, with zeros outside of the matrix. They are loaded four at a time, and threads with
// neighbouring `at` read neighbouring memory. With by_rows the four are a quad, else they are in one row. Nothing is
// read above the diagonal of a `triangle`.
template <uint ROWS, uint COLUMNS>
struct Tile {
  static constexpr constant uint kQuads = ROWS / 4;
  static constexpr constant uint kPitch = kQuads + 1;  // odd: quads of neighbouring columns are in different banks
  static constexpr constant uint kSize = COLUMNS * kPitch;
  static constexpr constant uint kFours = COLUMNS * kQuads;

  static float4 fetch(device const float* corner, constant StridedMatrices& m, uint rows, uint columns, uint at,
                      bool triangle = false) {
    const uint row = m.by_rows ? at / COLUMNS * 4 : at % ROWS;
    const uint column = m.by_rows ? at % COLUMNS : at / ROWS * 4;
    float4 four;
#pragma unroll
    for (uint e = 0; e < 4; ++e) {
      const uint i = m.by_rows ? row + e : row, j = m.by_rows ? column : column + e;
      const bool there = i < rows && j < columns && (!triangle || i >= j);
      four[e] = there ? corner[i * m.row + j * m.column] : 0.0f;
    }
    return four;
  }

  static void store(threadgroup float4* tile, float4 four, constant StridedMatrices& m, uint at) {
    if (m.by_rows) {
      tile[at % COLUMNS * kPitch + at / COLUMNS] = four;
    } else {
      threadgroup float* const to = (threadgroup float*)tile + at / ROWS * 16 * kPitch + at % ROWS;
#pragma unroll
      for (uint e = 0; e < 4; ++e) to[e * 4 * kPitch] = four[e];
    }
  }

  // Makes the divisor of row and column j of a diagonal block, and puts it behind the column. All threads see the
  // block.
  static void make_divisor(threadgroup float4* tile, uint j, bool unit) {
    threadgroup float4* const column = tile + j * kPitch;
    const float2 by = unit ? float2(1.0f) : divisor(((threadgroup const float*)column)[j]);
    column[kQuads] = float4(by, 0.0f, 0.0f);
  }
};

// Solves for a thread's column of X, as quads of rows, in the place of B's, by the triangle in `tile`.
template <uint QUADS>
inline void substitute(thread float4 (&x)[QUADS], threadgroup const float4* tile) {
#pragma unroll
  for (uint k = 0; k < QUADS; ++k) {
#pragma unroll
    for (uint e = 0; e < 4; ++e) {
      threadgroup const float4* const l = tile + (4 * k + e) * (QUADS + 1);
      const float solved = divide(x[k][e], l[QUADS].xy);
      const float4 rest = metal::fma(-l[k], float4(solved), x[k]);
      x[k] = metal::select(x[k], rest, uint4(0, 1, 2, 3) > e);
      x[k][e] = solved;
#pragma unroll
      for (uint q = k + 1; q < QUADS; ++q) x[q] = metal::fma(-l[q], float4(solved), x[q]);
    }
  }
}

// x -= L times `solved`, for the square L in `tile`.
template <uint QUADS>
inline void subtract_product(thread float4 (&x)[QUADS], threadgroup const float4* tile,
                             thread float4 (&solved)[QUADS]) {
#pragma unroll
  for (uint k = 0; k < QUADS; ++k) {
#pragma unroll
    for (uint e = 0; e < 4; ++e) {
#pragma unroll
      for (uint q = 0; q < QUADS; ++q)
        x[q] = metal::fma(-tile[(4 * k + e) * (QUADS + 1) + q], float4(solved[k][e]), x[q]);
    }
  }
}

// Loads and stores such columns, with zeros beyond `rows`.
template <uint QUADS>
inline void load_rows(thread float4 (&x)[QUADS], device const float* from, long stride, uint rows) {
#pragma unroll
  for (uint i = 0; i < 4 * QUADS; ++i) x[i / 4][i % 4] = i < rows ? from[i * stride] : 0.0f;
}
template <uint QUADS>
inline void store_rows(thread float4 (&x)[QUADS], device float* to, long stride, uint rows) {
#pragma unroll
  for (uint i = 0; i < 4 * QUADS; ++i)
    if (i < rows) to[i * stride] = x[i / 4][i % 4];
}

// Substitution where each of N lanes has a row of B, `row`. V is one column or several, and `by` is the row's divisor.
template <uint N, typename V>
inline V substitute_rows(V x, threadgroup const float4* tile, float2 by, uint order, uint row, uint lane) {
  threadgroup const float* const l = (threadgroup const float*)tile + row;
  for (uint first = 0; first < order; first += 8) {
#pragma unroll
    for (uint e = 0; e < 8; ++e) {
      const uint j = first + e;
      const V solved = metal::simd_shuffle(divide(x, by), lane - row + j);
      const V rest = metal::fma(V(-l[j * 4 * Tile<N, N>::kPitch]), solved, x);
      x = row > j ? rest : x;
    }
  }
  return divide(x, by);
}

// Loads up to TRIANGULAR_FEW columns of a row: one, or as many as a vector has.
inline void load_columns(thread float& value, device const float* row, long, uint) { value = *row; }
inline void load_columns(thread float4& value, device const float* row, long stride, uint columns) {
#pragma unroll
  for (uint c = 0; c < TRIANGULAR_FEW; ++c) value[c] = c < columns ? row[c * stride] : 0.0f;
}
inline void store_columns(float value, device float* row, long, uint) { *row = value; }
inline void store_columns(float4 value, device float* row, long stride, uint columns) {
#pragma unroll
  for (uint c = 0; c < TRIANGULAR_FEW; ++c)
    if (c < columns) row[c * stride] = value[c];
}
