// C -= L U in place, in tiles: a threadgroup takes a tile of C, a thread 8 x 4 entries. It loads the next columns of L
// and rows of U while it multiplies those in threadgroup memory.
#include <metal_stdlib>
using namespace metal;

#include "lu.h"

constant constexpr uint kTile = LU_UPDATE_TILE, kThreads = LU_UPDATE_THREADS;
constant constexpr uint kDepth = 16;         // columns of L in threadgroup memory at once
constant constexpr uint kPitch = kTile + 4;  // a column's distance there: aligned to float4, spread over banks
constant constexpr uint kRows = 8, kAcross = kTile / 4;
constant constexpr uint kShare = kTile * kDepth / 4 / kThreads;
static_assert(kTile / kRows * kAcross == kThreads, "a thread takes 8 x 4 entries");

// Four neighbours of a row, with zeros beyond the end.
inline float4 four_of_row(device const float* row, uint column, uint end, bool as_float4) {
  if (as_float4) return column < end ? *(device const float4*)(row + column) : float4(0.0f);
  float4 four;
#pragma unroll
  for (uint e = 0; e < 4; ++e) four[e] = column + e < end ? row[column + e] : 0.0f;
  return four;
}

[[kernel]] [[max_total_threads_per_threadgroup(LU_UPDATE_THREADS)]] void lu_update(
    device float* a [[buffer(0)]], device float* panel [[buffer(1)]], constant LuUpdateParams& p [[buffer(2)]],
    uint group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup float4 left[kDepth * kPitch / 4], right[kDepth * kAcross];  // L by columns, U by rows
  const uint matrix = group / p.tiles, tile = group % p.tiles;
  const uint first_row = p.corner + tile / p.column_tiles * kTile;
  const uint first_column = p.corner + tile % p.column_tiles * kTile;
  const ulong n = p.columns;
  const bool as_float4 = p.as_float4 != 0;
  a += matrix * p.rows * n;
  panel += ulong(matrix) * LU_PANEL * p.pitch;

  const uint x = thread_index % kAcross, y = thread_index / kAcross;
  float4 sum[kRows];
#pragma unroll
  for (uint r = 0; r < kRows; ++r) sum[r] = float4(0.0f);
  float4 next_left[kShare], next_right[kShare];
  for (uint k = 0; k < p.width + kDepth; k += kDepth) {
    if (k > 0) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
      for (uint i = 0; i < kShare; ++i) {
        const uint at = i * kThreads + thread_index;
#pragma unroll
        for (uint e = 0; e < 4; ++e)
          ((threadgroup float*)left)[(at % (kDepth / 4) * 4 + e) * kPitch + at / (kDepth / 4)] = next_left[i][e];
        right[at] = next_right[i];
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
#pragma unroll
    for (uint i = 0; i < kShare; ++i) {
      const uint at = i * kThreads + thread_index;
      const uint row = first_row + at / (kDepth / 4), l_column = k + at % (kDepth / 4) * 4;
      const uint l = k + at / kAcross;
      next_left[i] = row < p.rows ? four_of_row(a + row * n + p.first, l_column, p.width, as_float4) : float4(0.0f);
      next_right[i] = l < p.width
                          ? four_of_row(a + (p.first + l) * n, first_column + at % kAcross * 4, p.end, as_float4)
                          : float4(0.0f);
    }
    if (k == 0) continue;
#pragma unroll
    for (uint i = 0; i < kDepth; ++i) {
      const float4 l[2] = {left[(i * kPitch + y * kRows) / 4], left[(i * kPitch + y * kRows) / 4 + 1]};
      const float4 u = right[i * kAcross + x];
#pragma unroll
      for (uint r = 0; r < kRows; ++r) sum[r] = fma(float4(-l[r / 4][r % 4]), u, sum[r]);
    }
  }

  const uint column = first_column + 4 * x;
#pragma unroll
  for (uint r = 0; r < kRows; ++r) {
    const uint row = first_row + y * kRows + r;
    if (row >= p.rows) continue;
    device float* const to = a + row * n;
    sum[r] += four_of_row(to, column, p.end, as_float4);
    if (as_float4 && column >= p.panel_end) {
      if (column < p.end) *(device float4*)(to + column) = sum[r];
    } else {
#pragma unroll
      for (uint e = 0; e < 4; ++e)
        if (column + e >= p.panel_end && column + e < p.end) to[column + e] = sum[r][e];
    }
  }
#pragma unroll
  for (uint e = 0; e < 4; ++e) {
    device float* const to = panel + ulong(column - p.corner + e) * p.pitch + (first_row - p.corner) + y * kRows;
#pragma unroll
    for (uint r = 0; r < kRows; ++r)
      if (first_row + y * kRows + r < p.rows && column + e < p.panel_end) to[r] = sum[r][e];
  }
}
