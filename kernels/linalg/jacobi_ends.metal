// The first and the last steps of blocked one-sided Jacobi: scaling into range, and columns with their padding; norms
// or Rayleigh quotients, and the vectors in their order.
#include <metal_stdlib>
using namespace metal;

#include "jacobi_tile.h"

constant constexpr uint kWide = 1024;            // threads that read a whole matrix
constant constexpr int kNotFinite = 0x7fffffff;  // stands in place of an exponent
constant constexpr float kNothing = 0x1p-30f;    // norms below count as zero

// Entry i of row j, scaled by the power of two that brings the matrix's largest entry into [1, 2).
inline float entry(device const float* a, constant JacobiParams& p, uint j, uint i) {
  const bool stored = p.symmetric == 0 || (p.symmetric == 1 ? i <= j : i >= j);
  return stored ? a[ulong(j) * p.rows + i] : a[ulong(i) * p.rows + j];
}

inline float scaled(float x, int exponent, int more) {
  return exponent == kNotFinite ? NAN : ldexp(x, more - exponent);
}

template <bool MAXIMUM>
inline float of_threadgroup(float value, threadgroup float* work, uint thread_index) {
  value = MAXIMUM ? simd_max(value) : simd_sum(value);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (thread_index % 32 == 0) work[thread_index / 32] = value;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return MAXIMUM ? simd_max(work[thread_index % 32]) : simd_sum(work[thread_index % 32]);
}

// The exponents of the matrices' largest entries, and shifts that make symmetric matrices well conditioned: with 1.5
// times the Frobenius norm, a matrix is at least half of that norm away from a singular one. A threadgroup takes one
// matrix.
[[kernel]] [[max_total_threads_per_threadgroup(kWide)]] void jacobi_scale(
    device const float* a [[buffer(0)]], device int* exponents [[buffer(1)]], device float* shifts [[buffer(2)]],
    device uint* off [[buffer(3)]], constant JacobiParams& p [[buffer(4)]],
    uint matrix [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup float work[32];
  a += ulong(matrix) * p.columns * p.rows;
  const uint lane = thread_index % 32;
  if (thread_index < p.sweeps) off[ulong(matrix) * p.sweeps + thread_index] = 0;

  float most = 0.0f, bad = 0.0f;
  for (uint j = thread_index / 32; j < p.columns; j += kWide / 32) {
    const uint first = p.symmetric == 2 ? j : 0, end = p.symmetric == 1 ? j + 1 : p.rows;
    for (uint i = first + lane; i < end; i += 32) {
      const float x = abs(a[ulong(j) * p.rows + i]);
      most = max(most, x);
      bad = isfinite(x) ? bad : 1.0f;
    }
  }
  most = of_threadgroup<true>(most, work, thread_index);
  bad = of_threadgroup<true>(bad, work, thread_index);
  const int exponent = bad > 0.0f ? kNotFinite : most > 0.0f ? ilogb(most) : 0;

  float squares = 0.0f;
  const uint symmetric_columns = p.symmetric == 0 ? 0 : p.columns;
  for (uint j = thread_index / 32; j < symmetric_columns; j += kWide / 32) {
    const uint first = p.symmetric == 2 ? j : 0, end = p.symmetric == 1 ? j + 1 : p.rows;
    for (uint i = first + lane; i < end; i += 32) {
      const float x = scaled(a[ulong(j) * p.rows + i], exponent, 0);
      squares = fma(x * (i == j ? 1.0f : 2.0f), x, squares);
    }
  }
  squares = of_threadgroup<false>(squares, work, thread_index);
  if (thread_index == 0) {
    exponents[matrix] = exponent;
    shifts[matrix] = most > 0.0f ? 1.5f * precise::sqrt(squares) : 1.0f;
  }
}

// Makes the working columns. A threadgroup takes one column.
[[kernel]] void jacobi_load(device const float* a [[buffer(0)]], device const int* exponents [[buffer(1)]],
                            device const float* shifts [[buffer(2)]], device float* x [[buffer(3)]],
                            constant JacobiParams& p [[buffer(4)]], uint group [[threadgroup_position_in_grid]],
                            uint thread_index [[thread_index_in_threadgroup]],
                            uint threads [[threads_per_threadgroup]]) {
  const uint j = group % p.padded, matrix = group / p.padded;
  a += ulong(matrix) * p.columns * p.rows;
  x += ulong(group) * p.length;
  for (uint i = thread_index; i < p.length; i += threads) {
    float value = 0.0f;
    if (i >= p.gram_rows) {
      value = i - p.gram_rows == j ? 1.0f : 0.0f;
    } else if (j < p.columns && i < p.rows) {
      value = scaled(entry(a, p, j, i), exponents[matrix], p.symmetric == 0 ? JACOBI_SCALE : 0);
      if (p.symmetric != 0 && i == j) value += shifts[matrix];
    }
    x[i] = value;
  }
}

// The sum of squares of a column's entries from `first` up to `end`, which a simdgroup computes.
inline float squares_of(device const float* column, uint first, uint end, uint lane) {
  float squares = 0.0f;
  for (uint i = first + lane; i < end; i += 32) squares = fma(column[i], column[i], squares);
  return simd_sum(squares);
}

// The norms of the working columns, the lengths of V's columns, and the values: singular values, or sums of the parts
// of Rayleigh quotients. A simdgroup takes one column. Rounding makes each product with a rotation a little longer or
// shorter on average, V's columns by the same factor as the others, so a singular value is the quotient of the two.
[[kernel]] void jacobi_values(device const float* x [[buffer(0)]], device const float* parts [[buffer(1)]],
                              device float* norms [[buffer(2)]], device float* values [[buffer(3)]],
                              device float* lengths [[buffer(4)]], constant JacobiResultParams& p [[buffer(5)]],
                              uint group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_threadgroup]]) {
  const uint matrix = group / p.jacobi.padded, j = group % p.jacobi.padded;
  device const float* const column = x + ulong(group) * p.jacobi.length;
  const float squares = squares_of(column, 0, p.jacobi.rows, lane), norm = precise::sqrt(squares);
  float value = norm;
  if (p.accumulated != 0) {
    const float length =
        precise::sqrt(squares_of(column, p.jacobi.gram_rows, p.jacobi.gram_rows + p.jacobi.columns, lane));
    value /= length;
    if (lane == 0) lengths[group] = length;
  }
  if (p.jacobi.symmetric != 0) {
    float sum = 0.0f;
    for (uint tile = lane; tile < p.tiles; tile += 32)
      sum += parts[(ulong(matrix) * p.tiles + tile) * p.jacobi.padded + j];
    value = simd_sum(sum) / squares;
  }
  if (lane == 0) {
    norms[group] = norm;
    values[group] = value;
  }
}

