// LU, and with it A X = B, of matrices of up to 32 rows and columns. A simdgroup takes one matrix, or several if LANES
// rows are enough. A lane holds a row of A, and up to 4 QB columns of the same row of B. The pivot's row goes to the
// other lanes through threadgroup memory. Matrices also pass through it on their way in and out, so that lanes move
// neighbouring elements.
#include <metal_stdlib>
using namespace metal;

#include "lu.h"
#include "lu_pivot.h"

constant constexpr uint kSimdgroups = 4;  // per threadgroup

// A row in threadgroup memory: LANES elements, and one more quad against bank conflicts.
template <uint LANES>
struct Row {
  static constexpr constant uint kQuads = LANES / 4 + 1;
  static constexpr constant uint kStride = 4 * kQuads;
};

// The element that a lane moves in step i. Lanes go along rows if a row's elements are closer in memory than a
// column's.
inline uint2 row_and_column(uint i, uint lane, bool along_rows) { return along_rows ? uint2(i, lane) : uint2(lane, i); }

template <uint LANES>
inline void load(threadgroup float* stage, device const float* from, long row_stride, long column_stride, uint rows,
                 uint columns, uint lane) {
  const bool along_rows = column_stride <= row_stride;
#pragma unroll
  for (uint i = 0; i < LANES; ++i) {
    const uint2 at = row_and_column(i, lane, along_rows);
    stage[at.x * Row<LANES>::kStride + at.y] =
        at.x < rows && at.y < columns ? from[at.x * row_stride + at.y * column_stride] : 0.0f;
  }
}

template <uint LANES>
inline void store(threadgroup const float* stage, device float* to, long row_stride, long column_stride, uint rows,
                  uint columns, uint lane) {
  const bool along_rows = column_stride <= row_stride;
#pragma unroll
  for (uint i = 0; i < LANES; ++i) {
    const uint2 at = row_and_column(i, lane, along_rows);
    if (at.x < rows && at.y < columns)
      to[at.x * row_stride + at.y * column_stride] = stage[at.x * Row<LANES>::kStride + at.y];
  }
}

