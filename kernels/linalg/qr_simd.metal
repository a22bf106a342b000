// QR of small matrices, or half of it (QrParams::task). A simdgroup takes one (LANES = 32) or several matrices, and a
// lane holds a column in registers.
#include <metal_stdlib>
using namespace metal;

#include "column_tile.h"
#include "qr.h"

constant constexpr uint kSimdgroups = 4;  // per threadgroup

template <uint ROWS, uint LANES, typename T>
[[kernel]] [[max_total_threads_per_threadgroup(32 * kSimdgroups)]] void qr_simd(
    device const T* a [[buffer(0)]], device T* q [[buffer(1)]], device T* r [[buffer(2)]],
    constant QrParams& p [[buffer(3)]], device T* taus [[buffer(4)]], uint group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  typedef ColumnTile<1, ROWS / 4, T> Tile;
  typedef typename Tile::Four Four;
  constexpr uint kMatrices = 32 / LANES;
  constexpr uint kBlocks = (LANES < ROWS ? LANES : ROWS) / Tile::kBlock;
  // There are two reflectors: while slow lanes read one, the next may be written.
  threadgroup Four reflectors[kSimdgroups * kMatrices * 2 * Tile::kSlots];

  const uint slot = simdgroup * kMatrices + lane / LANES;
  const uint matrix = group * kSimdgroups * kMatrices + slot;
  const uint column = lane % LANES;
  const bool live = matrix < p.matrices;  // the other lanes work on zeros, for the barriers
  const uint count = p.reflectors;
  const uint computed = p.task == QR_FORM ? 0 : count;  // others are given
  threadgroup Four* const published = reflectors + slot * 2 * Tile::kSlots;

  Tile tile;
  {
    device const T* from = a + matrix * p.batch_stride + column * p.column_stride;
    const bool has_column = live && column < p.columns;
#pragma unroll
    for (uint i = 0; i < ROWS; ++i)
      set_entry(tile.x[i / 4], i % 4, has_column && i < p.rows ? from[i * p.row_stride] : T(0.0f));
  }

  T tau = p.task == QR_FORM && live && column < count ? taus[ulong(matrix) * count + column] : T(0.0f);
  for (uint block = 0; block < kBlocks; ++block) {
    const uint end = min((block + 1) * Tile::kBlock, computed);
    for (uint k = block * Tile::kBlock; k < end; ++k) {
      threadgroup Four* const v = published + (k & 1) * Tile::kSlots;
      if (column == k) make_and_publish(tile, block, lane, k, true, v, tau);
      simdgroup_barrier(mem_flags::mem_threadgroup);
      if (column > k) subtract(tile, block, 0, v, times(conjugate(tau_of(tile, v)), dot_with(tile, block, 0, v)));
    }
  }

  if (p.task != QR_FORM && live && column < p.columns) {
    const bool packed = p.task == QR_REFLECTORS;
    if (packed && column < count) taus[ulong(matrix) * count + column] = tau;
    device T* to = r + ulong(matrix) * p.r_rows * p.columns + column;
#pragma unroll
    for (uint i = 0; i < ROWS; ++i)
      if (i < p.r_rows) to[i * p.columns] = packed || i <= column ? entry(tile.x[i / 4], i % 4) : T(0.0f);
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
      threadgroup Four* const v = published + (k & 1) * Tile::kSlots;
      publish_and_reset(tile, block, 0, k, column == k, v, tau);
      simdgroup_barrier(mem_flags::mem_threadgroup);
      if (column >= k) subtract(tile, block, 0, v, times(tau_of(tile, v), dot_with(tile, block, 0, v)));
    }
  }
  if (live && column < p.q_columns) {
    device T* to = q + ulong(matrix) * p.rows * p.q_columns + column;
#pragma unroll
    for (uint i = 0; i < ROWS; ++i)
      if (i < p.rows) to[i * p.q_columns] = entry(tile.x[i / 4], i % 4);
  }
}

#define INSTANTIATE(name, type, rows, lanes)                                                \
  template [[host_name(name #rows "x" #lanes)]] [[kernel]] void qr_simd<rows, lanes, type>( \
      device const type*, device type*, device type*, constant QrParams&, device type*, uint, uint, uint);
#define INSTANTIATE_ROWS(name, type, rows) \
  INSTANTIATE(name, type, rows, 8) INSTANTIATE(name, type, rows, 16) INSTANTIATE(name, type, rows, 32)

INSTANTIATE_ROWS("qr_simd_", float, 8)
INSTANTIATE_ROWS("qr_simd_", float, 16)
INSTANTIATE_ROWS("qr_simd_", float, 32)
INSTANTIATE_ROWS("qr_simd_", float, 64)
INSTANTIATE_ROWS("qr_simd_complex_", float2, 8)
INSTANTIATE_ROWS("qr_simd_complex_", float2, 16)
INSTANTIATE_ROWS("qr_simd_complex_", float2, 32)