// The parts of xᵀAx: a threadgroup takes 32 rows of A and 32 columns x.
constant constexpr uint kRows = 64;  // rows of the products' chunks

[[kernel]] [[max_total_threads_per_threadgroup(JACOBI_THREADS)]] void jacobi_rayleigh(
    device const float* a [[buffer(0)]], device const int* exponents [[buffer(1)]], device const float* x [[buffer(2)]],
    device float* parts [[buffer(3)]], constant JacobiResultParams& p [[buffer(4)]],
    uint group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  typedef Chunk<kRows> C;
  constexpr uint kEach = JACOBI_PAIR * kRows / JACOBI_THREADS;
  threadgroup float4 left[C::kSize], right[C::kSize];
  threadgroup float product[kProductSize];
  const uint lane = thread_index % 32, simdgroup = thread_index / 32;
  const uint across = p.jacobi.padded / JACOBI_PAIR;
  const uint index = p.first_tile + group / across, tile = index % p.tiles, matrix = index / p.tiles;
  const uint row = tile * JACOBI_PAIR, first = group % across * JACOBI_PAIR;
  const int exponent = exponents[matrix];
  a += ulong(matrix) * p.jacobi.columns * p.jacobi.rows;
  x += (ulong(matrix) * p.jacobi.padded + first) * p.jacobi.length;
  ProductPart part;
  clear(part);
  for (uint base = 0; base < p.jacobi.rows; base += kRows) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
    for (uint i = 0; i < kEach; ++i) {
      const uint at = i * JACOBI_THREADS + thread_index, c = at / kRows, r = at % kRows;
      const bool has_row = base + r < p.jacobi.rows;
      ((threadgroup float*)left)[c * (4 * C::kStride) + r] =
          has_row && row + c < p.jacobi.rows ? scaled(entry(a, p.jacobi, row + c, base + r), exponent, 0) : 0.0f;
      ((threadgroup float*)right)[c * (4 * C::kStride) + r] = has_row ? x[ulong(c) * p.jacobi.length + base + r] : 0.0f;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    multiply<kRows>(part, left, right, lane, simdgroup);
  }
  add_parts(part, (threadgroup float*)left, (threadgroup float*)right, product, thread_index);
  if (simdgroup == 0) {
    float sum = 0.0f;
    for (uint i = 0; i < JACOBI_PAIR; ++i)
      if (row + i < p.jacobi.rows)
        sum = fma(product[i * kProductStride + lane], x[ulong(lane) * p.jacobi.length + row + i], sum);
    parts[(ulong(matrix) * p.tiles + tile) * p.jacobi.padded + first + lane] = sum;
  }
}

