// QR, or half of it (QrParams::task), of matrices that fit the registers of one threadgroup. G lanes share a column. A
// threadgroup has G lanes for each column of A or Q, rounded up to whole simdgroups. A reflector takes one barrier,
// because the next one is written to the other of two places in threadgroup memory.
#include <metal_stdlib>
using namespace metal;

#include "column_tile.h"
#include "qr.h"

template <uint G, uint QUADS, typename T>
[[kernel]] [[max_total_threads_per_threadgroup(512)]] void qr_block(
    device const T* a [[buffer(0)]], device T* q [[buffer(1)]], device T* r [[buffer(2)]],
    constant QrParams& p [[buffer(3)]], device T* taus [[buffer(4)]], uint matrix [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  typedef ColumnTile<G, QUADS, T> Tile;
  typedef typename Tile::Four Four;
  threadgroup Four reflectors[2 * Tile::kSlots];

  const uint g = thread_index % G;
  const uint column = thread_index / G;
  const uint simdgroup_column = thread_index / 32 * (32 / G);  // the first of this simdgroup's columns
  const uint block_index = matrix % p.blocks;
  const uint first_row = block_index * p.block_rows;
  const uint rows = min(p.block_rows, p.rows - first_row);  // the other rows count as zeros
  const uint count = min(p.block_rows, p.reflectors);
  const uint computed = p.task == QR_FORM ? 0 : count;  // others are given

  Tile tile;
  {
    device const T* from =
        a + (matrix / p.blocks) * p.batch_stride + first_row * p.row_stride + column * p.column_stride;
#pragma unroll
    for (uint i = 0; i < QUADS; ++i) {
      const uint4 row = Tile::rows_of(i, g);
#pragma unroll
      for (uint e = 0; e < 4; ++e)
        set_entry(tile.x[i], e, column < p.columns && row[e] < rows ? from[row[e] * p.row_stride] : T(0.0f));
    }
  }

  T tau = p.task == QR_FORM && column < count ? taus[ulong(matrix) * count + column] : T(0.0f);
  for (uint block = 0; block < QUADS; ++block) {
    const uint end = min((block + 1) * Tile::kBlock, computed);
    for (uint k = block * Tile::kBlock; k < end; ++k) {
      threadgroup Four* const v = reflectors + (k & 1) * Tile::kSlots;
      if (k - simdgroup_column < 32 / G) make_and_publish(tile, block, thread_index % 32, k, column == k, v, tau);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      if (simdgroup_column + 32 / G > k + 1) {
        const T factor = times(conjugate(tau_of(tile, v)), dot_with(tile, block, g, v));
        if (column > k) subtract(tile, block, g, v, factor);
      }
    }
  }

  if (p.task != QR_FORM && column < p.columns) {
    const bool packed = p.task == QR_REFLECTORS;
    if (packed && g == 0 && column < count) taus[ulong(matrix) * count + column] = tau;
    device T* to = r + ulong(matrix) * p.r_rows * p.columns + column;
#pragma unroll
    for (uint i = 0; i < QUADS; ++i) {
      const uint4 row = Tile::rows_of(i, g);
#pragma unroll
      for (uint e = 0; e < 4; ++e)
        if (row[e] < p.r_rows) to[row[e] * p.columns] = packed || row[e] <= column ? entry(tile.x[i], e) : T(0.0f);
    }
  }
  if (p.q_columns == 0) return;

  keep_reflectors(tile, g, column, count);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint back = 0; back < QUADS; ++back) {
    const uint block = QUADS - 1 - back;
    const uint begin = block * Tile::kBlock;
    for (uint k = min(begin + Tile::kBlock, count); k > begin;) {
      --k;
      threadgroup Four* const v = reflectors + (k & 1) * Tile::kSlots;
      publish_and_reset(tile, block, g, k, column == k, v, tau);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      if (simdgroup_column + 32 / G > k) {
        const T factor = times(tau_of(tile, v), dot_with(tile, block, g, v));
        if (column >= k) subtract(tile, block, g, v, factor);
      }
    }
  }
  if (column < p.q_columns) {
    device T* to = q + (ulong(matrix / p.blocks) * p.rows + first_row) * p.q_columns + column;
#pragma unroll
    for (uint i = 0; i < QUADS; ++i) {
      const uint4 row = Tile::rows_of(i, g);
#pragma unroll
      for (uint e = 0; e < 4; ++e)
        if (row[e] < rows) to[row[e] * p.q_columns] = entry(tile.x[i], e);
    }
  }
}

#define INSTANTIATE(lanes, quads, rows)                                                                  \
  template [[host_name("qr_block_" #rows)]] [[kernel]] void qr_block<lanes, quads, float>(               \
      device const float*, device float*, device float*, constant QrParams&, device float*, uint, uint); \
  template [[host_name("qr_block_complex_" #rows)]] [[kernel]] void qr_block<lanes, quads, float2>(      \
      device const float2*, device float2*, device float2*, constant QrParams&, device float2*, uint, uint);

INSTANTIATE(4, 4, 64)
INSTANTIATE(4, 8, 128)
INSTANTIATE(8, 8, 256)
INSTANTIATE(16, 8, 512)
INSTANTIATE(32, 8, 1024)
