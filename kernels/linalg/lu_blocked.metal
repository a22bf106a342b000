// The blocked variant, which is right-looking as LAPACK's getrf is. After a panel (lu_block, or lu_looped_panel here),
// lu_rows exchanges rows in the columns beside it and makes the rows of U on its right, and lu_update subtracts L U
// from the rest.
#include <metal_stdlib>
using namespace metal;

#include "lu.h"
#include "lu_pivot.h"

constant constexpr uint kPanelThreads = 1024;
constant constexpr uint kPanelSimdgroups = kPanelThreads / 32;

// A panel with more rows than threads. It stays in device memory, where its rows are exchanged. While one column is
// eliminated, the next column's pivot is searched.
[[kernel]] [[max_total_threads_per_threadgroup(kPanelThreads)]] void lu_looped_panel(
    device float* a [[buffer(0)]], device int* pivots [[buffer(1)]], device int* info [[buffer(2)]],
    device uint* sources [[buffer(3)]], constant LuParams& p [[buffer(4)]],
    uint matrix [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup uint2 largest[kPanelSimdgroups];
  threadgroup float pivot_row[LU_LOOPED_PANEL];
  const uint lane = thread_index % 32, simdgroup = thread_index / 32;
  const uint width = min(p.rows, p.columns);
  const bool pivoting = p.pivoting != 0;
  device float* const panel = a + matrix * p.lu_batch + p.first * p.lu_row + p.first;
  sources += ulong(matrix) * p.rows;

  uint most = 0, place = UINT_MAX;  // the largest of this thread's rows in the next column
  for (uint i = thread_index; i < p.rows; i += kPanelThreads) {
    sources[i] = i;
    const uint key = pivot_key(panel[i * p.lu_row], i, 0, true);
    place = key > most ? i : place;
    most = max(key, most);
  }
  uint zero = 0;
  for (uint k = 0; k < width; ++k) {
    const uint simd_most = simd_max(most);
    const uint simd_first = ~simd_max(most == simd_most ? ~place : 0);
    if (lane == 0) largest[simdgroup] = uint2(simd_most, simd_first);
    threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);
    const uint2 candidate = largest[lane];
    uint pivot = ~simd_max(candidate.x == simd_max(candidate.x) ? ~candidate.y : 0);
    if (!pivoting) pivot = k;
    if (thread_index < width) {
      device float* const upper = panel + k * p.lu_row + thread_index;
      device float* const lower = panel + pivot * p.lu_row + thread_index;
      const float value = *lower;
      pivot_row[thread_index] = value;
      *lower = *upper;
      *upper = value;
    }
    if (thread_index == 0) {
      const uint source = sources[pivot];
      sources[pivot] = sources[k];
      sources[k] = source;
      pivots[ulong(matrix) * p.pivots_batch + p.first + k] = int(p.first + pivot) + 1;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);
    const float diagonal = pivot_row[k];
    const Divisor by = divisor(diagonal);
    zero = zero == 0 && diagonal == 0.0f ? k + 1 : zero;
    most = 0;
    place = UINT_MAX;
    for (uint i = thread_index; i < p.rows; i += kPanelThreads) {
      if (i <= k) continue;
      device float* const row = panel + i * p.lu_row;
      const float factor = multiplier(row[k], diagonal, by, pivoting);
      row[k] = factor;
      for (uint c = k + 1; c < width; ++c) row[c] = fma(-factor, pivot_row[c], row[c]);
      const uint key = k + 1 < width ? pivot_key(row[k + 1], i, k + 1, true) : 0;
      place = key > most ? i : place;
      most = max(key, most);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);
  }
  if (thread_index == 0) {
    const int before = p.first > 0 ? info[matrix] : 0;
    info[matrix] = before != 0 || zero == 0 ? before : int(p.first + zero);
  }
}

constant constexpr uint kNone = UINT_MAX;
constant constexpr uint kQuads = LU_PANEL / 4;
constant constexpr uint kMoved = 8;  // rows on their way at once

// Forward substitution from row K on with a unit lower triangle, given by columns. It is no loop, because compilers may
// not unroll a loop of this size, and `top` would then be in memory.
template <uint K>
struct TopSolve {
  static void run(thread float4 (&top)[kQuads], threadgroup const float4* l) {
    const float4 factor = float4(-top[K / 4][K % 4]);
#pragma unroll
    for (uint j = K / 4; j < kQuads; ++j) top[j] = fma(factor, l[K * kQuads + j], top[j]);
    TopSolve<K + 1>::run(top, l);
  }
};

template <>
struct TopSolve<LU_PANEL> {
  static void run(thread float4 (&)[kQuads], threadgroup const float4*) {}
};

