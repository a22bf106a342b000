// Triangular systems of order up to 32, one or several per simdgroup, with their triangles in threadgroup memory.
#include <metal_stdlib>
using namespace metal;

#include "triangular_tile.h"

// Loads the triangles of a simdgroup's SLOTS systems, of which the first is `slot`.
template <typename T, uint N, uint SLOTS>
inline void load_triangles(threadgroup typename FourOf<T>::Type* tiles, device const T* a, constant TriangularParams& p,
                           uint slot, uint lane) {
  typedef Tile<N, N, T> Triangle;
  constexpr uint kAll = SLOTS * Triangle::kFours;
  constexpr uint kEach = 4;  // loads that are under way at once
  for (uint done = 0; done < kAll; done += 32 * kEach) {
    typename FourOf<T>::Type fours[kEach];
#pragma unroll
    for (uint i = 0; i < kEach; ++i) {
      const uint at = done + i * 32 + lane;
      const uint matrix = (slot + at / Triangle::kFours) / p.column_tiles;
      const uint order = at < kAll && matrix < p.matrices ? p.order : 0;
      fours[i] = Triangle::fetch(matrix_at(a, p.a, matrix), p.a, order, order, at % Triangle::kFours, true);
    }
#pragma unroll
    for (uint i = 0; i < kEach; ++i) {
      const uint at = done + i * 32 + lane;
      if (at < kAll)
        Triangle::store(tiles + at / Triangle::kFours * Triangle::kSize, fours[i], p.a, at % Triangle::kFours);
    }
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
  for (uint at = lane; at < SLOTS * N; at += 32)
    Triangle::make_divisor(tiles + at / N * Triangle::kSize, at % N, p.unit);
  simdgroup_barrier(mem_flags::mem_threadgroup);
}

// A lane has a column of B in registers; a system has LANES lanes.
template <uint N, uint LANES, uint SIMDGROUPS, typename T = float>
[[kernel]] [[max_total_threads_per_threadgroup(32 * SIMDGROUPS)]] void trsm_simd(
    device const T* a [[buffer(0)]], device const T* b [[buffer(1)]], device T* x [[buffer(2)]],
    constant TriangularParams& p [[buffer(3)]], uint group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  typedef typename FourOf<T>::Type Four;
  constexpr uint kSlots = 32 / LANES, kSize = Tile<N, N, T>::kSize;
  threadgroup Four tiles[SIMDGROUPS * kSlots * kSize];
  threadgroup Four* const own_tiles = tiles + simdgroup * kSlots * kSize;

  const uint first = (group * SIMDGROUPS + simdgroup) * kSlots;
  const uint slot = first + lane / LANES;
  const uint matrix = slot / p.column_tiles;
  const uint column = slot % p.column_tiles * LANES + lane % LANES;
  const bool live = matrix < p.matrices && column < p.columns;

  const uint rows = live ? p.order : 0;
  Four values[N / 4];
  load_rows(values, matrix_at(b, p.b, matrix) + column * p.b.column, p.b.row, rows);
  load_triangles<T, N, kSlots>(own_tiles, a, p, first, lane);
  substitute(values, own_tiles + lane / LANES * kSize);
  store_rows(values, matrix_at(x, p.x, matrix) + column * p.x.column, p.x.row, rows);
}

// A lane has a row of B; a system has N lanes. B has few columns, as many as V has.
template <uint N, typename V, uint SIMDGROUPS>
[[kernel]] [[max_total_threads_per_threadgroup(32 * SIMDGROUPS)]] void trsv_simd(
    device const float* a [[buffer(0)]], device const float* b [[buffer(1)]], device float* x [[buffer(2)]],
    constant TriangularParams& p [[buffer(3)]], uint group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  constexpr uint kSlots = 32 / N;
  threadgroup float4 tiles[SIMDGROUPS * kSlots * Tile<N, N>::kSize];
  threadgroup float4* const own_tiles = tiles + simdgroup * kSlots * Tile<N, N>::kSize;

  const uint first = (group * SIMDGROUPS + simdgroup) * kSlots;
  const uint matrix = first + lane / N;
  const uint row = lane % N;
  const bool live = matrix < p.matrices && row < p.order;

  V value = V(0.0f);
  if (live) load_columns(value, matrix_at(b, p.b, matrix) + row * p.b.row, p.b.column, p.columns);
  load_triangles<float, N, kSlots>(own_tiles, a, p, first, lane);
  threadgroup const float4* const tile = own_tiles + lane / N * Tile<N, N>::kSize;
  value = substitute_rows<N>(value, tile, tile[row * Tile<N, N>::kPitch + N / 4].xy, p.order, row, lane);
  if (live) store_columns(value, matrix_at(x, p.x, matrix) + row * p.x.row, p.x.column, p.columns);
}

#define INSTANTIATE_SIMD(kernel_name, name, ...)                         \
  template [[host_name(name)]] [[kernel]] void kernel_name<__VA_ARGS__>( \
      device const float*, device const float*, device float*, constant TriangularParams&, uint, uint, uint);
#define INSTANTIATE_COMPLEX(rows, lanes, simdgroups)                                                     \
  template [[host_name("trsm_simd_complex_" #rows "x" #lanes)]] [[kernel]] void                          \
  trsm_simd<rows, lanes, simdgroups, float2>(device const float2*, device const float2*, device float2*, \
                                             constant TriangularParams&, uint, uint, uint);

INSTANTIATE_SIMD(trsm_simd, "trsm_simd_8x8", 8, 8, 4)
INSTANTIATE_SIMD(trsm_simd, "trsm_simd_8x16", 8, 16, 4)
INSTANTIATE_SIMD(trsm_simd, "trsm_simd_8x32", 8, 32, 4)
INSTANTIATE_SIMD(trsm_simd, "trsm_simd_16x8", 16, 8, 4)
INSTANTIATE_SIMD(trsm_simd, "trsm_simd_16x16", 16, 16, 4)
INSTANTIATE_SIMD(trsm_simd, "trsm_simd_16x32", 16, 32, 4)
INSTANTIATE_SIMD(trsm_simd, "trsm_simd_32x8", 32, 8, 1)
INSTANTIATE_SIMD(trsm_simd, "trsm_simd_32x16", 32, 16, 2)
INSTANTIATE_SIMD(trsm_simd, "trsm_simd_32x32", 32, 32, 4)
INSTANTIATE_SIMD(trsv_simd, "trsv_simd_8x1", 8, float, 4)
INSTANTIATE_SIMD(trsv_simd, "trsv_simd_8x4", 8, float4, 4)
INSTANTIATE_SIMD(trsv_simd, "trsv_simd_16x1", 16, float, 4)
INSTANTIATE_SIMD(trsv_simd, "trsv_simd_16x4", 16, float4, 4)
INSTANTIATE_SIMD(trsv_simd, "trsv_simd_32x1", 32, float, 4)
INSTANTIATE_SIMD(trsv_simd, "trsv_simd_32x4", 32, float4, 4)

// Triangles of complex numbers are twice as large, so that threadgroup memory holds fewer of them.
INSTANTIATE_COMPLEX(8, 8, 4)
INSTANTIATE_COMPLEX(8, 32, 4)
INSTANTIATE_COMPLEX(16, 8, 2)
INSTANTIATE_COMPLEX(16, 32, 4)
INSTANTIATE_COMPLEX(32, 16, 1)
INSTANTIATE_COMPLEX(32, 32, 2)
