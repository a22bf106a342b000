// Triangular systems of order above 32 with few columns (V is one or several). A threadgroup solves for TRIANGULAR_TILE
// rows at a time and keeps X in threadgroup memory. While one simdgroup solves, the others multiply the known part of X
// for the next rows.
#include <metal_stdlib>
using namespace metal;

#include "triangular_tile.h"

constant constexpr uint kTile = TRIANGULAR_TILE;
typedef Tile<kTile, kTile> SquareTile;

inline float sum_lanes(float value) { return simd_sum(value); }
inline float4 sum_lanes(float4 value) {
  return float4(simd_sum(value.x), simd_sum(value.y), simd_sum(value.z), simd_sum(value.w));
}

// The products of kTile rows of A, of which `rows` exist, with `depth` numbers or fours. Worker w of WORKERS simdgroups
// writes its part of row i to shares[w * kTile + i]. A worker takes some rows if A is by rows, else some columns.
template <uint WORKERS, typename V>
inline void multiply(threadgroup V* shares, device const float* a, constant StridedMatrices& m, uint rows, uint depth,
                     threadgroup const V* x, uint worker, uint lane) {
  constexpr uint kRows = kTile / WORKERS;
  constexpr uint kSteps = 16 / kRows;  // numbers of a row that a lane loads at once
  if (m.by_rows) {
    V sums[kRows];
#pragma unroll
    for (uint r = 0; r < kRows; ++r) sums[r] = V(0.0f);
    for (uint done = lane; done < depth; done += 32 * kSteps) {
      float l[kRows][kSteps];
#pragma unroll
      for (uint r = 0; r < kRows; ++r) {
        const uint i = worker * kRows + r;
#pragma unroll
        for (uint s = 0; s < kSteps; ++s) {
          const uint j = done + 32 * s;
          l[r][s] = i < rows && j < depth ? a[i * m.row + j * m.column] : 0.0f;
        }
      }
#pragma unroll
      for (uint s = 0; s < kSteps; ++s) {
        const uint j = done + 32 * s;
        const V factor = j < depth ? x[j] : V(0.0f);
#pragma unroll
        for (uint r = 0; r < kRows; ++r) sums[r] = fma(V(l[r][s]), factor, sums[r]);
      }
    }
    V share = V(0.0f);
#pragma unroll
    for (uint r = 0; r < kRows; ++r) {
      const V sum = sum_lanes(sums[r]);
      share = lane == worker * kRows + r ? sum : share;
    }
    shares[worker * kTile + lane] = share;
  } else {
    V sum = V(0.0f);
    for (uint done = worker; done < depth; done += 8 * WORKERS) {
      float l[8];
#pragma unroll
      for (uint s = 0; s < 8; ++s) {
        const uint j = done + s * WORKERS;
        l[s] = lane < rows && j < depth ? a[lane * m.row + j * m.column] : 0.0f;
      }
#pragma unroll
      for (uint s = 0; s < 8; ++s) {
        const uint j = done + s * WORKERS;
        sum = fma(V(l[s]), j < depth ? x[j] : V(0.0f), sum);
      }
    }
    shares[worker * kTile + lane] = sum;
  }
}

template <uint WORKERS, typename V>
inline V sum_shares(threadgroup const V* shares, uint lane) {
  V sum = shares[lane];
#pragma unroll
  for (uint w = 1; w < WORKERS; ++w) sum += shares[w * kTile + lane];
  return sum;
}

// The lane's row of `tile` times kTile numbers or fours.
template <typename V>
inline V times_row(threadgroup const float4* tile, threadgroup const V* x, uint lane) {
  threadgroup const float* const l = (threadgroup const float*)tile + lane;
  V even = V(0.0f), odd = V(0.0f);
#pragma unroll
  for (uint j = 0; j < kTile; j += 2) {
    even = fma(V(l[j * 4 * SquareTile::kPitch]), x[j], even);
    odd = fma(V(l[(j + 1) * 4 * SquareTile::kPitch]), x[j + 1], odd);
  }
  return even + odd;
}