// A thread takes a column beside the panel: the rows that pivoting moved to the panel's top, the rows that they
// displaced, and on the right of the panel U = L⁻¹ times the new top. `sources` tells where each row below the panel's
// corner comes from. Only pivots and the top can have changed.
[[kernel]] [[max_total_threads_per_threadgroup(LU_ROWS_THREADS)]] void lu_rows(
    device float* a [[buffer(0)]], device const int* pivots [[buffer(1)]], device const uint* sources [[buffer(2)]],
    device uint* permutation [[buffer(3)]], constant LuStepParams& p [[buffer(4)]],
    uint group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup float4 l[LU_PANEL * kQuads];  // by columns
  threadgroup uint top_source[LU_PANEL], below[LU_PANEL], below_source[LU_PANEL];
  const uint matrix = group / p.tiles, tile = group % p.tiles;
  const uint n = p.columns, width = p.width;
  device float* const base = a + (ulong(matrix) * p.rows + p.first) * n;
  sources += ulong(matrix) * (p.rows - p.first);

  if (thread_index < LU_PANEL) {
    const uint i = thread_index;
    const uint row = i < width ? uint(pivots[ulong(matrix) * p.pivots + p.first + i]) - 1 - p.first : 0;
    top_source[i] = i < width ? sources[i] : 0;
    below[i] = row >= width ? row : kNone;
    below_source[i] = row >= width ? sources[row] : 0;
  }
  for (uint at = thread_index; at < LU_PANEL * LU_PANEL; at += LU_ROWS_THREADS) {
    const uint i = at / LU_PANEL, k = at % LU_PANEL;
    ((threadgroup float*)l)[k * LU_PANEL + i] = i < width && k < i ? base[ulong(i) * n + p.first + k] : 0.0f;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  if (p.permutation != 0 && tile == 0) {
    device uint* const order = permutation + ulong(matrix) * p.rows + p.first;
    const uint i = thread_index % LU_PANEL;
    const bool above = thread_index < LU_PANEL;
    const uint to = above ? (i < width ? uint(i) : kNone) : below[i];  // no address of i, which would put it in memory
    const uint from = above ? top_source[i] : below_source[i];
    const uint row = to != kNone ? order[from] : 0;
    threadgroup_barrier(mem_flags::mem_device);
    if (to != kNone) order[to] = row;
  }

  const uint beside = tile * LU_ROWS_THREADS + thread_index;
  const uint column = beside < p.first ? beside : beside + width;
  const bool has_column = column < n;
  float4 top[kQuads];
#pragma unroll
  for (uint i = 0; i < LU_PANEL; ++i)
    top[i / 4][i % 4] = has_column && i < width ? base[ulong(top_source[i]) * n + column] : 0.0f;
  // Rows that move down come from the top, which is not written here, so a few of them can be moved at a time.
  for (uint i = 0; i < LU_PANEL; i += kMoved) {
    float moved[kMoved];
#pragma unroll
    for (uint j = 0; j < kMoved; ++j)
      moved[j] = has_column && below[i + j] != kNone ? base[ulong(below_source[i + j]) * n + column] : 0.0f;
#pragma unroll
    for (uint j = 0; j < kMoved; ++j)
      if (has_column && below[i + j] != kNone) base[ulong(below[i + j]) * n + column] = moved[j];
  }
  if (column > p.first) TopSolve<0>::run(top, l);
#pragma unroll
  for (uint i = 0; i < LU_PANEL; ++i)
    if (has_column && i < width) base[ulong(i) * n + column] = top[i / 4][i % 4];
}

// C -= L U for the rows below and the columns on the right of the panel. A threadgroup takes a tile of C, a thread 4 x
// 4 elements.
constant constexpr uint kTile = LU_UPDATE_TILE;
constant constexpr uint kUpdateThreads = kTile * kTile / 16;

[[kernel]] [[max_total_threads_per_threadgroup(kUpdateThreads)]] void lu_update(
    device float* a [[buffer(0)]], constant LuStepParams& p [[buffer(1)]], uint group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup float4 left[LU_PANEL * kTile / 4], right[LU_PANEL * kTile / 4];  // L by columns, U by rows
  const uint matrix = group / p.tiles, tile = group % p.tiles;
  const uint first_row = p.first + p.width + tile / p.column_tiles * kTile;
  const uint first_column = p.first + p.width + tile % p.column_tiles * kTile;
  const ulong n = p.columns;
  a += matrix * p.rows * n;

#pragma unroll
  for (uint i = 0; i < LU_PANEL * kTile / kUpdateThreads; ++i) {
    const uint at = i * kUpdateThreads + thread_index;
    const uint row = at / LU_PANEL, k = at % LU_PANEL;
    ((threadgroup float*)left)[k * kTile + row] =
        k < p.width && first_row + row < p.rows ? a[(first_row + row) * n + p.first + k] : 0.0f;
    const uint column = at % kTile, l = at / kTile;
    ((threadgroup float*)right)[at] =
        l < p.width && first_column + column < p.columns ? a[(p.first + l) * n + first_column + column] : 0.0f;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  const uint x = thread_index % (kTile / 4), y = thread_index / (kTile / 4);
  float4 sum[4];
#pragma unroll
  for (uint i = 0; i < 4; ++i) sum[i] = float4(0.0f);
#pragma unroll(16)
  for (uint k = 0; k < LU_PANEL; ++k) {
    const float4 l = left[k * (kTile / 4) + y], u = right[k * (kTile / 4) + x];
#pragma unroll
    for (uint i = 0; i < 4; ++i) sum[i] = fma(float4(l[i]), u, sum[i]);
  }
#pragma unroll
  for (uint i = 0; i < 4; ++i) {
    const uint row = first_row + 4 * y + i;
#pragma unroll
    for (uint e = 0; e < 4; ++e) {
      const uint column = first_column + 4 * x + e;
      if (row < p.rows && column < p.columns) a[row * n + column] -= sum[i][e];
    }
  }
}
