// The symmetric rank-k update alpha A Aᵀ + beta C: a threadgroup for each square of one triangle of A Aᵀ, which is written
// there, and mirrored where both are wanted. A thread has 8 x 4 entries in registers.
#include <metal_stdlib>
using namespace metal;

#include "syrk.h"
#include "triangle.h"

constant constexpr uint kDepth = 16;                // columns of A at once in threadgroup memory
constant constexpr uint kPitch = SYRK_TILE + 4;     // of one column there: aligned to float4, spread over banks
constant constexpr uint kRows = 8, kColumns = 4;    // of a thread
constant constexpr uint kAcross = SYRK_TILE / kColumns;
constant constexpr uint kShare = SYRK_TILE * kDepth / SYRK_THREADS;

// Entry i of a thread's share of 64 rows and kDepth columns of A: neighbours in memory go to neighbouring threads.
inline uint2 entry(uint i, uint thread_index, bool along_rows) {
  const uint at = i * SYRK_THREADS + thread_index;
  return along_rows ? uint2(at % SYRK_TILE, at / SYRK_TILE) : uint2(at / kDepth, at % kDepth);
}

inline void load_share(thread float (&share)[kShare], device const float* a, constant SyrkParams& p, uint row, uint k,
                       uint thread_index, bool along_rows) {
#pragma unroll
  for (uint i = 0; i < kShare; ++i) {
    const uint2 at = entry(i, thread_index, along_rows) + uint2(row, k);
    share[i] = at.x < p.n && at.y < p.k ? a[at.x * p.a_row + at.y * p.a_column] : 0.0f;
  }
}

inline void store_share(thread const float (&share)[kShare], threadgroup float* to, uint thread_index,
                        bool along_rows) {
#pragma unroll
  for (uint i = 0; i < kShare; ++i) {
    const uint2 at = entry(i, thread_index, along_rows);
    to[at.y * kPitch + at.x] = share[i];
  }
}

inline void write(device float* result, device const float* c, constant SyrkParams& p, uint row, uint column,
                  uint what, float product) {
  if (what == SYRK_LEAVE) return;
  float value = 0.0f;
  if (what == SYRK_WRITE) {
    value = p.alpha * product;
    if (p.beta != 0.0f) value = fma(p.beta, c[row * p.c_row + column * p.c_column], value);
  }
  result[row * p.result_row + column] = value;
}

[[kernel]] [[max_total_threads_per_threadgroup(SYRK_THREADS)]] void syrk(
    device const float* a [[buffer(0)]], device const float* c [[buffer(1)]], device float* result [[buffer(2)]],
    constant SyrkParams& p [[buffer(3)]], uint group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup float4 left[kDepth * kPitch / 4], right[kDepth * kPitch / 4];

  const uint matrix = group / p.tiles, tile = group % p.tiles;
  const uint tile_row = triangle_row(tile);
  const uint tile_column = tile - triangle_start(tile_row);
  // Threads have neighbouring columns, of the lower triangle where that is wanted, else of the upper one.
  const bool below = p.lower == SYRK_WRITE;
  const uint first_row = (below ? tile_row : tile_column) * SYRK_TILE;
  const uint first_column = (below ? tile_column : tile_row) * SYRK_TILE;
  a += matrix * p.a_batch;
  c += matrix * p.c_batch;
  result += matrix * p.result_batch;

  const bool along_rows = p.a_row == 1;
  const uint across = thread_index % kAcross, down = thread_index / kAcross;
  float4 sum[kRows];
#pragma unroll
  for (uint r = 0; r < kRows; ++r) sum[r] = float4(0.0f);

  float next_left[kShare], next_right[kShare];
  load_share(next_left, a, p, first_row, 0, thread_index, along_rows);
  load_share(next_right, a, p, first_column, 0, thread_index, along_rows);
  for (uint k = 0; k < p.k; k += kDepth) {
    store_share(next_left, (threadgroup float*)left, thread_index, along_rows);
    store_share(next_right, (threadgroup float*)right, thread_index, along_rows);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    load_share(next_left, a, p, first_row, k + kDepth, thread_index, along_rows);
    load_share(next_right, a, p, first_column, k + kDepth, thread_index, along_rows);
#pragma unroll
    for (uint i = 0; i < kDepth; ++i) {
      const float4 rows[2] = {left[i * kPitch / 4 + down * 2], left[i * kPitch / 4 + down * 2 + 1]};
      const float4 columns = right[i * kPitch / 4 + across];
#pragma unroll
      for (uint r = 0; r < kRows; ++r) sum[r] = fma(float4(rows[r / 4][r % 4]), columns, sum[r]);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }

#pragma unroll
  for (uint r = 0; r < kRows; ++r) {
    const uint row = first_row + down * kRows + r;
#pragma unroll
    for (uint s = 0; s < kColumns; ++s) {
      const uint column = first_column + across * kColumns + s;
      if (row >= p.n || column >= p.n || (below ? row < column : row > column)) continue;
      write(result, c, p, row, column, below ? p.lower : p.upper, sum[r][s]);
      if (row != column) write(result, c, p, column, row, below ? p.upper : p.lower, sum[r][s]);
    }
  }
}
