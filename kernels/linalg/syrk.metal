// The symmetric rank-k update alpha A Aᵀ + beta C. A threadgroup makes a square of one triangle of A Aᵀ, and mirrors it
// if both triangles are wanted. A thread has 8 x 4 entries in registers.
#include <metal_stdlib>
using namespace metal;

#include "steps.h"
#include "hermitian.h"

constant constexpr uint kDepth = 16;              // columns of A in threadgroup memory at once
constant constexpr uint kPitch = SYRK_TILE + 4;   // a column's stride there: aligned to float4, spread over banks
constant constexpr uint kRows = 8, kColumns = 4;  // per thread
constant constexpr uint kAcross = SYRK_TILE / kColumns;
constant constexpr uint kShare = SYRK_TILE * kDepth / 4 / SYRK_THREADS;

// Part i of a thread's share of SYRK_TILE rows and kDepth columns of A: the row and the column of four entries along a
// row, or with `down` along a column, so that neighbouring threads load neighbours in memory.
inline uint2 corner(uint i, uint thread_index, bool down) {
  const uint at = i * SYRK_THREADS + thread_index;
  return down ? uint2(at % (SYRK_TILE / 4) * 4, at / (SYRK_TILE / 4)) : uint2(at / (kDepth / 4), at % (kDepth / 4) * 4);
}

inline void load_share(thread float4 (&share)[kShare], device const float* a, constant SyrkParams& p, uint row, uint k,
                       uint thread_index, bool down) {
#pragma unroll
  for (uint i = 0; i < kShare; ++i) {
    const uint2 at = corner(i, thread_index, down) + uint2(row, k);
    device const float* const from = a + at.x * p.a_row + at.y * p.a_column;
    if (p.as_float4) {
      share[i] = at.x < p.n && at.y < p.k ? *(device const float4*)from : float4(0.0f);
    } else {
#pragma unroll
      for (uint e = 0; e < 4; ++e) {
        const bool there = at.x + (down ? e : 0) < p.n && at.y + (down ? 0 : e) < p.k;
        share[i][e] = there ? from[e * (down ? p.a_row : p.a_column)] : 0.0f;
      }
    }
  }
}

inline void store_share(thread const float4 (&share)[kShare], threadgroup float4* to, uint thread_index, bool down) {
#pragma unroll
  for (uint i = 0; i < kShare; ++i) {
    const uint2 at = corner(i, thread_index, down);
    if (down) {
      to[(at.y * kPitch + at.x) / 4] = share[i];
    } else {
#pragma unroll
      for (uint e = 0; e < 4; ++e) ((threadgroup float*)to)[(at.y + e) * kPitch + at.x] = share[i][e];
    }
  }
}

// Writes the thread's entries in the tile's triangle, at (row, column), or those across the diagonal. All of C is read
// before the first write, because the compiler must assume that C is the same memory.
inline void write(thread const float4 (&sum)[kRows], device float* result, device const float* c,
                  constant SyrkParams& p, uint row, uint column, bool below, bool across) {
  const bool zero = (below != across ? p.lower : p.upper) == SYRK_ZERO;
  float4 values[kRows];
#pragma unroll
  for (uint r = 0; r < kRows; ++r) {
#pragma unroll
    for (uint s = 0; s < kColumns; ++s) {
      const uint i = row + r, j = column + s;
      const bool there = max(i, j) < p.n && p.beta != 0.0f && !zero;
      values[r][s] = there ? c[across ? j * p.c_row + i * p.c_column : i * p.c_row + j * p.c_column] : 0.0f;
    }
    values[r] = fma(float4(p.beta), values[r], p.alpha * sum[r]);
  }
#pragma unroll
  for (uint r = 0; r < kRows; ++r) {
#pragma unroll
    for (uint s = 0; s < kColumns; ++s) {
      const uint i = row + r, j = column + s;
      const bool wanted = max(i, j) < p.n && (below ? i >= j : i <= j) && !(across && i == j);
      if (wanted) result[across ? j * p.result_row + i : i * p.result_row + j] = zero ? 0.0f : values[r][s];
    }
  }
}

[[kernel]] [[max_total_threads_per_threadgroup(SYRK_THREADS)]] void syrk(
    device const float* a [[buffer(0)]], device const float* c [[buffer(1)]], device float* result [[buffer(2)]],
    constant SyrkParams& p [[buffer(3)]], uint group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup float4 left[kDepth * kPitch / 4], right[kDepth * kPitch / 4];

  const uint matrix = group / p.tiles, tile = group % p.tiles;
  const uint corner = triangle_start(p.across);  // the tiles of those rows that end at the diagonal
  const bool in_corner = tile < corner;
  const uint tile_row = in_corner ? triangle_row(tile) : p.across + (tile - corner) / p.across;
  const uint tile_column = in_corner ? tile - triangle_start(tile_row) : (tile - corner) % p.across;
  // Neighbouring threads have neighbouring columns, in the lower triangle if that is wanted, else in the upper one.
  const bool below = p.lower == SYRK_WRITE;
  const uint first_row = (below ? tile_row : tile_column) * SYRK_TILE;
  const uint first_column = (below ? tile_column : tile_row) * SYRK_TILE;
  a += matrix * p.a_batch;
  c += matrix * p.c_batch;
  result += matrix * p.result_batch;

  const bool down = p.a_row == 1;
  const uint thread_column = thread_index % kAcross * kColumns, thread_row = thread_index / kAcross * kRows;
  float4 sum[kRows];
#pragma unroll
  for (uint r = 0; r < kRows; ++r) sum[r] = float4(0.0f);

  float4 next_left[kShare], next_right[kShare];
  load_share(next_left, a, p, first_row, 0, thread_index, down);
  load_share(next_right, a, p, first_column, 0, thread_index, down);
  for (uint k = 0; k < p.k; k += kDepth) {
    store_share(next_left, left, thread_index, down);
    store_share(next_right, right, thread_index, down);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    load_share(next_left, a, p, first_row, k + kDepth, thread_index, down);
    load_share(next_right, a, p, first_column, k + kDepth, thread_index, down);
#pragma unroll(8)
    for (uint i = 0; i < kDepth; ++i) {
      const uint at = i * kPitch / 4;
      const float4 rows[2] = {left[at + thread_row / 4], left[at + thread_row / 4 + 1]};
      const float4 columns = right[at + thread_column / 4];
#pragma unroll
      for (uint r = 0; r < kRows; ++r) sum[r] = fma(float4(rows[r / 4][r % 4]), columns, sum[r]);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }

  const uint row = first_row + thread_row, column = first_column + thread_column;
  write(sum, result, c, p, row, column, below, false);
  const uint other = below ? p.upper : p.lower;
  if (other != SYRK_LEAVE) write(sum, result, c, p, row, column, below, true);
}
