// The reduction of symmetric matrices to tridiagonal form by Householder's reflectors (LAPACK's sytd2). A dispatch
// handles one column: each threadgroup applies the reflector before it to some rows, makes the column's reflector,
// which all threadgroups do alike, and multiplies its rows by it. So a dispatch reads and writes the matrix once.
#include <metal_stdlib>
using namespace metal;

#include "tridiagonalize_steps.h"
#include "tridiagonalize.h"

// Writes both triangles of a matrix from the lower one, and zeros in the padding of the rows.
[[kernel]] [[max_total_threads_per_threadgroup(TRIDIAGONALIZE_THREADS)]] void tridiagonal_load(
    device const float* a [[buffer(0)]], device float* out [[buffer(1)]],
    constant TridiagonalLoadParams& p [[buffer(2)]], uint group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  constexpr uint kTile = TRIDIAGONALIZE_TILE;
  threadgroup float tile[kTile][kTile + 1];
  const uint matrix = group / (p.tiles * p.tiles), row_tile = group / p.tiles % p.tiles, column_tile = group % p.tiles;
  const bool mirrored = column_tile > row_tile;
  if (p.in_place && column_tile < row_tile) return;
  const uint from_row = (mirrored ? column_tile : row_tile) * kTile, from_column = min(row_tile, column_tile) * kTile;
  a += matrix * p.batch_stride;
  out += ulong(matrix) * p.size * p.pitch;
  for (uint at = thread_index; at < kTile * kTile; at += TRIDIAGONALIZE_THREADS) {
    const uint i = from_row + at / kTile, j = from_column + at % kTile;
    const uint row = max(i, j), column = min(i, j);
    tile[at / kTile][at % kTile] = row < p.size ? a[row * p.row_stride + column * p.column_stride] : 0.0f;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint at = thread_index; at < kTile * kTile; at += TRIDIAGONALIZE_THREADS) {
    const uint i = at / kTile, j = at % kTile, row = row_tile * kTile + i, column = column_tile * kTile + j;
    if (row < p.size && column < p.pitch) out[ulong(row) * p.pitch + column] = mirrored ? tile[j][i] : tile[i][j];
  }
}

// Sums of a threadgroup, for each thread. `found` is read until the next barrier.
template <uint SIMDGROUPS>
inline float2 sums_of_all(float2 value, threadgroup float2* found, uint thread_index) {
  value = float2(simd_sum(value.x), simd_sum(value.y));
  if (thread_index % 32 == 0) found[thread_index / 32] = value;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float2 sum = 0.0f;
#pragma unroll
  for (uint i = 0; i < SIMDGROUPS; ++i) sum += found[i];
  return sum;
}

