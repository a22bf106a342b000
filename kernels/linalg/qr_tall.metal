// TSQR (Demmel, Grigori, Hoemmen, Langou 2012): the blocks of rows of a tall matrix are factored by themselves, then
// the stack of their R, and so on. Q is put together from the last level to the first. The LU of Q's top gives the
// signs that LAPACK's reflectors would give R's diagonal: its pivots are those reflectors' first entries (Ballard et
// al. 2014).
#include <metal_stdlib>
using namespace metal;

#include "qr.h"

constant constexpr uint kLargest = 64;  // columns
constant constexpr uint kThreads = 256;

// The signs of `columns` columns, and R with these signs on its rows. The top of Q is the top of the first level's Q
// times the top of the level above.
[[kernel]] [[max_total_threads_per_threadgroup(kThreads)]] void qr_tall_signs(
    device const float* q [[buffer(0)]], device const float* above [[buffer(1)]], device float* r [[buffer(2)]],
    device float* signs [[buffer(3)]], constant QrTallParams& p [[buffer(4)]],
    uint matrix [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup float w[kLargest * kLargest];
  threadgroup float sign[kLargest];
  const uint n = p.columns;
  q += ulong(matrix) * p.rows * n;
  above += ulong(matrix) * p.blocks * n * n;
  r += ulong(matrix) * n * n;

  for (uint at = thread_index; at < n * n; at += kThreads) {
    const uint i = at / n, j = at % n;
    float sum = 0.0f;
    for (uint k = 0; k < n; ++k) sum = fma(q[i * n + k], above[k * n + j], sum);
    w[at] = sum;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint k = 0; k < n; ++k) {
    const float alpha = w[k * n + k];
    // A column that is the identity's needs no reflector, and keeps its sign.
    bool is_identity = alpha == 1.0f;
    if (is_identity)
      for (uint i = k + 1; i < n; ++i) is_identity = is_identity && w[i * n + k] == 0.0f;
    const float s = is_identity ? 1.0f : -copysign(1.0f, alpha);
    if (thread_index == 0) sign[k] = s;
    const float inverse = is_identity ? 0.0f : 1.0f / (alpha - s);
    const uint left = n - k - 1;
    for (uint at = thread_index; at < left * left; at += kThreads) {
      const uint i = k + 1 + at / left, j = k + 1 + at % left;
      w[i * n + j] = fma(-inverse * w[i * n + k], w[k * n + j], w[i * n + j]);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  for (uint at = thread_index; at < n * n; at += kThreads) r[at] *= sign[at / n];
  if (thread_index < n) signs[matrix * n + thread_index] = sign[thread_index];
}

constant constexpr uint kTileRows = 32;  // rows of Q in threadgroup memory at once
constant constexpr uint kRowsEach = kTileRows * 32 / kThreads;

// Multiplies each block of Q by its factor. A threadgroup takes QR_TALL_ROWS rows of one block.
[[kernel]] [[max_total_threads_per_threadgroup(kThreads)]] void qr_tall_combine(
    device const float* q [[buffer(0)]], device const float* above [[buffer(1)]],
    device const float* signs [[buffer(2)]], device float* result [[buffer(3)]], constant QrTallParams& p [[buffer(4)]],
    uint group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup float factor[kLargest * kLargest];
  threadgroup float tile[kTileRows * kLargest];
  const uint n = p.columns;
  const uint lane = thread_index % 32, simdgroup = thread_index / 32;
  const uint index = group / p.tiles;  // the block's number over all matrices
  const uint matrix = index / p.blocks, block = index % p.blocks;
  const uint first = block * p.block_rows;
  const uint end = min(first + p.block_rows, p.rows);
  const uint tile_row = first + group % p.tiles * QR_TALL_ROWS;
  q += ulong(matrix) * p.rows * n;
  result += ulong(matrix) * p.rows * n;
  above += ulong(index) * n * n;

  for (uint at = thread_index; at < n * n; at += kThreads)
    factor[at] = p.with_signs ? above[at] * signs[matrix * n + at % n] : above[at];
  for (uint i = 0; i < QR_TALL_ROWS; i += kTileRows) {
    const uint row = tile_row + i;
    const uint rows = row < end ? min(kTileRows, end - row) : 0;
    for (uint at = thread_index; at < kTileRows * n; at += kThreads)
      tile[at] = at < rows * n ? q[ulong(row) * n + at] : 0.0f;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint column = lane; column < n; column += 32) {
      float sum[kRowsEach];
#pragma unroll
      for (uint e = 0; e < kRowsEach; ++e) sum[e] = 0.0f;
      for (uint k = 0; k < n; ++k) {
        const float f = factor[k * n + column];
#pragma unroll
        for (uint e = 0; e < kRowsEach; ++e) sum[e] = fma(tile[(simdgroup * kRowsEach + e) * n + k], f, sum[e]);
      }
#pragma unroll
      for (uint e = 0; e < kRowsEach; ++e) {
        const uint at = simdgroup * kRowsEach + e;
        if (at < rows) result[ulong(row + at) * n + column] = sum[e];
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
}
