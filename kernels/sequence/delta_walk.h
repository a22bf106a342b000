// What a threadgroup that walks along chunks has: some columns of a matrix of keys by values. A simdgroup has 16 of the
// columns and 32 or 64 of the keys in registers, as rows and columns of fragments, and so has the products with tiles
// of keys transposed: a row for a column of the matrix, a column for a position.
#pragma once

#include "sequence/delta_tiles.h"

template <uint KEYS, uint COLUMNS, typename T>
struct Walk {
  static constexpr constant uint kColumns = COLUMNS;                   // of the threadgroup
  static constexpr constant uint kParts = kSimdgroups * 16 / COLUMNS;  // simdgroups that share columns
  static constexpr constant uint kKeys = KEYS / kParts;                // of a simdgroup
  static constexpr constant uint kPitch = kColumns + 4;                // of tiles of positions by columns
  static constexpr constant uint kWidth = 256 / sizeof(T) / kParts;    // keys of a simdgroup that lie in a tile at once
  static constexpr constant uint kSlices = kKeys / kWidth;             // … and how often it has others
  static constexpr constant uint kSlice = (256 + 16) / sizeof(T);      // pitch of tiles of positions by keys
  static constexpr constant uint kAcross = 8 / kParts;  // fragments of positions that become a simdgroup's
  static constexpr constant uint kTile = kChunk * kPitch;
  static constexpr constant uint kTiles = kParts > 2 ? 2 : 1;  // for sums over simdgroups
  static constexpr constant uint kTerms = 4 / sizeof(T);       // fragments of a product's operands

  // Whether triangular matrices are loaded before they are needed. Few threadgroups walk with so few columns, so that
  // little else runs while they wait for memory.
  static constexpr constant bool kAhead = COLUMNS == 16 && kSlices == 1;

  Fragments<float, 2, kWidth / 8> state[kSlices];
  uint part, columns, first;  // the first column in tiles, and in the matrix
  Place place;

  Walk(uint block, uint thread_index)
      : part(thread_index / 32 % kParts),
        columns(thread_index / 32 / kParts * 16),
        first(block + columns),
        place(place_of(thread_index % 32)) {}

  // Elements of the matrix in memory. A place moves from element to element, as in Columns.
  void load(device const float* matrix, bool given, constant DeltaRuleParams& params) {
#pragma unroll
    for (uint m = 0; m < 2; ++m) {
      const uint column = first + m * 8 + place.row;
      device const float* from = matrix + ulong(part * kKeys + place.column) * params.values + column;
#pragma unroll
      for (uint n = 0; n < kKeys / 8; ++n) {
        const uint rest =
            given && column < params.values ? rest_of(part * kKeys + n * 8 + place.column, params.keys) : 0;
        elements(state[n / (kWidth / 8)].at[m][n % (kWidth / 8)]) =
            float2(rest > 0 ? from[0] : 0.0f, rest > 1 ? from[params.values] : 0.0f);
        from += 8 * params.values;
      }
    }
  }
  void store(device float* matrix, bool wanted, constant DeltaRuleParams& params) {
#pragma unroll
    for (uint m = 0; m < 2; ++m) {
      const uint column = first + m * 8 + place.row;
      device float* to = matrix + ulong(part * kKeys + place.column) * params.values + column;
#pragma unroll
      for (uint n = 0; n < kKeys / 8; ++n) {
        const uint rest =
            wanted && column < params.values ? rest_of(part * kKeys + n * 8 + place.column, params.keys) : 0;
        const float2 pair = elements(state[n / (kWidth / 8)].at[m][n % (kWidth / 8)]);
        if (rest > 0) to[0] = pair.x;
        if (rest > 1) to[params.values] = pair.y;
        to += 8 * params.values;
      }
    }
  }

  // Brings a slice of the keys of all simdgroups into a tile.
  void fetch(threadgroup T* tile, device const T* x, long stride, uint count, uint slice,
             constant DeltaRuleParams& params, uint thread_index) const {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    fetch_rows<kWidth * kParts, kSlice, kWidth>(tile, x, stride, count, slice * kWidth, params.keys, params.wide,
                                                thread_index, kKeys);
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }

  // Of sums over this simdgroup's keys, half of the positions; the other half goes to a simdgroup with other keys.
  template <uint ACROSS, uint N>
  Fragments<float, 2, N / 2> exchange(thread Fragments<float, 2, N>& sums, threadgroup float* given,
                                      threadgroup const float* taken) const {
    Fragments<float, 2, N / 2> kept;
    const bool upper = part & ACROSS;
    const uint at = place.column * kPitch + columns + place.row;
    given += (upper ? 0 : N * 4) * kPitch + at;
    taken += (upper ? N * 4 : 0) * kPitch + at;
#pragma unroll
    for (uint m = 0; m < 2; ++m) {
#pragma unroll
      for (uint n = 0; n < N / 2; ++n) {
        const float2 low = elements(sums.at[m][n]), high = elements(sums.at[m][n + N / 2]), pair = upper ? low : high;
        elements(kept.at[m][n]) = upper ? high : low;
        given[n * 8 * kPitch + m * 8] = pair.x;
        given[(n * 8 + 1) * kPitch + m * 8] = pair.y;
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
    for (uint m = 0; m < 2; ++m) {
#pragma unroll
      for (uint n = 0; n < N / 2; ++n)
        elements(kept.at[m][n]) += float2(taken[n * 8 * kPitch + m * 8], taken[(n * 8 + 1) * kPitch + m * 8]);
    }
    return kept;
  }

  // The matrix's products with the rows of x, for the positions of this simdgroup. The last slice stays in the tile.
  Fragments<float, 2, kAcross> read(threadgroup T* tile, threadgroup float* tiles, device const T* x, long stride,
                                    uint count, constant DeltaRuleParams& params, uint thread_index) {
    Fragments<float, 2, 8> sums;
    clear(sums);
#pragma unroll
    for (uint slice = 0; slice < kSlices; ++slice) {
      fetch(tile, x, stride, count, slice, params, thread_index);
      if (part * kKeys + slice * kWidth >= params.keys) continue;
#pragma unroll
      for (uint term = 0; term < kWidth / 8; term += kTerms) {
        RightFragments<T, kTerms, 8> terms;
        load_transposed<kSlice>(terms, tile + part * kWidth + term * 8);
        multiply(sums, state[slice], term, terms);
      }
    }
    if constexpr (kParts == 2) {
      return exchange<1>(sums, tiles, tiles);
    } else {
      threadgroup float* const own = tiles + part % 2 * kTile;
      Fragments<float, 2, 4> half_sums = exchange<2>(sums, own, own);
      const uint begin = part / 2 * 32 * kPitch;
      return exchange<1>(half_sums, own + begin, tiles + (part + 1) % 2 * kTile + begin);
    }
  }
  // The first position of those that read() gives a simdgroup.
  uint position() const { return part * kAcross * 8; }

  // Puts what read() gave into a tile of positions by columns, for all simdgroups.
  void put(thread Fragments<float, 2, kAcross>& found, threadgroup float* tile) const {
    tile += (position() + place.column) * kPitch + columns + place.row;
#pragma unroll
    for (uint m = 0; m < 2; ++m) {
#pragma unroll
      for (uint n = 0; n < kAcross; ++n) {
        tile[n * 8 * kPitch + m * 8] = elements(found.at[m][n]).x;
        tile[(n * 8 + 1) * kPitch + m * 8] = elements(found.at[m][n]).y;
      }
    }
  }

  void scale(float factor) {
#pragma unroll
    for (uint slice = 0; slice < kSlices; ++slice) {
#pragma unroll
      for (uint n = 0; n < kWidth / 8; ++n) {
#pragma unroll
        for (uint m = 0; m < 2; ++m) elements(state[slice].at[m][n]) *= factor;
      }
    }
  }
  // Adds the tile of positions by columns, times factors of the positions, and a slice of keys.
  void learn(uint slice, threadgroup const float* tile, device const float* factors, float sign,
             threadgroup const T* keys) {
#pragma unroll 2
    for (uint i = 0; i < kChunk; i += kTerms * 8) {
      Fragments<float, 2, kTerms> rows;
      RightFragments<T, kTerms, kWidth / 8> terms;
#pragma unroll
      for (uint k = 0; k < kTerms; ++k) {
        device const float* const own = factors + i + k * 8 + place.column;
        const float2 factor = *reinterpret_cast<device const float2*>(own) * sign;
#pragma unroll
        for (uint m = 0; m < 2; ++m) {
          simdgroup_load(rows.at[m][k], tile + (i + k * 8) * kPitch + columns + m * 8, kPitch, ulong2(0), true);
          elements(rows.at[m][k]) *= factor;
        }
      }
      ::load<kSlice>(terms, keys + i * kSlice + part * kWidth);
      multiply(state[slice], rows, 0, terms);
    }
  }
  // The same for all keys of x, of which the tile has the last slice already if it is THERE.
  template <bool THERE>
  void learn_all(threadgroup T* keys, threadgroup const float* tile, device const float* factors, float sign,
                 device const T* x, long stride, uint count, constant DeltaRuleParams& params, uint thread_index) {
#pragma unroll
    for (uint i = 0; i < kSlices; ++i) {
      const uint slice = kSlices - 1 - i;
      if (i > 0 || !THERE) fetch(keys, x, stride, count, slice, params, thread_index);
      if (part * kKeys + slice * kWidth < params.keys) learn(slice, tile, factors, sign, keys);
    }
  }
};