// A thread has FOURS times four of the columns.
template <uint THREADS, uint FOURS>
[[kernel]] [[max_total_threads_per_threadgroup(THREADS)]] void tridiagonal_column(
    device float* a [[buffer(0)]], device float* reflectors [[buffer(1)]], device const float* products [[buffer(2)]],
    device float* new_products [[buffer(3)]], device float* tau [[buffer(4)]], device float* diagonal [[buffer(5)]],
    device float* beside [[buffer(6)]], constant TridiagonalColumnParams& p [[buffer(7)]],
    uint group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  constexpr uint kSimdgroups = THREADS / 32;
  constexpr uint kRows = 8 / FOURS;  // at once
  threadgroup float2 found[2 * kSimdgroups];
  threadgroup float2 of_rows[TRIDIAGONALIZE_ROWS];
  threadgroup float parts[TRIDIAGONALIZE_ROWS * kSimdgroups];
  const uint matrix = group / p.parts, part = group % p.parts, n = p.size, column = p.column;
  const uint begin = column + 1 + part * p.rows, end = min(begin + p.rows, n);
  a += ulong(matrix) * n * p.pitch;
  reflectors += ulong(matrix) * p.reflectors * p.pitch;
  products += ulong(matrix) * p.pitch;
  new_products += ulong(matrix) * p.pitch;
  const uint first = column / 4 * 4 + 4 * thread_index;

  // The first rows are under way during all that leads to the reflector.
  float4 ahead[kRows][FOURS];
#pragma unroll
  for (uint r = 0; r < kRows; ++r)
#pragma unroll
    for (uint f = 0; f < FOURS; ++f) {
      const uint at = first + 4 * THREADS * f;
      ahead[r][f] = begin + r < end && at < n ? *(device const float4*)(a + ulong(begin + r) * p.pitch + at) : 0.0f;
    }

  // The rank-2 update of the reflector before is A - v wᵀ - w vᵀ.
  float4 x[FOURS], v[FOURS], w[FOURS];
  float2 sums = 0.0f;
#pragma unroll
  for (uint f = 0; f < FOURS; ++f) {
    const uint at = first + 4 * THREADS * f;
    x[f] = v[f] = w[f] = 0.0f;
    if (at >= n) continue;
    x[f] = *(device const float4*)(a + ulong(column) * p.pitch + at);
    if (column == p.start) continue;
    v[f] = entries_between(*(device const float4*)(reflectors + ulong(column) * p.pitch + at), at, column, n);
    w[f] = entries_between(*(device const float4*)(products + at), at, column, n);
    sums.x += dot(v[f], w[f]);
  }
  const bool has_next = column + 1 < n;
  const float old_tau = column > p.start ? tau[ulong(matrix) * p.reflectors + column] : 0.0f;
  float own_product = 0.0f, alpha = 0.0f, next_v = 0.0f, next_product = 0.0f;
  if (column > p.start) own_product = products[column];
  if (has_next) alpha = a[ulong(column) * p.pitch + column + 1];
  if (has_next && column > p.start) {
    next_v = reflectors[ulong(column) * p.pitch + column + 1];
    next_product = products[column + 1];
  }
  sums = sums_of_all<kSimdgroups>(sums, found, thread_index);
  const float share = 0.5f * old_tau * old_tau * sums.x;
  const float own_w = fma(old_tau, own_product, -share);  // v's entry there is 1
  const float next_w = fma(old_tau, next_product, -share * next_v);
  alpha = fma(-next_v, own_w, alpha - next_w);

  sums = 0.0f;
#pragma unroll
  for (uint f = 0; f < FOURS; ++f) {
    const uint at = first + 4 * THREADS * f;
    w[f] = old_tau * w[f] - share * v[f];
    x[f] = fma(v[f], float4(-own_w), x[f] - w[f]);
    const float4 rest = entries_between(x[f], at, column + 2, n);
    sums += float2(dot(rest, rest), dot(kTinyScale * rest, kTinyScale * rest));
#pragma unroll
    for (uint e = 0; e < 4; ++e)
      if (at + e >= begin && at + e < end) of_rows[at + e - begin] = float2(v[f][e], w[f][e]);
  }
  sums = sums_of_all<kSimdgroups>(sums, found + kSimdgroups, thread_index);
  float scale;
  const Reflector reflector = reflector_of(alpha, sums, scale);
  float4 u[FOURS];  // the new reflector
#pragma unroll
  for (uint f = 0; f < FOURS; ++f) {
    const uint at = first + 4 * THREADS * f;
    u[f] = entries_between(x[f] * scale * reflector.inverse, at, column + 2, n);
#pragma unroll
    for (uint e = 0; e < 4; ++e) {
      if (at + e == column + 1) u[f][e] = 1.0f;
      if (at + e == column && part == 0) diagonal[ulong(matrix) * n + column] = x[f][e];
    }
    if (part == 0 && has_next && at < n) *(device float4*)(reflectors + ulong(column + 1) * p.pitch + at) = u[f];
  }
  if (part == 0 && thread_index == 0 && has_next) {
    tau[ulong(matrix) * p.reflectors + column + 1] = reflector.tau;
    beside[ulong(matrix) * (n - 1) + column] = reflector.beta;
  }

  for (uint base = begin; base < end; base += kRows) {
    float sum[kRows];
    float4 rows[kRows][FOURS];
#pragma unroll
    for (uint r = 0; r < kRows; ++r)
#pragma unroll
      for (uint f = 0; f < FOURS; ++f) {
        rows[r][f] = ahead[r][f];
        const uint at = first + 4 * THREADS * f, row = base + kRows + r;
        ahead[r][f] = row < end && at < n ? *(device const float4*)(a + ulong(row) * p.pitch + at) : 0.0f;
      }
#pragma unroll
    for (uint r = 0; r < kRows; ++r) {
      const uint row = min(base + r, end - 1);
      const float2 of_row = of_rows[row - begin];
      float4 sums_of_row = 0.0f;
#pragma unroll
      for (uint f = 0; f < FOURS; ++f) {
        const uint at = first + 4 * THREADS * f;
        const float4 value = fma(float4(-of_row.x), w[f], fma(float4(-of_row.y), v[f], rows[r][f]));
        if (base + r < end && at < n) *(device float4*)(a + ulong(row) * p.pitch + at) = value;
        sums_of_row = fma(value, u[f], sums_of_row);
      }
      sum[r] = sums_of_row.x + sums_of_row.y + (sums_of_row.z + sums_of_row.w);
    }
    const float of_simdgroup = SharedSum<kRows>::of(sum, thread_index % 32);
    constexpr uint kLanes = 32 / kRows;  // of a row
    const uint row = base + thread_index % 32 / kLanes;
    if (thread_index % kLanes == 0 && row < end) parts[(row - begin) * kSimdgroups + thread_index / 32] = of_simdgroup;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (thread_index < end - begin) {
    float sum = 0.0f;
#pragma unroll
    for (uint i = 0; i < kSimdgroups; ++i) sum += parts[thread_index * kSimdgroups + i];
    new_products[begin + thread_index] = sum;
  }
}

#define INSTANTIATE(threads, fours)                                                                                   \
  template [[host_name("tridiagonal_column_" #threads "x" #fours)]] [[kernel]] void                                   \
  tridiagonal_column<threads, fours>(device float*, device float*, device const float*, device float*, device float*, \
                                     device float*, device float*, constant TridiagonalColumnParams&, uint, uint);

INSTANTIATE(128, 1)
INSTANTIATE(256, 1)
INSTANTIATE(512, 1)

// Divides eigenvalues by the scales, powers of two, of their matrices.
[[kernel]] void tridiagonal_unscale(device float* eigenvalues [[buffer(0)]], device const float* scales [[buffer(1)]],
                                    constant uint& size [[buffer(2)]], uint i [[thread_position_in_grid]]) {
  eigenvalues[i] *= inverse_of_scale(scales[i / size]);
}