template <typename V, uint WORKERS, uint ORDER>
[[kernel]] [[max_total_threads_per_threadgroup(32 * (WORKERS + 1))]] void trsv_block(
    device const float* a [[buffer(0)]], device const float* b [[buffer(1)]], device float* x [[buffer(2)]],
    constant TriangularParams& p [[buffer(3)]], uint matrix [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  constexpr uint kEach = (SquareTile::kFours + 32 * WORKERS - 1) / (32 * WORKERS);
  // There are two of each, for the rows that are being solved and for the next ones: their diagonal tile, the tile
  // before it, and the products with all columns before that.
  threadgroup float4 tiles[4 * SquareTile::kSize];
  threadgroup V shares[2 * WORKERS * kTile];
  threadgroup V solved[ORDER];

  constexpr bool kFar = ORDER > 2 * kTile;  // some columns are in neither tile
  const uint lane = thread_index % 32, worker = thread_index / 32;
  const bool works = worker < WORKERS;
  a = matrix_at(a, p.a, matrix);
  b = matrix_at(b, p.b, matrix);
  x = matrix_at(x, p.x, matrix);
  V value = V(0.0f);
  if (works) {
#pragma unroll
    for (uint i = 0; i < kEach; ++i) {
      const uint at = i * 32 * WORKERS + thread_index;
      if (at < SquareTile::kFours)
        SquareTile::store(tiles, SquareTile::fetch(a, p.a, p.order, p.order, at, true), p.a, at);
    }
  } else if (lane < p.order) {
    load_columns(value, b + lane * p.b.row, p.b.column, p.columns);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  for (uint first = 0, now = 0; first < p.order; first += kTile, now ^= 1) {
    const uint next = first + kTile;
    const uint next_rows = p.order - min(next, p.order);
    threadgroup float4* const tile = tiles + now * 2 * SquareTile::kSize;
    threadgroup float4* const next_tile = tiles + (now ^ 1) * 2 * SquareTile::kSize;
    if (works) {
      if (next_rows > 0) {
        float4 diagonal[kEach], before[kEach];
        device const float* const rows = a + next * p.a.row;
#pragma unroll
        for (uint i = 0; i < kEach; ++i) {
          const uint at = i * 32 * WORKERS + thread_index;
          const uint wanted = at < SquareTile::kFours ? next_rows : 0;
          diagonal[i] = SquareTile::fetch(rows + next * p.a.column, p.a, wanted, wanted, at, true);
          before[i] = SquareTile::fetch(rows + first * p.a.column, p.a, wanted, kTile, at);
        }
        if (kFar && first > 0)
          multiply<WORKERS>(shares + (now ^ 1) * WORKERS * kTile, rows, p.a, next_rows, first, solved, worker, lane);
#pragma unroll
        for (uint i = 0; i < kEach; ++i) {
          const uint at = i * 32 * WORKERS + thread_index;
          if (at >= SquareTile::kFours) continue;
          SquareTile::store(next_tile, diagonal[i], p.a, at);
          SquareTile::store(next_tile + SquareTile::kSize, before[i], p.a, at);
        }
      }
    } else {
      V next_value = V(0.0f);
      if (lane < next_rows) load_columns(next_value, b + (next + lane) * p.b.row, p.b.column, p.columns);
      if (first > 0) value -= times_row(tile + SquareTile::kSize, solved + first - kTile, lane);
      if (kFar && first > kTile) value -= sum_shares<WORKERS>(shares + now * WORKERS * kTile, lane);
      const float2 by =
          p.unit ? float2(1.0f) : divisor(((threadgroup const float*)tile)[lane * (4 * SquareTile::kPitch + 1)]);
      value = substitute_rows<kTile>(value, tile, by, min(kTile, p.order - first), lane, lane);
      if (first + lane < p.order) {
        solved[first + lane] = value;
        store_columns(value, x + (first + lane) * p.x.row, p.x.column, p.columns);
      }
      value = next_value;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
}

// X = B - A S for few columns. A threadgroup takes kTile rows.
template <typename V, uint ORDER>
[[kernel]] [[max_total_threads_per_threadgroup(256)]] void trsv_update(
    device const float* a [[buffer(0)]], device const float* from [[buffer(1)]], device const float* b [[buffer(2)]],
    device float* x [[buffer(3)]], constant TriangularUpdateParams& p [[buffer(4)]],
    uint group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  constexpr uint kWorkers = 8;
  threadgroup V solved[ORDER];
  threadgroup V shares[kWorkers * kTile];

  const uint lane = thread_index % 32, worker = thread_index / 32;
  const uint matrix = group / p.row_tiles, first = group % p.row_tiles * kTile;
  const uint rows = min(kTile, p.rows - first);
  a = matrix_at(a, p.a, matrix) + first * p.a.row;
  from = matrix_at(from, p.solved, matrix);
  for (uint i = thread_index; i < p.depth; i += 32 * kWorkers) {
    V value;
    load_columns(value, from + i * p.solved.column, p.solved.row, p.columns);
    solved[i] = value;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  multiply<kWorkers>(shares, a, p.a, rows, p.depth, solved, worker, lane);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (worker == 0 && lane < rows) {
    V value;
    load_columns(value, matrix_at(b, p.b, matrix) + (first + lane) * p.b.row, p.b.column, p.columns);
    store_columns(value - sum_shares<kWorkers>(shares, lane), matrix_at(x, p.x, matrix) + (first + lane) * p.x.row,
                  p.x.column, p.columns);
  }
}

#define INSTANTIATE(columns, V, workers, order)                                                              \
  template [[host_name("trsv_block_" #columns "x" #workers)]] [[kernel]] void trsv_block<V, workers, order>( \
      device const float*, device const float*, device float*, constant TriangularParams&, uint, uint);
#define INSTANTIATE_UPDATE(columns, V, order)                                                                         \
  template [[host_name("trsv_update_" #columns)]] [[kernel]] void trsv_update<V, order>(                              \
      device const float*, device const float*, device const float*, device float*, constant TriangularUpdateParams&, \
      uint, uint);

INSTANTIATE(1, float, 2, TRIANGULAR_VECTOR_SMALL)
INSTANTIATE(1, float, 4, TRIANGULAR_VECTOR_ORDER)
INSTANTIATE(1, float, 16, TRIANGULAR_VECTOR_ORDER)
INSTANTIATE(4, float4, 2, TRIANGULAR_VECTOR_SMALL)
INSTANTIATE(4, float4, 4, TRIANGULAR_VECTORS_ORDER)
INSTANTIATE_UPDATE(1, float, TRIANGULAR_VECTOR_ORDER)
INSTANTIATE_UPDATE(4, float4, TRIANGULAR_VECTORS_ORDER)