template <uint LANES, uint QB>
[[kernel]] [[max_total_threads_per_threadgroup(32 * kSimdgroups)]] void lu_simd(
    device const float* a [[buffer(0)]], device const float* b [[buffer(1)]], device float* lu [[buffer(2)]],
    device int* pivots [[buffer(3)]], device int* info [[buffer(4)]], device uint* sources [[buffer(5)]],
    device float* x [[buffer(6)]], constant LuParams& p [[buffer(7)]], uint group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint simd_lane [[thread_index_in_simdgroup]]) {
  constexpr uint QA = LANES / 4;
  constexpr uint kRight = QB > 0 ? QB : 1;  // an array cannot be empty
  constexpr uint kMatrices = 32 / LANES;
  constexpr uint kQuads = Row<LANES>::kQuads;
  threadgroup float4 memory[kSimdgroups * kMatrices * LANES * kQuads];

  const uint place_in_group = simdgroup * kMatrices + simd_lane / LANES;
  const uint slot = group * kSimdgroups * kMatrices + place_in_group;
  const uint lane = simd_lane % LANES;
  const bool live = slot < p.matrices * p.tiles;  // the other lanes work on zeros, for the barriers
  const uint matrix = live ? slot / p.tiles : 0;
  const uint tile = live ? slot % p.tiles : 0;
  const bool writes_results = live && tile == 0;  // other tiles take other columns of the same matrix's B
  threadgroup float4* const own = memory + place_in_group * LANES * kQuads;
  threadgroup float* const stage = (threadgroup float*)own;

  // At first a lane's row has the lane's number. `place` is where pivoting puts it.
  uint place = lane;
  bool refused = false;  // given pivots may name rows that do not exist
  if (p.given != LU_MATRIX) {
    uint pivot = lane < p.rows ? uint(pivots[ulong(matrix) * p.rows + lane]) - 1 : lane;
    refused = lanes_max<LANES>(lane < p.rows && pivot >= p.rows ? 1u : 0u) != 0;
    if (refused) pivot = lane;
    for (uint k = 0; k < p.rows; ++k) place = exchanged(place, k, simd_shuffle(pivot, simd_lane - lane + k));
  }
  float4 row[QA], right[kRight];
  load<LANES>(stage, a + matrix * p.a_batch, p.a_row, p.a_column, live ? p.rows : 0, p.columns, lane);
  simdgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
  for (uint j = 0; j < QA; ++j) row[j] = own[place * kQuads + j];
  simdgroup_barrier(mem_flags::mem_threadgroup);
  const uint first_column = tile * p.tile;
  const uint right_columns = live && QB > 0 ? min(p.tile, p.right - first_column) : 0;
  if (QB > 0) {
    const bool given = p.identity == 0;
    const uint from = p.given == LU_ADJOINT ? place : lane;
    if (given)
      load<LANES>(stage, b + matrix * p.b_batch + first_column * p.b_column, p.b_row, p.b_column, p.rows, right_columns,
                  lane);
    simdgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
    for (uint j = 0; j < QB; ++j)
      right[j] = given ? own[from * kQuads + j]
                       : select(float4(0.0f), float4(1.0f), first_column + 4 * j + uint4(0, 1, 2, 3) == lane);
#pragma unroll
    for (uint j = 0; j < QB; ++j) right[j] = refused ? float4(NAN) : right[j];
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }

  const uint steps = min(p.rows, p.columns);
  const bool pivoting = p.pivoting != 0, factor_it = p.given == LU_MATRIX;
  uint chosen = lane, zero = 0;
  for (uint q = 0; q < QA; ++q) {
    const uint end = min(4 * q + 4, steps);
    for (uint k = 4 * q; k < end; ++k) {
      // There are two rows: while slow lanes read one, the next may be written.
      threadgroup float4* const published = own + (k & 1) * (QA + QB);
      const float value = component(row[0], k % 4);
      uint pivot = k;
      if (pivoting) pivot = first_of_largest<LANES>(pivot_key(value, place, k, lane < p.rows), place);
      if (place == pivot) {
        if (p.given == LU_ADJOINT) {
          const Divisor diagonal = divisor(value);
#pragma unroll
          for (uint j = 0; j < QB; ++j) right[j] = right[j] / diagonal;
        }
#pragma unroll
        for (uint j = 0; j < QA; ++j) published[j] = row[j];
#pragma unroll
        for (uint j = 0; j < QB; ++j) published[QA + j] = right[j];
      }
      simdgroup_barrier(mem_flags::mem_threadgroup);
      place = exchanged(place, k, pivot);
      chosen = lane == k ? pivot : chosen;
      const float diagonal = ((threadgroup const float*)published)[k % 4];
      zero = zero == 0 && diagonal == 0.0f ? k + 1 : zero;
      if (place > k) {
        float factor = value;
        if (factor_it) {
          factor = multiplier(value, diagonal, divisor(diagonal), pivoting);
          const float4 rest = fma(float4(-factor), published[0], row[0]);
          const uint4 column = uint4(0, 1, 2, 3);
          row[0] = select(select(row[0], rest, column > k % 4), float4(factor), column == k % 4);
#pragma unroll
          for (uint j = 1; j < QA; ++j)
            if (j < QA - q) row[j] = fma(float4(-factor), published[j], row[j]);
        }
#pragma unroll
        for (uint j = 0; j < QB; ++j) right[j] = fma(float4(-factor), published[QA + j], right[j]);
      }
    }
    rotate(row);
  }
  if (factor_it) {
    if (writes_results && lane == 0) info[matrix] = int(zero);
    if (writes_results && p.sources != 0 && lane < p.rows) sources[ulong(matrix) * p.rows + place] = lane;
    if (writes_results && p.factors != 0 && lane < steps) pivots[ulong(matrix) * steps + lane] = int(chosen) + 1;
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
  if (p.factors != 0) {
#pragma unroll
    for (uint j = 0; j < QA; ++j) own[place * kQuads + j] = row[j];
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
  if (writes_results && p.factors != 0)
    store<LANES>(stage, lu + ulong(matrix) * p.rows * p.columns, p.columns, 1, p.rows, p.columns, lane);
  if (QB == 0) return;

  simdgroup_barrier(mem_flags::mem_threadgroup);
  for (uint back = 0; back < QA; ++back) {
    const uint q = QA - 1 - back;
    rotate_back(row);
    for (uint k = min(4 * q + 4, steps); k > 4 * q;) {
      --k;
      threadgroup float4* const published = own + (k & 1) * QB;
      const float value = component(row[0], k % 4);
      if (place == k) {
        const Divisor diagonal = divisor(p.given == LU_ADJOINT ? 1.0f : value);
#pragma unroll
        for (uint j = 0; j < QB; ++j) published[j] = right[j] = right[j] / diagonal;
      }
      simdgroup_barrier(mem_flags::mem_threadgroup);
      if (place < k) {
#pragma unroll
        for (uint j = 0; j < QB; ++j) right[j] = fma(float4(-value), published[j], right[j]);
      }
    }
  }
  const uint to = p.given == LU_ADJOINT ? lane : place;
  simdgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
  for (uint j = 0; j < QB; ++j) own[to * kQuads + j] = right[j];
  simdgroup_barrier(mem_flags::mem_threadgroup);
  store<LANES>(stage, x + ulong(matrix) * p.rows * p.right + first_column * p.x_column, p.x_row, p.x_column, p.rows,
               right_columns, lane);
}

#define INSTANTIATE(lanes, quads, columns)                                                                            \
  template [[host_name("lu_simd_" #lanes "x" #columns)]] [[kernel]] void lu_simd<lanes, quads>(                       \
      device const float*, device const float*, device float*, device int*, device int*, device uint*, device float*, \
      constant LuParams&, uint, uint, uint);

INSTANTIATE(8, 0, 0)
INSTANTIATE(8, 1, 4)
INSTANTIATE(8, 2, 8)
INSTANTIATE(16, 0, 0)
INSTANTIATE(16, 1, 4)
INSTANTIATE(16, 4, 16)
INSTANTIATE(32, 0, 0)
INSTANTIATE(32, 1, 4)
INSTANTIATE(32, 4, 16)
INSTANTIATE(32, 8, 32)
