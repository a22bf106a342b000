// LU, and with it A X = B, of matrices of up to 32 rows and columns. A simdgroup takes one matrix, or several if LANES
// rows are enough. A lane holds a row of A, and up to 4 QB columns of the same row of B. The pivot's row goes to the
// other lanes through threadgroup memory. Matrices also pass through it on their way in and out, so that lanes move
// neighbouring elements.
#include <metal_stdlib>
using namespace metal;

#include "lu.h"
#include "lu_pivot.h"

// A row in threadgroup memory: LANES elements, and one more quad against bank conflicts.
template <uint LANES>
struct Row {
  static constexpr constant uint kQuads = LANES / 4 + 1;
  static constexpr constant uint kStride = 4 * kQuads;
};

// The element that a lane moves in step i. Lanes go along rows if a row's elements are closer in memory than a
// column's.
inline uint2 row_and_column(uint i, uint lane, bool along_rows) { return along_rows ? uint2(i, lane) : uint2(lane, i); }

template <uint LANES, typename T>
inline void load(threadgroup typename FourOf<T>::Type* stage, device const T* from, long row_stride, long column_stride,
                 uint rows, uint columns, uint lane) {
  const bool along_rows = column_stride <= row_stride;
#pragma unroll
  for (uint i = 0; i < LANES; ++i) {
    const uint2 at = row_and_column(i, lane, along_rows);
    put(stage, at.x * Row<LANES>::kStride + at.y,
        at.x < rows && at.y < columns ? from[at.x * row_stride + at.y * column_stride] : T(0.0f));
  }
}

template <uint LANES, typename T>
inline void store(threadgroup const typename FourOf<T>::Type* stage, device T* to, long row_stride, long column_stride,
                  uint rows, uint columns, uint lane) {
  const bool along_rows = column_stride <= row_stride;
#pragma unroll
  for (uint i = 0; i < LANES; ++i) {
    const uint2 at = row_and_column(i, lane, along_rows);
    if (at.x < rows && at.y < columns)
      to[at.x * row_stride + at.y * column_stride] = taken(stage, at.x * Row<LANES>::kStride + at.y);
  }
}

