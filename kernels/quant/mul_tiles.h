// Products of packed weights and some rows of x in 16 bits, by the matrix units. A threadgroup has 16 rows of weights,
// and its simdgroups share their length. A lane unpacks its slices into the fragments where they are multiplied:
// weights are rounded to x's dtype, and go through no memory. x goes through the simdgroup's own tile, in which terms
// have the order of the weights' fragments.
#pragma once

#include <metal_stdlib>

using namespace metal;

#include "common/matrices.h"
#include "formats.h"
#include "numbers.h"
#include "quant.h"

constexpr constant uint kTileTerms = 4 * QUANT_SLICE;     // of a simdgroup's step: four lanes have a row
constexpr constant uint kTilePitch = kTileTerms + 8;      // rows begin in different banks
constexpr constant uint kTileFragments = kTileTerms / 8;  // beside each other

// Writes 8 rows of x below each other for the lane's slice. Word i of a slice is in fragment i.
template <typename F>
inline void stage(threadgroup uint* row, device const uint4* x, ulong from, bool inside, uint column) {
#pragma unroll
  for (uint i = 0; i < 4; ++i) {
    const uint4 words = inside ? x[(from + i / 2 * F::apart) / 8 + i % 2] : uint4(0);
#pragma unroll
    for (uint k = 0; k < 4; ++k) row[(4 * i + k) * 4 + column] = words[k];
  }
}

// Loads the lane's slices of two rows of weights, which are 8 rows apart.
template <typename F, typename P>
inline void load_slices(thread Packed (&loaded)[2], P packed, constant QuantMvParams& p, uint row, uint column) {
  const SliceOf<F> slice(min(column, p.slices - 1));
#pragma unroll
  for (uint m = 0; m < 2; ++m) loaded[m] = slice.load(packed.plus(min(row + 8 * m, p.weights - 1) * p.row_bytes));
}

// `kAcross` times 8 rows of x. A simdgroup needs kTilePitch * kAcross of `tiles`, and QUANT_TILE_ROWS * 8 * kAcross of
// `parts`; `table` has room for F::entries.
template <typename F, typename T, uint kAcross, typename P>
inline void multiply_tiles(P packed, device const uint4* x, device T* y, constant QuantMvParams& p,
                           threadgroup uint4* tiles, threadgroup float* parts, threadgroup float* table, uint group,
                           uint thread_index, uint simdgroups) {
  const uint lane = thread_index % 32;
  const uint simdgroup = simd_broadcast(thread_index / 32, ushort(0));
  const Place place = place_of(lane);
  const uint column = place.column / 2;
  const uint x_groups = (p.x_rows + 8 * kAcross - 1) / (8 * kAcross);  // of neighbouring threadgroups
  const uint first_row = group / x_groups * QUANT_TILE_ROWS, first_x = group % x_groups * 8 * kAcross;
  threadgroup uint4* const tile = tiles + simdgroup * (kAcross * kTilePitch);
  threadgroup uint* const words = reinterpret_cast<threadgroup uint*>(tile);

  const Shared<F> shared(table, thread_index);
  Fragments<float, 2, kAcross> sums;
  clear(sums);
  const uint chunks = (p.slices + 3) / 4;
  Packed next[2];
  if (simdgroup < chunks) load_slices<F>(next, packed, p, first_row + place.row, simdgroup * 4 + column);
  for (uint chunk = simdgroup; chunk < chunks; chunk += simdgroups) {
    const bool inside = chunk * 4 + column < p.slices;
    const SliceOf<F> slice(min(chunk * 4 + column, p.slices - 1));
    const Packed loaded[2] = {next[0], next[1]};
    if (chunk + simdgroups < chunks)
      load_slices<F>(next, packed, p, first_row + place.row, (chunk + simdgroups) * 4 + column);
#pragma unroll
    for (uint n = 0; n < kAcross; ++n) {
      const uint x_row = min(first_x + 8 * n + place.row, p.x_rows - 1);
      stage<F>(words + (8 * n + place.row) * (kTilePitch / 2), x, ulong(x_row) * p.slices * QUANT_SLICE + slice.first(),
               inside, column);
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    Fragments<T, 2, kTileFragments> left;
#pragma unroll
    for (uint m = 0; m < 2; ++m) {
      const Slice numbers = shared.decode(slice, loaded[m]);
#pragma unroll
      for (uint i = 0; i < 8; ++i) {
        const float4 w = inside ? weights<F>(numbers, i) : float4(0.0f);
        elements(left.at[m][2 * i]) = vec<T, 2>(static_cast<T>(w.x), static_cast<T>(w.y));
        elements(left.at[m][2 * i + 1]) = vec<T, 2>(static_cast<T>(w.z), static_cast<T>(w.w));
      }
    }
#pragma unroll
    for (uint k = 0; k < kTileFragments; k += 4) {
      RightFragments<T, 4, kAcross> right;
      load_transposed<kTilePitch>(right, reinterpret_cast<threadgroup const T*>(tile) + 8 * k);
      multiply(sums, left, k, right);
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }

  constexpr uint results = QUANT_TILE_ROWS * 8 * kAcross;
#pragma unroll
  for (uint m = 0; m < 2; ++m) {
#pragma unroll
    for (uint n = 0; n < kAcross; ++n) {
      threadgroup float* const to = parts + simdgroup * results + (8 * n + place.column) * QUANT_TILE_ROWS + 8 * m;
      to[place.row] = elements(sums.at[m][n]).x;
      to[QUANT_TILE_ROWS + place.row] = elements(sums.at[m][n]).y;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = thread_index; i < results; i += simdgroups * 32) {
    float sum = 0.0f;
    for (uint s = 0; s < simdgroups; ++s) sum += parts[s * results + i];
    const uint row = first_row + i % QUANT_TILE_ROWS, result = first_x + i / QUANT_TILE_ROWS;
    if (row < p.weights && result < p.x_rows) y[ulong(result) * p.weights + row] = static_cast<T>(sum);
  }
}

// Calls FOR(format, rows of x, dtype, its name) for what products by the matrix units there are of a format.
#define FOR_TILES(FOR, F) \
  FOR(F, 8, half, "half") FOR(F, 8, bfloat, "bfloat") FOR(F, 16, half, "half") FOR(F, 16, bfloat, "bfloat")
