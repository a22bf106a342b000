// What is done before and after svd_jacobi: columns are sorted by descending magnitude, for the blocked SVD, and left
// singular vectors of singular values that are zero are made, and products with Q. Where columns are sorted, R of the
// QR decomposition has graded rows, and blocked Jacobi needs few sweeps however much the columns' norms differ.
#include <metal_stdlib>
using namespace metal;

#include "householder.h"
#include "scalars.h"
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

constant constexpr uint kThreads = 256;
constant constexpr uint kSimdgroups = kThreads / 32;

inline float sum_of_all(float value, threadgroup float* partial, uint thread_index) {
  value = simd_sum(value);
  if (thread_index % 32 == 0) partial[thread_index / 32] = value;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float total = 0.0f;
  for (uint i = 0; i < kSimdgroups; ++i) total += partial[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return total;
}

// Makes the left vectors after the first `present` ones. Each one comes from the unit vector that is furthest from the
// space of the vectors before, and is made orthogonal to them twice (Kahan and Parlett's "twice is enough").
template <typename T>
[[kernel]] [[max_total_threads_per_threadgroup(256)]] void svd_complete(
    device T* left [[buffer(0)]], device const uint* present [[buffer(1)]], constant SvdParams& p [[buffer(2)]],
    uint matrix [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup float partial[kSimdgroups];
  threadgroup uint partial_row[kSimdgroups];
  threadgroup T coefficients[kThreads];

  device T* const u = left + matrix * p.left.batch_stride;
  const long down = p.left.row_stride, across = p.left.column_stride;
  for (uint count = present[matrix]; count < p.columns; ++count) {
    float least = INFINITY;
    uint chosen = 0;
    for (uint row = thread_index; row < p.rows; row += kThreads) {
      float square = 0.0f;
      for (uint j = 0; j < count; ++j) square = add_square(square, u[row * down + j * across]);
      if (square < least) {
        least = square;
        chosen = row;
      }
    }
    const float least_of_simdgroup = simd_min(least);
    chosen = simd_min(least == least_of_simdgroup ? chosen : UINT_MAX);
    if (thread_index % 32 == 0) {
      partial[thread_index / 32] = least_of_simdgroup;
      partial_row[thread_index / 32] = chosen;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = 0; i < kSimdgroups; ++i) {
      const bool better = i == 0 || partial[i] < least;
      least = better ? partial[i] : least;
      chosen = better ? partial_row[i] : chosen;
    }

    device T* const v = u + count * across;
    for (uint row = thread_index; row < p.rows; row += kThreads) v[row * down] = number<T>(row == chosen ? 1.0f : 0.0f);
    for (uint pass = 0; pass < 2; ++pass) {
      for (uint first = 0; first < count; first += kThreads) {
        threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);
        const uint column = first + thread_index;
        T dot = T(0.0f);
        if (column < count)
          for (uint row = 0; row < p.rows; ++row)
            dot = add_product(dot, conjugate(u[row * down + column * across]), v[row * down]);
        coefficients[thread_index] = dot;
        threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);
        const uint length = min(kThreads, count - first);
        for (uint row = thread_index; row < p.rows; row += kThreads) {
          T sum = T(0.0f);
          for (uint j = 0; j < length; ++j)
            sum = add_product(sum, u[row * down + (first + j) * across], coefficients[j]);
          v[row * down] -= sum;
        }
      }
      threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);
      float square = 0.0f;
      for (uint row = thread_index; row < p.rows; row += kThreads) square = add_square(square, v[row * down]);
      const float factor = 1.0f / precise::sqrt(sum_of_all(square, partial, thread_index));
      for (uint row = thread_index; row < p.rows; row += kThreads) v[row * down] *= factor;
    }
    threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);
  }
}

template [[host_name("svd_complete")]] [[kernel]] void svd_complete<float>(device float*, device const uint*,
                                                                           constant SvdParams&, uint, uint);
template [[host_name("svd_complete_complex")]] [[kernel]] void svd_complete<float2>(device float2*, device const uint*,
                                                                                    constant SvdParams&, uint, uint);

// A threadgroup makes a tile of SVD_MULTIPLY_TILE² of the product.
template <typename T>
[[kernel]] [[max_total_threads_per_threadgroup(256)]] void svd_multiply(
    device const T* a [[buffer(0)]], device const T* b [[buffer(1)]], device T* out [[buffer(2)]],
    constant SvdMultiplyParams& p [[buffer(3)]], uint group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  constexpr uint kTile = SVD_MULTIPLY_TILE;
  constexpr uint kRowsAtOnce = kThreads / kTile;
  constexpr uint kEach = kTile / kRowsAtOnce;
  threadgroup T a_tile[kTile][kTile + 1];
  threadgroup T b_tile[kTile][kTile + 1];

  const uint tile = group % (p.row_tiles * p.column_tiles);
  const uint matrix = group / (p.row_tiles * p.column_tiles);
  const uint first_row = tile / p.column_tiles * kTile, x = thread_index % kTile, y = thread_index / kTile;
  const uint column = tile % p.column_tiles * kTile + x;
  device const T* const from_a = a + matrix * p.a.batch_stride;
  device const T* const from_b = b + matrix * p.b.batch_stride;

  T sums[kEach];
#pragma unroll
  for (uint i = 0; i < kEach; ++i) sums[i] = T(0.0f);
  for (uint first = 0; first < p.inner; first += kTile) {
#pragma unroll
    for (uint i = 0; i < kEach; ++i) {
      const uint at = y + i * kRowsAtOnce, row = first_row + at;
      a_tile[at][x] = row < p.rows && first + x < p.inner
                          ? from_a[row * p.a.row_stride + (first + x) * p.a.column_stride]
                          : T(0.0f);
      b_tile[at][x] = first + at < p.inner && column < p.inner
                          ? from_b[(first + at) * p.b.row_stride + column * p.b.column_stride]
                          : T(0.0f);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint k = 0; k < kTile; ++k)
#pragma unroll
      for (uint i = 0; i < kEach; ++i) sums[i] = add_product(sums[i], a_tile[y + i * kRowsAtOnce][k], b_tile[k][x]);
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  if (column >= p.columns) return;
#pragma unroll
  for (uint i = 0; i < kEach; ++i) {
    const uint row = first_row + y + i * kRowsAtOnce;
    if (row >= p.rows) continue;
    out[matrix * p.out.batch_stride + row * p.out.row_stride + column * p.out.column_stride] =
        column < p.inner ? sums[i] : from_a[row * p.a.row_stride + column * p.a.column_stride];
  }
}

template [[host_name("svd_multiply")]] [[kernel]] void svd_multiply<float>(device const float*, device const float*,
                                                                           device float*, constant SvdMultiplyParams&,
                                                                           uint, uint);
template [[host_name("svd_multiply_complex")]] [[kernel]] void svd_multiply<float2>(
    device const float2*, device const float2*, device float2*, constant SvdMultiplyParams&, uint, uint);
