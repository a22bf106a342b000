// The steps of the SVD by the polar decomposition that are no products of matrices. A matrix whose norm is not finite
// becomes zero, and its results are NaN.
#include <metal_stdlib>
using namespace metal;

#include "householder.h"
#include "spectral.h"

constant constexpr uint kSimdgroups = POLAR_THREADS / 32;

// The sum over the threadgroup.
inline float sum_of_all(float value, threadgroup float* sums, uint thread_index) {
  value = simd_sum(value);
  if (thread_index % 32 == 0) sums[thread_index / 32] = value;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float sum = 0.0f;
  for (uint i = 0; i < kSimdgroups; ++i) sum += sums[i];
  return sum;
}

// The sums of squares of each matrix's parts.
[[kernel]] [[max_total_threads_per_threadgroup(POLAR_THREADS)]] void polar_squares(
    device const float* a [[buffer(0)]], device float* squares [[buffer(1)]], constant PolarParams& p [[buffer(2)]],
    uint2 group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup float sums[kSimdgroups];
  const ulong count = ulong(p.size) * p.size;
  a += group.y * count;
  float sum = 0.0f;
  for (ulong i = group.x * POLAR_THREADS + thread_index; i < count; i += POLAR_PARTS * POLAR_THREADS)
    sum = fma(a[i], a[i], sum);
  sum = sum_of_all(sum, sums, thread_index);
  if (thread_index == 0) squares[group.y * POLAR_PARTS + group.x] = sum;
}

// x = a / its norm. The norm is infinite for a matrix that is not finite, and x and a become zero.
[[kernel]] [[max_total_threads_per_threadgroup(POLAR_THREADS)]] void polar_begin(
    device float* a [[buffer(0)]], device const float* squares [[buffer(1)]], device float* x [[buffer(2)]],
    device float* norms [[buffer(3)]], constant PolarParams& p [[buffer(4)]],
    uint2 group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup float sums[kSimdgroups];
  const ulong count = ulong(p.size) * p.size;
  a += group.y * count;
  x += group.y * count;
  const float sum =
      sum_of_all(thread_index < POLAR_PARTS ? squares[group.y * POLAR_PARTS + thread_index] : 0.0f, sums, thread_index);
  const bool is_finite = sum < INFINITY;
  const float inverse = is_finite && sum > 0.0f ? 1.0f / precise::sqrt(sum) : 0.0f;
  for (ulong i = group.x * POLAR_THREADS + thread_index; i < count; i += POLAR_PARTS * POLAR_THREADS) {
    if (!is_finite) a[i] = 0.0f;
    x[i] = a[i] * inverse;
  }
  if (group.x == 0 && thread_index == 0) norms[group.y] = is_finite ? sum : INFINITY;
}

// x = of_x x + of_y y
[[kernel]] [[max_total_threads_per_threadgroup(POLAR_THREADS)]] void polar_step(
    device float* x [[buffer(0)]], device const float* y [[buffer(1)]], constant PolarParams& p [[buffer(2)]],
    uint2 group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  const ulong at = (ulong(group.y) * p.size + group.x) * p.size;
  for (uint i = thread_index; i < p.size; i += POLAR_THREADS) x[at + i] = fma(p.of_x, x[at + i], p.of_y * y[at + i]);
}

// Turns eigenvalues in ascending order into singular values in descending order, and the eigenvectors with them. An
// eigenvalue below zero is a rounded zero.
[[kernel]] [[max_total_threads_per_threadgroup(POLAR_THREADS)]] void polar_order(
    device const float* eigenvalues [[buffer(0)]], device const float* eigenvectors [[buffer(1)]],
    device const float* scales [[buffer(2)]], device const float* norms [[buffer(3)]],
    device float* values [[buffer(4)]], device float* ordered [[buffer(5)]], constant PolarParams& p [[buffer(6)]],
    uint2 group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  const uint n = p.size;
  const bool is_finite = norms[group.y] < INFINITY;
  const ulong at = (ulong(group.y) * n + group.x) * n;
  const float inverse = inverse_of_scale(scales[group.y]);
  for (uint i = thread_index; i < n; i += POLAR_THREADS) {
    ordered[at + i] = is_finite ? eigenvectors[at + n - 1 - i] : NAN;
    if (group.x == 0)
      values[ulong(group.y) * n + i] =
          is_finite ? max(eigenvalues[ulong(group.y) * n + n - 1 - i], 0.0f) * inverse : NAN;
  }
}

// Writes the columns of q, with the sign of r's diagonal each.
[[kernel]] [[max_total_threads_per_threadgroup(POLAR_THREADS)]] void polar_signs(
    device const float* q [[buffer(0)]], device const float* r [[buffer(1)]], device float* result [[buffer(2)]],
    constant PolarParams& p [[buffer(3)]], uint2 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  const uint n = p.size;
  const ulong first = ulong(group.y) * n * n;
  for (uint j = thread_index; j < n; j += POLAR_THREADS) {
    const float value = q[first + ulong(group.x) * n + j];
    result[first + group.x * p.row_stride + j * p.column_stride] = r[first + ulong(j) * n + j] < 0.0f ? -value : value;
  }
}