template <uint LANES, uint QB, uint kSimdgroups, typename T>
[[kernel]] [[max_total_threads_per_threadgroup(32 * kSimdgroups)]] void lu_simd(
    device const T* a [[buffer(0)]], device const T* b [[buffer(1)]], device T* lu [[buffer(2)]],
    device int* pivots [[buffer(3)]], device int* info [[buffer(4)]], device uint* sources [[buffer(5)]],
    device T* x [[buffer(6)]], constant LuParams& p [[buffer(7)]], uint group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint simd_lane [[thread_index_in_simdgroup]]) {
  typedef typename FourOf<T>::Type Four;
  constexpr uint QA = LANES / 4;
  constexpr uint kRight = QB > 0 ? QB : 1;  // an array cannot be empty
  constexpr uint kMatrices = 32 / LANES;
  constexpr uint kQuads = Row<LANES>::kQuads;
  threadgroup Four memory[kSimdgroups * kMatrices * LANES * kQuads];

  const uint place_in_group = simdgroup * kMatrices + simd_lane / LANES;
  const uint slot = group * kSimdgroups * kMatrices + place_in_group;
  const uint lane = simd_lane % LANES;
  const bool live = slot < p.matrices * p.tiles;  // the other lanes work on zeros, for the barriers
  const uint matrix = live ? slot / p.tiles : 0;
  const uint tile = live ? slot % p.tiles : 0;
  const bool writes_results = live && tile == 0;  // other tiles take other columns of the same matrix's B
  threadgroup Four* const own = memory + place_in_group * LANES * kQuads;

  // At first a lane's row has the lane's number. `place` is where pivoting puts it.
  uint place = lane;
  bool refused = false;  // given pivots may name rows that do not exist
  if (p.given != LU_MATRIX) {
    uint pivot = lane < p.rows ? uint(pivots[ulong(matrix) * p.rows + lane]) - 1 : lane;
    refused = lanes_max<LANES>(lane < p.rows && pivot >= p.rows ? 1u : 0u) != 0;
    if (refused) pivot = lane;
    for (uint k = 0; k < p.rows; ++k) place = exchanged(place, k, simd_shuffle(pivot, simd_lane - lane + k));
  }
  Four row[QA], right[kRight];
  load<LANES, T>(own, a + matrix * p.a_batch, p.a_row, p.a_column, live ? p.rows : 0, p.columns, lane);
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
      load<LANES, T>(own, b + matrix * p.b_batch + first_column * p.b_column, p.b_row, p.b_column, p.rows,
                     right_columns, lane);
    simdgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
    for (uint j = 0; j < QB; ++j)
      right[j] =
          given ? own[from * kQuads + j]
                : choose(four_of(T(0.0f)), four_of(number<T>(1.0f)), first_column + 4 * j + uint4(0, 1, 2, 3) == lane);
#pragma unroll
    for (uint j = 0; j < QB; ++j) right[j] = refused ? four_of(T(NAN)) : right[j];
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }

  const uint steps = min(p.rows, p.columns);
  const bool pivoting = p.pivoting != 0, factor_it = p.given == LU_MATRIX;
  uint chosen = lane, zero = 0;
  for (uint q = 0; q < QA; ++q) {
    const uint end = min(4 * q + 4, steps);
    for (uint k = 4 * q; k < end; ++k) {
      // There are two rows: while slow lanes read one, the next may be written.
      threadgroup Four* const published = own + (k & 1) * (QA + QB);
      const T value = component(row[0], k % 4);
      uint pivot = k;
      if (pivoting) pivot = first_of_largest<LANES>(pivot_key(value, place, k, lane < p.rows), place);
      if (place == pivot) {
        if (p.given == LU_ADJOINT) {
          const auto diagonal = divisor(value);
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
      const T diagonal = taken(published, k % 4);
      zero = zero == 0 && is_zero(diagonal) ? k + 1 : zero;
      if (place > k) {
        T factor = value;
        if (factor_it) {
          factor = multiplier(value, diagonal, divisor(diagonal), pivoting);
          const Four rest = minus_product(row[0], factor, published[0]);
          const uint4 column = uint4(0, 1, 2, 3);
          row[0] = choose(choose(row[0], rest, column > k % 4), four_of(factor), column == k % 4);
#pragma unroll
          for (uint j = 1; j < QA; ++j)
            if (j < QA - q) row[j] = minus_product(row[j], factor, published[j]);
        }
#pragma unroll
        for (uint j = 0; j < QB; ++j) right[j] = minus_product(right[j], factor, published[QA + j]);
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
    store<LANES, T>(own, lu + ulong(matrix) * p.rows * p.columns, p.columns, 1, p.rows, p.columns, lane);
  if (QB == 0) return;

  simdgroup_barrier(mem_flags::mem_threadgroup);
  for (uint back = 0; back < QA; ++back) {
    const uint q = QA - 1 - back;
    rotate_back(row);
    for (uint k = min(4 * q + 4, steps); k > 4 * q;) {
      --k;
      threadgroup Four* const published = own + (k & 1) * QB;
      const T value = component(row[0], k % 4);
      if (place == k) {
        const auto diagonal = divisor(p.given == LU_ADJOINT ? number<T>(1.0f) : value);
#pragma unroll
        for (uint j = 0; j < QB; ++j) published[j] = right[j] = right[j] / diagonal;
      }
      simdgroup_barrier(mem_flags::mem_threadgroup);
      if (place < k) {
#pragma unroll
        for (uint j = 0; j < QB; ++j) right[j] = minus_product(right[j], value, published[j]);
      }
    }
  }
  const uint to = p.given == LU_ADJOINT ? lane : place;
  simdgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
  for (uint j = 0; j < QB; ++j) own[to * kQuads + j] = right[j];
  simdgroup_barrier(mem_flags::mem_threadgroup);
  store<LANES, T>(own, x + ulong(matrix) * p.rows * p.right + first_column * p.x_column, p.x_row, p.x_column, p.rows,
                  right_columns, lane);
}

#define INSTANTIATE(name, lanes, quads, columns, simdgroups, type)                                                \
  template [[host_name(name #lanes "x" #columns)]] [[kernel]] void lu_simd<lanes, quads, simdgroups, type>(       \
      device const type*, device const type*, device type*, device int*, device int*, device uint*, device type*, \
      constant LuParams&, uint, uint, uint);

INSTANTIATE("lu_simd_", 8, 0, 0, 4, float)
INSTANTIATE("lu_simd_", 8, 1, 4, 4, float)
INSTANTIATE("lu_simd_", 8, 2, 8, 4, float)
INSTANTIATE("lu_simd_", 16, 0, 0, 4, float)
INSTANTIATE("lu_simd_", 16, 1, 4, 4, float)
INSTANTIATE("lu_simd_", 16, 4, 16, 4, float)
INSTANTIATE("lu_simd_", 32, 0, 0, 4, float)
INSTANTIATE("lu_simd_", 32, 1, 4, 4, float)
INSTANTIATE("lu_simd_", 32, 4, 16, 4, float)
INSTANTIATE("lu_simd_", 32, 8, 32, 4, float)
INSTANTIATE("lu_simd_complex_", 8, 0, 0, 2, float2)
INSTANTIATE("lu_simd_complex_", 8, 1, 4, 2, float2)
INSTANTIATE("lu_simd_complex_", 8, 2, 8, 2, float2)
INSTANTIATE("lu_simd_complex_", 16, 0, 0, 2, float2)
INSTANTIATE("lu_simd_complex_", 16, 1, 4, 2, float2)
INSTANTIATE("lu_simd_complex_", 16, 4, 16, 2, float2)
INSTANTIATE("lu_simd_complex_", 32, 0, 0, 2, float2)
INSTANTIATE("lu_simd_complex_", 32, 1, 4, 2, float2)
INSTANTIATE("lu_simd_complex_", 32, 4, 16, 2, float2)
