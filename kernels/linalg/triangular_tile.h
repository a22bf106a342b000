// Pieces of matrices of any strides in threadgroup memory, as quads of neighbouring rows, column by column.
#pragma once

#include <metal_stdlib>

#include "fours.h"
#include "triangular.h"

template <typename Pointer>
inline Pointer matrix_at(Pointer elements, constant StridedMatrices& m, uint matrix) {
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

// A complex number's: the inverse of the rest, and then the power of two.
inline float4 divisor(float2 value) {
  const float scale = scale_to_one(size_of(value));
  const float2 scaled = value * scale;
  return float4(conjugate(scaled) / add_square(0.0f, scaled), scale, 0.0f);
}
inline float2 divide(float2 value, float4 by) { return times(value * by.z, by.xy); }
inline Complex4 divide(Complex4 value, float4 by) { return times(scaled_by(value, by.z), by.xy); }

// Divisors as they are in threadgroup memory.
inline float4 packed(float2 by) { return float4(by, 0.0f, 0.0f); }
inline Complex4 packed(float4 by) { return {by, float4(0.0f)}; }
inline float2 unpacked(float4 by) { return by.xy; }
inline float4 unpacked(Complex4 by) { return by.re; }

// x - a b, in which a's fours take the sign.
inline float4 minus_product(float4 x, float4 a, float b) { return metal::fma(-a, float4(b), x); }
inline Complex4 minus_product(Complex4 x, Complex4 a, float2 b) { return minus_product(x, b, a); }

// ROWS x COLUMNS elements, with zeros outside of the matrix. They are loaded four at a time, and threads with
// neighbouring `at` read neighbouring memory. With by_rows the four are a quad, else they are in one row. Nothing is
// read above the diagonal of a `triangle`.
template <uint ROWS, uint COLUMNS, typename T = float>
struct Tile {
  typedef typename FourOf<T>::Type Four;
  static constexpr constant uint kQuads = ROWS / 4;
  static constexpr constant uint kPitch = kQuads + 1;  // odd: quads of neighbouring columns are in different banks
  static constexpr constant uint kSize = COLUMNS * kPitch;
  static constexpr constant uint kFours = COLUMNS * kQuads;

  static Four fetch(device const T* corner, constant StridedMatrices& m, uint rows, uint columns, uint at,
                    bool triangle = false) {
    const uint row = m.by_rows ? at / COLUMNS * 4 : at % ROWS;
    const uint column = m.by_rows ? at % COLUMNS : at / ROWS * 4;
    Four four;
#pragma unroll
    for (uint e = 0; e < 4; ++e) {
      const uint i = m.by_rows ? row + e : row, j = m.by_rows ? column : column + e;
      const bool there = i < rows && j < columns && (!triangle || i >= j);
      set_entry(four, e, there ? corner[i * m.row + j * m.column] : T(0.0f));
    }
    return four;
  }

  static void store(threadgroup Four* tile, Four four, constant StridedMatrices& m, uint at) {
    if (m.by_rows) {
      tile[at % COLUMNS * kPitch + at / COLUMNS] = four;
    } else {
      const uint first = at / ROWS * 16 * kPitch + at % ROWS;
#pragma unroll
      for (uint e = 0; e < 4; ++e) put(tile + e * kPitch, first, entry(four, e));
    }
  }

  // Makes the divisor of row and column j of a diagonal block, and puts it behind the column. All threads see the
  // block.
  static void make_divisor(threadgroup Four* tile, uint j, bool unit) {
    threadgroup Four* const column = tile + j * kPitch;
    column[kQuads] = packed(divisor(unit ? number<T>(1.0f) : taken(column, j)));
  }
};

// Solves for a thread's column of X, as quads of rows, in the place of B's, by the triangle in `tile`.
template <typename Four, uint QUADS>
inline void substitute(thread Four (&x)[QUADS], threadgroup const Four* tile) {
#pragma unroll
  for (uint k = 0; k < QUADS; ++k) {
#pragma unroll
    for (uint e = 0; e < 4; ++e) {
      threadgroup const Four* const l = tile + (4 * k + e) * (QUADS + 1);
      const auto solved = divide(entry(x[k], e), unpacked(l[QUADS]));
      x[k] = choose(x[k], minus_product(x[k], l[k], solved), uint4(0, 1, 2, 3) > e);
      set_entry(x[k], e, solved);
#pragma unroll
      for (uint q = k + 1; q < QUADS; ++q) x[q] = minus_product(x[q], l[q], solved);
    }
  }
}

// x -= L times `solved`, for the square L in `tile`.
template <typename Four, uint QUADS>
inline void subtract_product(thread Four (&x)[QUADS], threadgroup const Four* tile, thread Four (&solved)[QUADS]) {
#pragma unroll
  for (uint k = 0; k < QUADS; ++k) {
#pragma unroll
    for (uint e = 0; e < 4; ++e) {
#pragma unroll
      for (uint q = 0; q < QUADS; ++q)
        x[q] = minus_product(x[q], tile[(4 * k + e) * (QUADS + 1) + q], entry(solved[k], e));
    }
  }
}

// Loads and stores such columns, with zeros beyond `rows`.
template <typename Four, typename T, uint QUADS>
inline void load_rows(thread Four (&x)[QUADS], device const T* from, long stride, uint rows) {
#pragma unroll
  for (uint i = 0; i < 4 * QUADS; ++i) set_entry(x[i / 4], i % 4, i < rows ? from[i * stride] : T(0.0f));
}
template <typename Four, typename T, uint QUADS>
inline void store_rows(thread Four (&x)[QUADS], device T* to, long stride, uint rows) {
#pragma unroll
  for (uint i = 0; i < 4 * QUADS; ++i)
    if (i < rows) to[i * stride] = entry(x[i / 4], i % 4);
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
