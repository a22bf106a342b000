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

// What a number is divided by, as an inverse from (1/2, 1] and a power of two: both products of a division are in range
// where the quotient is, which its product with 1/value need not be.
inline float2 divisor(float value) {
  const float scale = scale_to_one(metal::abs(value));
  return float2(1.0f / (value * scale), scale);
}
template <typename V>
inline V divide(V value, float2 by) {
  return (value * by.x) * by.y;
}

enum class Part { all, triangle };  // of a tile: everything, or a diagonal block of L

// ROWS x COLUMNS elements, with zeros around what the matrix has. Four at a time come from device memory, and threads
// with neighbouring `at` read neighbouring memory: by rows the four are a quad, else they are in one row.
template <uint ROWS, uint COLUMNS>
struct Tile {
  static constexpr constant uint kQuads = ROWS / 4;
  static constexpr constant uint kPitch = kQuads + 1;  // odd: quads of neighbouring columns are in different banks
  static constexpr constant uint kSize = COLUMNS * kPitch;
  static constexpr constant uint kFours = COLUMNS * kQuads;

  template <Part PART>
  static float4 fetch(device const float* corner, constant StridedMatrices& m, uint rows, uint columns, uint at) {
    const uint row = m.by_rows ? at / COLUMNS * 4 : at % ROWS;
    const uint column = m.by_rows ? at % COLUMNS : at / ROWS * 4;
    float4 four;
#pragma unroll
    for (uint e = 0; e < 4; ++e) {
      const uint i = m.by_rows ? row + e : row, j = m.by_rows ? column : column + e;
      const bool there = i < rows && j < columns && (PART == Part::all || i >= j);
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

  // Of a diagonal block that all threads see: the divisor of row and column j goes behind the column.
  static void make_divisor(threadgroup float4* tile, uint j, bool unit) {
    threadgroup float4* const column = tile + j * kPitch;
    const float2 by = unit ? float2(1.0f) : divisor(((threadgroup const float*)column)[j]);
    column[kQuads] = float4(by, 0.0f, 0.0f);
  }
};

// A thread's column of a matrix, as quads of rows. What is done with one quad after the other is unrolled by recursion,
// since the registers' indices have to be constants however large the loop's body is.
template <uint QUADS, uint K = 0>
struct Column {
  // A column of B becomes one of X, by the triangle in `tile`.
  static void substitute(thread float4 (&x)[QUADS], threadgroup const float4* tile) {
#pragma unroll
    for (uint e = 0; e < 4; ++e) {
      threadgroup const float4* const l = tile + (4 * K + e) * (QUADS + 1);
      const float solved = divide(x[K][e], l[QUADS].xy);
      const float4 rest = metal::fma(-l[K], float4(solved), x[K]);
      x[K] = metal::select(x[K], rest, uint4(0, 1, 2, 3) > e);
      x[K][e] = solved;
#pragma unroll
      for (uint q = K + 1; q < QUADS; ++q) x[q] = metal::fma(-l[q], float4(solved), x[q]);
    }
    Column<QUADS, K + 1>::substitute(x, tile);
  }

  // x -= L times `solved`, with the square L in `tile`.
  static void subtract_product(thread float4 (&x)[QUADS], threadgroup const float4* tile,
                               thread const float4 (&solved)[QUADS]) {
#pragma unroll
    for (uint e = 0; e < 4; ++e) {
#pragma unroll
      for (uint q = 0; q < QUADS; ++q)
        x[q] = metal::fma(-tile[(4 * K + e) * (QUADS + 1) + q], float4(solved[K][e]), x[q]);
    }
    Column<QUADS, K + 1>::subtract_product(x, tile, solved);
  }

  static void load(thread float4 (&x)[QUADS], device const float* from, long stride, uint rows) {
#pragma unroll
    for (uint e = 0; e < 4; ++e) x[K][e] = 4 * K + e < rows ? from[(4 * K + e) * stride] : 0.0f;
    Column<QUADS, K + 1>::load(x, from, stride, rows);
  }

  static void store(thread const float4 (&x)[QUADS], device float* to, long stride, uint rows) {
#pragma unroll
    for (uint e = 0; e < 4; ++e)
      if (4 * K + e < rows) to[(4 * K + e) * stride] = x[K][e];
    Column<QUADS, K + 1>::store(x, to, stride, rows);
  }
};

template <uint QUADS>
struct Column<QUADS, QUADS> {
  static void substitute(thread float4 (&)[QUADS], threadgroup const float4*) {}
  static void subtract_product(thread float4 (&)[QUADS], threadgroup const float4*, thread const float4 (&)[QUADS]) {}
  static void load(thread float4 (&)[QUADS], device const float*, long, uint) {}
  static void store(thread const float4 (&)[QUADS], device float*, long, uint) {}
};

// Substitution where each lane of N has a row of B, `row`: V is one column or several, and `by` that row's divisor.
template <uint N, typename V>
inline V substitute_rows(V x, threadgroup const float4* tile, float2 by, uint order, uint row, uint lane) {
  threadgroup const float* const l = (threadgroup const float*)tile + row;
  for (uint j = 0; j < order; ++j) {
    const V quotient = divide(x, by);
    const V solved = metal::simd_shuffle(quotient, lane - row + j);
    x = row == j ? quotient : (row > j ? metal::fma(V(-l[j * 4 * Tile<N, N>::kPitch]), solved, x) : x);
  }
  return x;
}

// Up to TRIANGULAR_FEW columns of a row: one, or as many as a vector has.
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
