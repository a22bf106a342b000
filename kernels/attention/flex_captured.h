// Gradients of what a function of scores captures. A score gives numbers, which `Mods` has by kinds, `k...` of each:
//   Rows: sums over the keys of a query. A lane has its part of them in registers.
//   Pairs, Keys, Diagonals: sums by a query and a key, by a key, and by the difference of both. Threadgroup memory
//     has what a row of fragments gives a difference.
//   Tables: sums by places that nothing is known of.
//   Vectors: sums of vectors by such places.
// Only one lane ever touches an element of a table in memory, so that no barrier orders what it adds. See
// metalcore/programs/flex/captured.py.
#pragma once

#include "flex.h"

// Tables of a head, and of a simdgroup of a part of its pieces.
struct FlexSlots {
  uint of_head, of_simd;
};
template <typename Mods>
METAL_FUNC FlexSlots flex_slots(constant FlexParams& p, thread const Mods& mods, FlexPlace at, uint simds, uint simd) {
  const uint head = at.batch * uint(p.heads) + at.head;
  return {head % mods.heads_with_tables(), (head % uint(p.items) * uint(p.parts) + at.part) * simds + simd};
}

// Adds the values of lanes with the same place to its element.
METAL_FUNC void flex_add(device float* tables, float value, uint place, uint lane) {
  bool waits = place != 0xffffffff && value != 0.0f;
  while (metal::simd_any(waits)) {
    const uint chosen = metal::simd_min(waits ? place : 0xffffffff);
    const bool is_mine = waits && place == chosen;
    const float sum = metal::simd_sum(is_mine ? value : 0.0f);
    if (lane == chosen % 32) tables[chosen] += sum;
    waits = waits && !is_mine;
  }
}

// Adds a score's vectors to those of its places. Lanes share the elements of one score's vector.
template <typename Mods>
METAL_FUNC void flex_add_vectors(thread const Mods& mods, bool counts, float score, float gradient, int b, int h,
                                 FlexSlots slots, int q, int k, uint lane) {
  for (uint i = 0; i < Mods::kVectors; ++i) {
    uint place = 0xffffffff;
    if (counts) place = mods.vector_place(i, slots.of_head, slots.of_simd, b, h, q, k);
    const uint elements = mods.vector_elements(i);
    for (uint other = 0; other < 32; ++other) {
      const uint first = metal::simd_shuffle(place, other);
      const float its_score = metal::simd_shuffle(score, other), slope = metal::simd_shuffle(gradient, other);
      const int its_q = metal::simd_shuffle(q, other), its_k = metal::simd_shuffle(k, other);
      if (first == 0xffffffff) continue;
      for (uint e = lane; e < elements; e += 32)
        mods.tables[first + e] += mods.vector_value(i, e, its_score, slope, b, h, its_q, its_k);
    }
  }
}

// What a lane has of a tile's columns.
template <uint kAcross>
constexpr uint flex_columns() {
  return (kAcross + 7) / 8;
}

// Adds what a score gives.
//   columns: sums of a tile's columns. The one of fragment n is in the lanes of row n % 8, for n / 8 and a lane's two.
//   number: the place of its diagonal's number in threadgroup memory.
template <uint kAcross, typename Mods>
METAL_FUNC void flex_captured(thread const Mods& mods, thread float* rows, thread float* columns,
                              threadgroup float* number, uint n, uint two, float weight, float score, float gradient,
                              FlexPlace at, FlexSlots slots, uint query, uint key, Place place, uint lane) {
  const int b = int(at.batch), h = int(at.head), q = int(query), k = int(key);
  const bool counts = weight != 0.0f;
  const uint of_head = slots.of_head, of_simd = slots.of_simd;
#pragma unroll
  for (uint i = 0; i < Mods::kRows; ++i)
    if (counts) rows[i] += mods.row_value(i, score, gradient, b, h, q, k);
  if constexpr (Mods::kInMemory) {
#pragma unroll
    for (uint i = 0; i < Mods::kPairs; ++i) {
      if (!counts) continue;
      const uint element = mods.pair_place(i, of_head, of_simd, b, h, q, k);
      const float value = mods.pair_value(i, score, gradient, b, h, q, k);
      mods.tables[element] = Mods::kOnce ? value : mods.tables[element] + value;
    }
#pragma unroll
    for (uint i = 0; i < Mods::kKeys; ++i) {
      float sum = counts ? mods.key_value(i, score, gradient, b, h, q, k) : 0.0f;
      sum += metal::simd_shuffle_xor(sum, 2);
      sum += metal::simd_shuffle_xor(sum, 4);
      sum += metal::simd_shuffle_xor(sum, 16);
      columns[(i * flex_columns<kAcross>() + n / 8) * 2 + two] += place.row == n % 8 ? sum : 0.0f;
    }
    if (Mods::kDiagonals > 0) *number = counts ? mods.diagonal_value(0, score, gradient, b, h, q, k) : 0.0f;
#pragma unroll
    for (uint i = 0; i < Mods::kTables; ++i) {
      float value = 0.0f;
      uint element = 0xffffffff;
      if (counts) {
        value = mods.table_value(i, score, gradient, b, h, q, k);
        element = mods.table_place(i, of_head, of_simd, b, h, q, k);
      }
      flex_add(mods.tables, value, element, lane);
    }
    if (Mods::kVectors > 0) flex_add_vectors(mods, counts, score, gradient, b, h, slots, q, k, lane);
  }
}

// Adds the sums of a tile's columns to the elements of its keys.
template <uint kAcross, typename Mods>
METAL_FUNC void flex_add_columns(thread const Mods& mods, thread const float* columns, FlexPlace at, FlexSlots slots,
                                 uint key, Place place) {
#pragma unroll
  for (uint i = 0; i < 2 * flex_columns<kAcross>() * Mods::kKeys; ++i) {
    const uint which = i / 2 / flex_columns<kAcross>(), n = i / 2 % flex_columns<kAcross>() * 8 + place.row;
    if (n >= kAcross || columns[i] == 0.0f) continue;
    const int k = int(key + n * 8 + place.column + i % 2);
    mods.tables[mods.key_place(which, slots.of_head, slots.of_simd, int(at.batch), int(at.head), 0, k)] += columns[i];
  }
}

// Adds the numbers of eight rows of fragments, in threadgroup memory, to their diagonals. The one of a query less a key
// is element `keys` - 1 + query - key of a table.
template <uint kKeys>
constexpr uint flex_numbers_pitch() {
  return kKeys + 8;  // so that lanes write to different banks
}
template <uint kKeys, typename Mods>
METAL_FUNC void flex_diagonals(thread const Mods& mods, threadgroup const float* numbers, FlexPlace at, FlexSlots slots,
                               uint query, uint key, uint keys, uint lane) {
  const uint zero = mods.diagonal_place(0, slots.of_head, slots.of_simd, int(at.batch), int(at.head), 0, 0);
  const uint first = zero + keys + query - key - kKeys;  // the first row's last key has it
  metal::simdgroup_barrier(metal::mem_flags::mem_threadgroup);
  for (uint d = (lane - first) % 32; d < kKeys + 7; d += 32) {
    float sum = 0.0f;
#pragma unroll
    for (uint row = 0; row < 8; ++row) {
      const uint column = row + kKeys - 1 - d;
      if (column < kKeys) sum += numbers[row * flex_numbers_pitch<kKeys>() + column];
    }
    if (sum != 0.0f) mods.tables[first + d] += sum;
  }
  metal::simdgroup_barrier(metal::mem_flags::mem_threadgroup);
}
