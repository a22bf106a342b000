// Triangular systems of order above 32 with few columns (V is one or several): a threadgroup has all of X in threadgroup
// memory, and solves for TRIANGULAR_TILE rows at a time.
#include <metal_stdlib>
using namespace metal;

#include "triangular_tile.h"

constant constexpr uint kTile = TRIANGULAR_TILE;
constant constexpr uint kSimdgroups = 8;
constant constexpr uint kThreads = 32 * kSimdgroups;
constant constexpr uint kRows = kTile / kSimdgroups;  // a simdgroup's
typedef Tile<kTile, kTile> SquareTile;

inline float sum_lanes(float value) { return simd_sum(value); }
inline float4 sum_lanes(float4 value) {
  return float4(simd_sum(value.x), simd_sum(value.y), simd_sum(value.z), simd_sum(value.w));
}

// The products of kTile rows of A, of which there are `rows`, with `depth` numbers or fours: what simdgroup s adds to row
// i goes to shares[s * kTile + i]. Where A lies by rows a simdgroup takes some rows, else some columns.
template <typename V>
inline void multiply(threadgroup V* shares, device const float* a, constant StridedMatrices& m, uint rows, uint depth,
                     threadgroup const V* x, uint simdgroup, uint lane) {
  if (m.by_rows) {
    V sums[kRows];
#pragma unroll
    for (uint r = 0; r < kRows; ++r) sums[r] = V(0.0f);
    for (uint j = lane; j < depth; j += 32) {
      const V factor = x[j];
#pragma unroll
      for (uint r = 0; r < kRows; ++r) {
        const uint i = simdgroup * kRows + r;
        sums[r] = fma(V(i < rows ? a[i * m.row + j * m.column] : 0.0f), factor, sums[r]);
      }
    }
    V share = V(0.0f);
#pragma unroll
    for (uint r = 0; r < kRows; ++r) {
      const V sum = sum_lanes(sums[r]);
      share = lane == simdgroup * kRows + r ? sum : share;
    }
    shares[simdgroup * kTile + lane] = share;
  } else {
    V sum = V(0.0f);
    for (uint j = simdgroup; j < depth; j += kSimdgroups)
      sum = fma(V(lane < rows ? a[lane * m.row + j * m.column] : 0.0f), x[j], sum);
    shares[simdgroup * kTile + lane] = sum;
  }
}

template <typename V>
inline V sum_shares(threadgroup const V* shares, uint lane) {
  V sum = shares[lane];
#pragma unroll
  for (uint s = 1; s < kSimdgroups; ++s) sum += shares[s * kTile + lane];
  return sum;
}

template <typename V>
[[kernel]] [[max_total_threads_per_threadgroup(kThreads)]] void trsv_block(
    device const float* a [[buffer(0)]], device const float* b [[buffer(1)]], device float* x [[buffer(2)]],
    constant TriangularParams& p [[buffer(3)]], uint matrix [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup float4 tile[SquareTile::kSize];
  threadgroup V solved[TRIANGULAR_VECTOR_ORDER];
  threadgroup V shares[kThreads];

  const uint lane = thread_index % 32, simdgroup = thread_index / 32;
  a = matrix_at(a, p.a, matrix);
  b = matrix_at(b, p.b, matrix);
  x = matrix_at(x, p.x, matrix);
  float4 next = SquareTile::fetch<Part::triangle>(a, p.a, p.order, p.order, thread_index);
  for (uint first = 0; first < p.order; first += kTile) {
    const uint rows = min(kTile, p.order - first);
    V value = V(0.0f);
    if (simdgroup == 0 && lane < rows) load_columns(value, b + (first + lane) * p.b.row, p.b.column, p.columns);
    SquareTile::store(tile, next, p.a, thread_index);
    if (first + kTile < p.order) {
      const uint left = min(kTile, p.order - first - kTile);
      next = SquareTile::fetch<Part::triangle>(a + (first + kTile) * (p.a.row + p.a.column), p.a, left, left,
                                               thread_index);
    }
    multiply(shares, a + first * p.a.row, p.a, rows, first, solved, simdgroup, lane);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (simdgroup == 0) {
      const float2 by = p.unit ? float2(1.0f) : divisor(((threadgroup const float*)tile)[lane * (4 * SquareTile::kPitch + 1)]);
      value = substitute_rows<kTile>(value - sum_shares(shares, lane), tile, by, rows, lane, lane);
      if (lane < rows) {
        solved[first + lane] = value;
        store_columns(value, x + (first + lane) * p.x.row, p.x.column, p.columns);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
}

// X = B - A S for few columns: a threadgroup for kTile rows.
template <typename V>
[[kernel]] [[max_total_threads_per_threadgroup(kThreads)]] void trsv_update(
    device const float* a [[buffer(0)]], device const float* from [[buffer(1)]], device const float* b [[buffer(2)]],
    device float* x [[buffer(3)]], constant TriangularUpdateParams& p [[buffer(4)]],
    uint group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup V solved[TRIANGULAR_VECTOR_ORDER];
  threadgroup V shares[kThreads];

  const uint lane = thread_index % 32, simdgroup = thread_index / 32;
  const uint matrix = group / p.row_tiles, first = group % p.row_tiles * kTile;
  const uint rows = min(kTile, p.rows - first);
  a = matrix_at(a, p.a, matrix) + first * p.a.row;
  from = matrix_at(from, p.solved, matrix);
  for (uint i = thread_index; i < p.depth; i += kThreads) {
    V value;
    load_columns(value, from + i * p.solved.column, p.solved.row, p.columns);
    solved[i] = value;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  multiply(shares, a, p.a, rows, p.depth, solved, simdgroup, lane);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (simdgroup == 0 && lane < rows) {
    V value;
    load_columns(value, matrix_at(b, p.b, matrix) + (first + lane) * p.b.row, p.b.column, p.columns);
    store_columns(value - sum_shares(shares, lane), matrix_at(x, p.x, matrix) + (first + lane) * p.x.row, p.x.column,
                  p.columns);
  }
}

#define INSTANTIATE(columns, V)                                                                                  \
  template [[host_name("trsv_block_" #columns)]] [[kernel]] void trsv_block<V>(                                  \
      device const float*, device const float*, device float*, constant TriangularParams&, uint, uint);          \
  template [[host_name("trsv_update_" #columns)]] [[kernel]] void trsv_update<V>(                                \
      device const float*, device const float*, device const float*, device float*, constant TriangularUpdateParams&, \
      uint, uint);

INSTANTIATE(1, float)
INSTANTIATE(4, float4)
