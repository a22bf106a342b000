// The first and the last steps of blocked one-sided Jacobi: scaling into range, and columns with their padding; norms,
// and the vectors in their order.
#include <metal_stdlib>
using namespace metal;

#include "spectral.h"

constant constexpr uint kWide = 1024;            // threads that read a whole matrix
constant constexpr int kNotFinite = 0x7fffffff;  // stands in place of an exponent
constant constexpr float kNothing = 0x1p-30f;    // norms below count as zero

inline float largest_of_threadgroup(float value, threadgroup float* work, uint thread_index) {
  value = simd_max(value);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (thread_index % 32 == 0) work[thread_index / 32] = value;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return simd_max(work[thread_index % 32]);
}

// The exponents of the matrices' largest entries. A threadgroup takes one matrix.
[[kernel]] [[max_total_threads_per_threadgroup(kWide)]] void jacobi_scale(
    device const float* a [[buffer(0)]], device int* exponents [[buffer(1)]], device uint* off [[buffer(2)]],
    constant JacobiParams& p [[buffer(3)]], uint matrix [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup float work[32];
  a += ulong(matrix) * p.columns * p.rows;
  const uint lane = thread_index % 32;
  if (thread_index < p.sweeps) off[ulong(matrix) * p.sweeps + thread_index] = 0;

  float most = 0.0f, bad = 0.0f;
  for (uint j = thread_index / 32; j < p.columns; j += kWide / 32) {
    for (uint i = lane; i < p.rows; i += 32) {
      const float x = abs(a[ulong(j) * p.rows + i]);
      most = max(most, x);
      bad = isfinite(x) ? bad : 1.0f;
    }
  }
  most = largest_of_threadgroup(most, work, thread_index);
  bad = largest_of_threadgroup(bad, work, thread_index);
  if (thread_index == 0) exponents[matrix] = bad > 0.0f ? kNotFinite : most > 0.0f ? ilogb(most) : 0;
}

// Makes the working columns. A threadgroup takes one column.
[[kernel]] void jacobi_load(device const float* a [[buffer(0)]], device const int* exponents [[buffer(1)]],
                            device float* x [[buffer(2)]], constant JacobiParams& p [[buffer(3)]],
                            uint group [[threadgroup_position_in_grid]],
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
      const int exponent = exponents[matrix];
      value = exponent == kNotFinite ? NAN : ldexp(a[ulong(j) * p.rows + i], JACOBI_SCALE - exponent);
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

// The norms of the working columns, the lengths of V's columns, and the singular values. A simdgroup takes one column.
// Rounding makes each product with a rotation a little longer or shorter on average, V's columns by the same factor as
// the others, so a singular value is the quotient of the two.
[[kernel]] void jacobi_values(device const float* x [[buffer(0)]], device float* norms [[buffer(1)]],
                              device float* values [[buffer(2)]], device float* lengths [[buffer(3)]],
                              constant JacobiResultParams& p [[buffer(4)]], uint group [[threadgroup_position_in_grid]],
                              uint lane [[thread_index_in_threadgroup]]) {
  device const float* const column = x + ulong(group) * p.jacobi.length;
  const float squares = squares_of(column, 0, p.jacobi.rows, lane), norm = precise::sqrt(squares);
  float value = norm;
  if (p.accumulated != 0) {
    const float length =
        precise::sqrt(squares_of(column, p.jacobi.gram_rows, p.jacobi.gram_rows + p.jacobi.columns, lane));
    value /= length;
    if (lane == 0) lengths[group] = length;
  }
  if (lane == 0) {
    norms[group] = norm;
    values[group] = value;
  }
}

// Stores singular values, descending, and vectors at their places. A threadgroup takes one column. If columns are zero,
// U gets `present` vectors, and a later kernel makes the rest. Entry i of U's vectors belongs at order[i].
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
  const bool finite = exponent != kNotFinite;
  norms += ulong(matrix) * p.jacobi.padded;
  values += ulong(matrix) * p.jacobi.padded;
  const float norm = norms[j], value = values[j];
  uint before = 0, count = 0;
  for (uint i = thread_index; i < columns; i += JACOBI_THREADS) {
    const float other = values[i];
    before += other > value || (!(other < value) && i < j) ? 1 : 0;
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
    const float whole = ldexp(value, exponent - JACOBI_SCALE) / scales[matrix];
    sorted[ulong(matrix) * columns + rank] = !finite ? NAN : value < kNothing ? 0.0f : whole;
    if (j == 0) present[matrix] = nonzero;
  }
  if (p.accumulated == 0) return;
  device const float* const column = x + ulong(at_work) * p.jacobi.length;
  const ulong one = ulong(matrix) * columns;
  u += (one + rank) * rows;
  order += ulong(matrix) * rows;
  for (uint i = thread_index; i < rows; i += JACOBI_THREADS) u[order[i]] = norm < kNothing ? 0.0f : column[i] / norm;
  const float length = lengths[at_work];
  for (uint i = thread_index; i < columns; i += JACOBI_THREADS)
    v[(one + rank) * columns + i] = finite ? column[p.jacobi.gram_rows + i] / length : NAN;
}