// Stores values and vectors at their places: eigenvalues ascending, singular values descending. A threadgroup takes one
// column. If columns are zero, U gets `present` vectors, and a later kernel makes the rest. Entry i of U's vectors
// belongs at order[i], except for a symmetric matrix: its vectors are columns and keep their order.
[[kernel]] [[max_total_threads_per_threadgroup(JACOBI_THREADS)]] void jacobi_store(
    device const float* x [[buffer(0)]], device const int* exponents [[buffer(1)]],
    device const float* norms [[buffer(2)]], device const float* values [[buffer(3)]],
    device float* sorted [[buffer(4)]], device float* u [[buffer(5)]], device float* v [[buffer(6)]],
    device uint* present [[buffer(7)]], device const uint* order [[buffer(8)]],
    device const float* lengths [[buffer(9)]], constant JacobiResultParams& p [[buffer(10)]],
    device const float* scales [[buffer(11)]], uint group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup uint counts[2][JACOBI_THREADS / 32];
  const uint columns = p.jacobi.columns, rows = p.jacobi.rows;
  const uint matrix = group / columns, j = group % columns, at_work = matrix * p.jacobi.padded + j;
  const int exponent = exponents[matrix];
  const bool symmetric = p.jacobi.symmetric != 0, finite = exponent != kNotFinite;
  norms += ulong(matrix) * p.jacobi.padded;
  values += ulong(matrix) * p.jacobi.padded;
  const float norm = norms[j], value = values[j];
  uint before = 0, count = 0;
  for (uint i = thread_index; i < columns; i += JACOBI_THREADS) {
    const float other = values[i];
    const bool ahead = symmetric ? other < value : other > value, behind = symmetric ? other > value : other < value;
    before += ahead || (!behind && i < j) ? 1 : 0;
    count += norms[i] < kNothing ? 0 : 1;
  }
  before = simd_sum(before);
  count = simd_sum(count);
  if (thread_index % 32 == 0) {
    counts[0][thread_index / 32] = before;
    counts[1][thread_index / 32] = count;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  uint rank = 0, nonzero = 0;
#pragma unroll
  for (uint i = 0; i < JACOBI_THREADS / 32; ++i) rank += counts[0][i], nonzero += counts[1][i];

  if (thread_index == 0) {
    const float whole = ldexp(value, symmetric ? exponent : exponent - JACOBI_SCALE);
    const float scale = p.scaled != 0 ? scales[matrix] : 1.0f;
    sorted[ulong(matrix) * columns + rank] = !finite ? NAN : !symmetric && value < kNothing ? 0.0f : whole / scale;
    if (j == 0) present[matrix] = nonzero;
  }
  if (p.vectors == 0) return;
  device const float* const column = x + ulong(at_work) * p.jacobi.length;
  const ulong one = ulong(matrix) * columns;
  u += symmetric ? one * rows + rank : (one + rank) * rows;  // a column of the result, or a row
  order += ulong(matrix) * rows;
  for (uint i = thread_index; i < rows; i += JACOBI_THREADS)
    u[symmetric ? i * columns : order[i]] = norm < kNothing ? 0.0f : column[i] / norm;
  if (p.accumulated == 0) return;
  const float length = lengths[at_work];
  for (uint i = thread_index; i < columns; i += JACOBI_THREADS)
    v[(one + rank) * columns + i] = finite ? column[p.jacobi.gram_rows + i] / length : NAN;
}
