// QR of small matrices, or half of it (QrParams::task). A simdgroup takes one (LANES = 32) or several matrices, and a
// lane holds a column in registers.
#include <metal_stdlib>
using namespace metal;

#include "column_tile.h"
#include "qr.h"

constant constexpr uint kSimdgroups = 4;  // per threadgroup

template <uint ROWS, uint LANES>
[[kernel]] [[max_total_threads_per_threadgroup(32 * kSimdgroups)]] void qr_simd(
    device const float* a [[buffer(0)]], device float* q [[buffer(1)]], device float* r [[buffer(2)]],
    constant QrParams& p [[buffer(3)]], device float* taus [[buffer(4)]], uint group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  typedef ColumnTile<1, ROWS / 4> Tile;
  constexpr uint kMatrices = 32 / LANES;
  constexpr uint kBlocks = (LANES < ROWS ? LANES : ROWS) / Tile::kBlock;
  // There are two reflectors: while slow lanes read one, the next may be written.
  threadgroup float4 reflectors[kSimdgroups * kMatrices * 2 * Tile::kSlots];

  const uint slot = simdgroup * kMatrices + lane / LANES;
  const uint matrix = group * kSimdgroups * kMatrices + slot;
  const uint column = lane % LANES;
  const bool live = matrix < p.matrices;  // the other lanes work on zeros, for the barriers
  const uint count = p.reflectors;
  const uint computed = p.task == QR_FORM ? 0 : count;  // others are given
  threadgroup float4* const published = reflectors + slot * 2 * Tile::kSlots;

  Tile tile;
  {
    device const float* from = a + matrix * p.batch_stride + column * p.column_stride;
    const bool has_column = live && column < p.columns;
#pragma unroll
    for (uint i = 0; i < ROWS; ++i) tile.x[i / 4][i % 4] = has_column && i < p.rows ? from[i * p.row_stride] : 0.0f;
  }

  float tau = p.task == QR_FORM && live && column < count ? taus[ulong(matrix) * count + column] : 0.0f;
  for (uint block = 0; block < kBlocks; ++block) {
    const uint end = min((block + 1) * Tile::kBlock, computed);
    for (uint k = block * Tile::kBlock; k < end; ++k) {
      threadgroup float4* const v = published + (k & 1) * Tile::kSlots;
      if (column == k) make_and_publish(tile, block, lane, k, true, v, tau);
      simdgroup_barrier(mem_flags::mem_threadgroup);
      if (column > k) subtract(tile, block, 0, v, dot_with(tile, block, 0, v) * v[Tile::kSlots - 1].x);
    }
  }

  if (p.task != QR_FORM && live && column < p.columns) {
    const bool packed = p.task == QR_REFLECTORS;
    if (packed && column < count) taus[ulong(matrix) * count + column] = tau;
    device float* to = r + ulong(matrix) * p.r_rows * p.columns + column;
#pragma unroll
    for (uint i = 0; i < ROWS; ++i)
      if (i < p.r_rows) to[i * p.columns] = packed || i <= column ? tile.x[i / 4][i % 4] : 0.0f;
  }
  if (p.q_columns == 0) return;

  // Q is H₀ H₁ … applied to the columns of the identity, with the last reflector first.
  keep_reflectors(tile, 0, column, count);
  simdgroup_barrier(mem_flags::mem_threadgroup);
  for (uint back = 0; back < kBlocks; ++back) {
    const uint block = kBlocks - 1 - back;
    const uint begin = block * Tile::kBlock;
    for (uint k = min(begin + Tile::kBlock, count); k > begin;) {
      --k;
      threadgroup float4* const v = published + (k & 1) * Tile::kSlots;
      publish_and_reset(tile, block, 0, k, column == k, v, tau);
      simdgroup_barrier(mem_flags::mem_threadgroup);
      if (column >= k) subtract(tile, block, 0, v, dot_with(tile, block, 0, v) * v[Tile::kSlots - 1].x);
    }
  }
  if (live && column < p.q_columns) {
    device float* to = q + ulong(matrix) * p.rows * p.q_columns + column;
#pragma unroll
    for (uint i = 0; i < ROWS; ++i)
      if (i < p.rows) to[i * p.q_columns] = tile.x[i / 4][i % 4];
  }
}

#define INSTANTIATE(rows, lanes)                                                            \
  template [[host_name("qr_simd_" #rows "x" #lanes)]] [[kernel]] void qr_simd<rows, lanes>( \
      device const float*, device float*, device float*, constant QrParams&, device float*, uint, uint, uint);
#define INSTANTIATE_ROWS(rows) INSTANTIATE(rows, 8) INSTANTIATE(rows, 16) INSTANTIATE(rows, 32)

INSTANTIATE_ROWS(8)
INSTANTIATE_ROWS(16)
INSTANTIATE_ROWS(32)
INSTANTIATE_ROWS(64)
