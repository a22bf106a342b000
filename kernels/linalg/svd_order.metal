// Sorts columns by descending magnitude, for the blocked SVD. Then R of the QR decomposition has graded rows, and
// blocked Jacobi needs few sweeps however much the columns' norms differ.
#include <metal_stdlib>
using namespace metal;

#include "householder.h"
#include "spectral.h"

constant constexpr uint kRowsAtOnce = SVD_ORDER_THREADS / 32;

// The exponent of each column's largest entry, or the largest exponent for NaN. A threadgroup takes 32 columns.
[[kernel]] [[max_total_threads_per_threadgroup(SVD_ORDER_THREADS)]] void svd_exponents(
    device const float* a [[buffer(0)]], device uint* exponents [[buffer(1)]], constant SvdOrderParams& p [[buffer(2)]],
    uint group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup uint found[SVD_ORDER_THREADS];
  const uint tiles = (p.columns + 31) / 32, matrix = group / tiles;
  const uint column = group % tiles * 32 + thread_index % 32;
  uint most = 0;
  if (column < p.columns) {
    device const float* const from = a + matrix * p.a.batch_stride + column * p.a.column_stride;
    for (uint row = thread_index / 32; row < p.rows; row += kRowsAtOnce)
      most = max(most, as_type<uint>(abs(from[row * p.a.row_stride])));
  }
  found[thread_index] = most;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (thread_index >= 32 || column >= p.columns) return;
#pragma unroll
  for (uint i = 1; i < kRowsAtOnce; ++i) most = max(most, found[i * 32 + thread_index]);
  exponents[ulong(matrix) * p.columns + column] = most >> 23;
}

// order[i] is the i-th column in this order. A threadgroup finds the places of SVD_ORDER_THREADS columns. The first
// threadgroup of a matrix also finds its scale.
[[kernel]] [[max_total_threads_per_threadgroup(SVD_ORDER_THREADS)]] void svd_order(
    device const uint* exponents [[buffer(0)]], device uint* order [[buffer(1)]], device float* scales [[buffer(2)]],
    constant SvdOrderParams& p [[buffer(3)]], uint group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  const uint tiles = (p.columns + SVD_ORDER_THREADS - 1) / SVD_ORDER_THREADS, matrix = group / tiles;
  const uint column = group % tiles * SVD_ORDER_THREADS + thread_index;
  if (column >= p.columns) return;
  device const uint* const own = exponents + ulong(matrix) * p.columns;
  const uint exponent = own[column];
  uint place = 0, most = 0;
  for (uint j = 0; j < p.columns; ++j) {
    place += own[j] > exponent || (own[j] == exponent && j < column) ? 1 : 0;
    most = max(most, own[j]);
  }
  order[ulong(matrix) * p.columns + place] = column;
  if (column == 0) scales[matrix] = scale_to_one(as_type<float>(most << 23));
}

// Writes the matrices times their scales with their columns in that order, row-major. A threadgroup takes kRowsAtOnce
// rows.
[[kernel]] [[max_total_threads_per_threadgroup(SVD_ORDER_THREADS)]] void svd_permute(
    device const float* a [[buffer(0)]], device const uint* order [[buffer(1)]], device float* out [[buffer(2)]],
    device const float* scales [[buffer(3)]], constant SvdOrderParams& p [[buffer(4)]],
    uint group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  const uint tiles = (p.rows + kRowsAtOnce - 1) / kRowsAtOnce, matrix = group / tiles;
  const uint row = group % tiles * kRowsAtOnce + thread_index / 32;
  if (row >= p.rows) return;
  device const float* const from = a + matrix * p.a.batch_stride + row * p.a.row_stride;
  device const uint* const columns = order + ulong(matrix) * p.columns;
  device float* const to = out + (ulong(matrix) * p.rows + row) * p.columns;
  const float scale = scales[matrix];
  for (uint i = thread_index % 32; i < p.columns; i += 32) to[i] = from[columns[i] * p.a.column_stride] * scale;
}
