// LU by one threadgroup, for matrices that fit its registers. The threads form G
// groups of row_threads threads. In group g each thread holds one row of the columns 4 (g + G j) + {0, 1, 2, 3}, j in
// QUADS. All threads of a simdgroup are in one group, so they read the same elements of the pivot's row.
#include <metal_stdlib>
using namespace metal;

#include "lu.h"
#include "lu_pivot.h"

// Quad `at` of a row, with zeros beyond `columns`. `as_float4`: the row has all of the quad or nothing, in aligned
// memory.
template <typename T>
inline typename FourOf<T>::Type load_quad(device const T* row, long stride, uint at, uint columns, bool as_float4) {
  const uint column = 4 * at;
  if (as_float4) return column < columns ? four_at(row + column) : four_of(T(0.0f));
  typename FourOf<T>::Type quad;
#pragma unroll
  for (uint e = 0; e < 4; ++e) set_entry(quad, e, column + e < columns ? row[(column + e) * stride] : T(0.0f));
  return quad;
}

template <typename T>
inline void store_quad(typename FourOf<T>::Type quad, device T* row, uint at, uint columns, bool as_float4) {
  const uint column = 4 * at;
  if (as_float4) {
    if (column < columns) set_four_at(row + column, quad);
    return;
  }
#pragma unroll
  for (uint e = 0; e < 4; ++e)
    if (column + e < columns) row[column + e] = entry(quad, e);
}

template <uint QUADS, uint THREADS, typename T>
struct Shared {
  typename FourOf<T>::Type pivot_row[QUADS * THREADS / 32];  // QUADS for each g
  T column[THREADS];                                         // the column that is eliminated
  uint2 largest[32];                                         // its largest in each simdgroup: the key and ~place
};

// The factor by which a row subtracts the pivot's, whose magnitude is known before its sign.
inline float block_multiplier(float value, float on_diagonal, float magnitude, bool pivoting) {
  const float quotient = multiplier(value, magnitude, divisor(magnitude), pivoting);
  return on_diagonal < 0.0f ? -quotient : quotient;
}
inline float2 block_multiplier(float2 value, float2 on_diagonal, float, bool pivoting) {
  return multiplier(value, on_diagonal, divisor(on_diagonal), pivoting);
}

template <uint QUADS, uint THREADS, typename T>
inline void factor(device const T* a, device T* lu, device int* pivots, device int* info, device uint* sources,
                   constant LuParams& p, threadgroup Shared<QUADS, THREADS, T>& shared, uint matrix, uint thread_index,
                   uint threads) {
  const uint lane = thread_index % 32;
  const uint simdgroups = p.row_threads / 32;  // the simdgroups that hold one column
  const uint simdgroup = thread_index / 32 % simdgroups;
  const uint g = thread_index / 32 / simdgroups;
  const uint G = threads / p.row_threads;
  const uint row = 32 * simdgroup + lane;
  const uint columns = row < p.rows ? p.columns : 0;
  const bool whole = p.columns % 4 == 0;

  typedef typename FourOf<T>::Type Four;
  Four held[QUADS];
  {
    device const T* const from = a + matrix * p.a_batch + row * p.a_row;
    const bool as_float4 = whole && (p.as_float4 & LU_VECTORS_A) != 0;
#pragma unroll
    for (uint j = 0; j < QUADS; ++j) held[j] = load_quad(from, p.a_column, g + G * j, columns, as_float4);
  }

  const uint steps = min(p.rows, p.columns);
  const bool pivoting = p.pivoting != 0;
  threadgroup Four* const own = shared.pivot_row + QUADS * g;
  device int* const to_pivots = pivots + ulong(matrix) * p.pivots_batch;
  uint place = row, zero = 0;  // `place` is where pivoting puts the row

  for (uint j = 0; j < QUADS; ++j) {
    const uint end = min(4 * G * (j + 1), steps);
    for (uint k = 4 * G * j; k < end; ++k) {
      const uint holder = k / 4 - G * j;
      if (holder == g) {
        const T value = component(held[0], k % 4);
        shared.column[row] = value;
        const uint key = pivot_key(value, place, k, columns > 0 && (pivoting || place == k)), most = simd_max(key);
        const uint first = simd_max(key == most ? ~place : 0);
        if (lane == 0) shared.largest[simdgroup] = uint2(most, first);
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      const T value = shared.column[row];
      const uint2 candidate = lane < simdgroups ? shared.largest[lane] : uint2(0, 0);
      const uint most = simd_max(candidate.x);
      const uint pivot = ~simd_max(candidate.x == most ? candidate.y : 0);
      if (place == pivot) {
#pragma unroll
        for (uint i = 0; i < QUADS; ++i) own[i] = held[i];
      }
      const float magnitude = as_type<float>(most - 1);  // the pivot's, from which its key was made
      place = exchanged(place, k, pivot);
      if (thread_index == 0) to_pivots[k] = int(pivot) + 1;
      zero = zero == 0 && magnitude == 0.0f ? k + 1 : zero;
      threadgroup_barrier(mem_flags::mem_threadgroup);
      if (place > k) {
        const T on_diagonal = taken(static_cast<threadgroup const Four*>(shared.pivot_row + QUADS * holder), k % 4);
        const T factor = block_multiplier(value, on_diagonal, magnitude, pivoting);
        const uint4 at = 4 * (g + G * j) + uint4(0, 1, 2, 3);
        held[0] = choose(held[0], minus_product(held[0], factor, own[0]), at > k);
        held[0] = choose(held[0], four_of(factor), at == k);
#pragma unroll
        for (uint i = 1; i < QUADS; ++i)
          if (i < QUADS - j) held[i] = minus_product(held[i], factor, own[i]);
      }
    }
    rotate(held);
  }

  if (thread_index == 0) info[matrix] = int(zero);
  if (p.sources != 0 && g == 0 && columns > 0) sources[ulong(matrix) * p.rows + place] = row;
  device T* const to = lu + matrix * p.lu_batch + place * p.lu_row;
  const bool as_float4 = whole && (p.as_float4 & LU_VECTORS_LU) != 0;
#pragma unroll
  for (uint j = 0; j < QUADS; ++j) store_quad(held[j], to, g + G * j, columns, as_float4);
}

// With fewer threads each can have more registers.
template <uint QUADS, uint MOST, typename T>
[[kernel]] [[max_total_threads_per_threadgroup(MOST)]] void lu_block(
    device const T* a [[buffer(0)]], device T* lu [[buffer(1)]], device int* pivots [[buffer(2)]],
    device int* info [[buffer(3)]], device uint* sources [[buffer(4)]], constant LuParams& p [[buffer(5)]],
    uint matrix [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]]) {
  threadgroup Shared<QUADS, MOST, T> shared;
  factor(a, lu, pivots, info, sources, p, shared, matrix, thread_index, threads);
}

#define INSTANTIATE(name, quads, most, type)                                \
  template [[host_name(name)]] [[kernel]] void lu_block<quads, most, type>( \
      device const type*, device type*, device int*, device int*, device uint*, constant LuParams&, uint, uint, uint);

INSTANTIATE("lu_block_4", 4, 1024, float)
INSTANTIATE("lu_block_8", 8, 512, float)
INSTANTIATE("lu_block_16", 16, 512, float)
INSTANTIATE("lu_block_complex_4", 4, 512, float2)
INSTANTIATE("lu_block_complex_8", 8, 512, float2)
