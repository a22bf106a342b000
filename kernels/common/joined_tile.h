// A tile of which threadgroups that run together have a part of the terms each (common/together.h). They read what each
// of them has, and each makes results of its part of the tile.
#pragma once

#include <metal_stdlib>
#include <metal_tensor>

#include "common/together.h"

// How many neighbours of the tile come from each threadgroup at a time.
#define JOINED_TILE_SUMS 4

// Memory for so many bytes of sums, which is free when products of tensors have ended in all threads. NVIDIA's headers
// have the same function for an int in the place of the long. Elsewhere no threadgroups run together.
template <uint kBytes>
METAL_FUNC threadgroup float* metalcore_memory_of_sums(long) {
  return nullptr;
}

template <uint kRows, uint kColumns, uint kThreads>
struct JoinedTile {
  uint rows, columns;  // which exist

  // Calls make(row, column, count, sums) for `count` neighbours, at most JOINED_TILE_SUMS, the first of them in this
  // row and column of the tile: neighbours of a row for kInRows, or else of a column. `number` is that of this
  // threadgroup.
  template <bool kInRows, typename Sums, typename Make>
  void store(thread Sums& sums, uint together, uint number, uint thread_index, Make make) const {
    // With these distances the elements of a simdgroup lie in all banks of NVIDIA's threadgroup memory.
    constexpr uint kInner = kInRows ? kColumns : kRows, kPitch = kInner + (kInRows ? 8 : 4);
    constexpr uint kSums = JOINED_TILE_SUMS, kAtOnce = 4;
    using Extents = metal::dextents<int, 2>;
    using Tile = metal::tensor<threadgroup float, Extents, metal::tensor_inline>;
    threadgroup float* const own = metalcore_memory_of_sums<4 * kPitch * kRows * kColumns / kInner>(0);
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    sums.store(Tile(own, Extents(int(kColumns), int(kRows)),
                    metal::array<int, 2>{kInRows ? 1 : int(kPitch), kInRows ? int(kPitch) : 1}));
    metalcore_synchronize_together(0);
    for (uint i = number * kThreads + thread_index; i < kRows * kColumns / kSums; i += together * kThreads) {
      const uint outer = i / (kInner / kSums), inner = i % (kInner / kSums) * kSums;
      const uint row = kInRows ? outer : inner, column = kInRows ? inner : outer;
      if (row >= rows || column >= columns) continue;
      threadgroup const metal::float4* const from =
          reinterpret_cast<threadgroup const metal::float4*>(own + outer * kPitch + inner);
      metal::float4 sum = 0.0f;
      for (uint first = 0; first < together; first += kAtOnce) {
        metal::float4 found[kAtOnce];
#pragma unroll
        for (uint j = 0; j < kAtOnce; ++j)
          found[j] = first + j < together ? metalcore_load_together(from, first + j, 0) : metal::float4(0.0f);
#pragma unroll
        for (uint j = 0; j < kAtOnce; ++j) sum += found[j];
      }
      make(row, column, metal::min(kInRows ? columns - column : rows - row, kSums), sum);
    }
    metalcore_leave_together(0);
  }
};
