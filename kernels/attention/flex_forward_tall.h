// flex_forward() for whole tiles of 16 bits on GPUs whose cores have room for two such threadgroups: what one does once
// goes on beside the products of the other. A simdgroup has 32 queries, so that keys and values are read from
// threadgroup memory half as often as by 16. The queries stay there, and the next tile is copied while one is visited.
#pragma once

#include "../common/copies.h"
#include "flex_forward.h"

// What a threadgroup's memory has, in elements: its queries, two tiles of keys and values, and what the mask finds.
template <typename T, uint kSize, uint kDown, uint kSimds, uint kKeys, bool, bool kWhole>
constexpr uint flex_forward_tall_tile() {
  return (8 * kDown * kSimds + 4 * kKeys + 2 * flex_column_rows(kKeys, kWhole)) * (kSize + 16 / sizeof(T)) +
         8 * kDown * kSimds * kHeldRowBytes / sizeof(T);
}

// Begins to copy rows to a tile.
template <uint kRows, uint kSize, uint kPitch, uint kThreads, typename T>
METAL_FUNC void flex_copy(threadgroup T* tile, StridedRows<T> rows, uint first, uint thread_index) {
  constexpr uint kPack = 16 / sizeof(T), kPacks = kSize / kPack, kStep = kThreads / kPacks;
  const uint column = thread_index % kPacks * kPack;
  device const T* from = rows.row(first + thread_index / kPacks) + column;
  threadgroup T* const to = tile + thread_index / kPacks * kPitch + column;
#pragma unroll
  for (uint s = 0; s < kRows / kStep; ++s) {
    metalcore_copy_pack(to + s * kStep * kPitch, from, 0);
    from += kStep * rows.stride;
  }
}

// Begins to copy the two tiles of a stage, one behind the other: the same rows of two tensors.
template <uint kRows, uint kSize, uint kPitch, uint kThreads, typename T>
METAL_FUNC void flex_copy_both(threadgroup T* stage, StridedRows<T> first_rows, StridedRows<T> second_rows, uint first,
                               uint thread_index) {
  flex_copy<kRows, kSize, kPitch, kThreads>(stage, first_rows, first, thread_index);
  flex_copy<kRows, kSize, kPitch, kThreads>(stage + kRows * kPitch, second_rows, first, thread_index);
}

// Begins to copy the tile that a walk visits next, if there is one.
template <uint kRows, uint kSize, uint kPitch, uint kThreads, typename T>
METAL_FUNC void flex_copy_next(threadgroup T* stage, StridedRows<T> first_rows, StridedRows<T> second_rows,
                               FlexWalk walk, uint thread_index) {
  if (walk.more())
    flex_copy_both<kRows, kSize, kPitch, kThreads>(stage, first_rows, second_rows, walk.at, thread_index);
}

template <typename T, uint kSize, uint kDown, uint kSimds, uint kKeys, bool kNarrow, bool kWhole, typename Mods>
METAL_FUNC void flex_forward_tall(device T* out, device float* lse, device float* largest_scores, device const T* q,
                                  device const T* k, device const T* v, device const int* counts,
                                  device const int* indices, device const int* full_counts,
                                  device const int* full_indices, device const int* order, threadgroup T* declared,
                                  constant FlexParams& p, thread const Mods& mods, uint group, uint thread_index,
                                  uint simd, uint lane) {
  static_assert(kWhole && !kNarrow, "no row and no element of a tile is missing");
  constexpr uint kPitch = kSize + 16 / sizeof(T), kAcross = kKeys / 8, kQueries = 8 * kDown * kSimds;
  constexpr uint kThreads = 32 * kSimds, kStage = 2 * kKeys * kPitch;  // of keys and values
  // Products of long rows do not wait for instructions that copy, and short ones leave a copy too little time.
  constexpr bool kCopiesLate = kSize >= 128;
  constexpr uint kBytes = flex_forward_tall_tile<T, kSize, kDown, kSimds, kKeys, kNarrow, kWhole>() * sizeof(T);
  using Column = typename Mods::Column;
  threadgroup T* const tile = metalcore_memory_of_tile<kBytes>(declared, 0);
  threadgroup T* const own = tile + simd * 8 * kDown * kPitch;
  threadgroup T* const stages = tile + kQueries * kPitch;
  threadgroup FlexHeldRow<Mods>* const rows = reinterpret_cast<threadgroup FlexHeldRow<Mods>*>(stages + 2 * kStage);
  threadgroup Column* const held =
      reinterpret_cast<threadgroup Column*>(stages + 2 * kStage + kQueries * kHeldRowBytes / sizeof(T));

  const FlexPlace at = flex_place(p, order, uint(p.first) + group, uint(p.heads), uint(p.tables.q_block),
                                  uint(p.q_length), kQueries, true);
  if (at.begin >= at.end) return;
  const uint k_head = at.head / uint(p.group), query = at.begin + simd * 8 * kDown;
  const Place place = place_of(lane);
  const float scale = p.scale_number();

  // Loads of the tables come first.
  const FlexRow row = flex_row(p, counts, indices, full_counts, full_indices, at.batch, at.head, at.block);
  metal::simdgroup_barrier(metal::mem_flags::mem_threadgroup);  // keeps compilers from mixing them
  const StridedRows<T> q_rows = rows_of(q, p.q, at.batch, at.head, 0);
  flex_copy<kQueries, kSize, kPitch, kThreads>(tile, q_rows, at.begin, thread_index);
  const StridedRows<T> k_rows = rows_of(k, p.k, at.batch, k_head, 0), v_rows = rows_of(v, p.v, at.batch, k_head, 0);
  FlexWalk walk = flex_walk(p, row, indices, full_indices, uint(p.tables.k_block), uint(p.k_length), kKeys, 1);
  flex_copy_next<kKeys, kSize, kPitch, kThreads>(stages, k_rows, v_rows, walk, thread_index);
  FlexColumns<kKeys, Mods> columns = {held, thread_index, {}};
  if (Mods::kColumns) columns.load(mods, at, walk);
  const FlexHeldRows<8 * kDown, Mods> own_rows(rows + simd * 8 * kDown, mods, at.batch, at.head, query, lane, place);

  const RowsInTile<T, kDown, kSize / 8> queries = {own};
  Fragments<float, kDown, kSize / 8> sums;
  clear(sums);
  float largest[kDown], total[kDown];
  fill(largest, -INFINITY);
  fill(total, 0.0f);
  uint stage = 0;
  while (walk.more()) {
    const uint key = walk.at, end = walk.end;
    const bool is_masked = walk.masked();
    threadgroup T* const keys = stages + stage * kStage;
    columns.held = held + stage * kKeys;
    stage = 1 - stage;
    walk.next();
    if (Mods::kColumns) columns.store(is_masked);
    metalcore_await_copies(0);
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);  // the tile is there, and the other stage is free
    if (!kCopiesLate)
      flex_copy_next<kKeys, kSize, kPitch, kThreads>(stages + stage * kStage, k_rows, v_rows, walk, thread_index);
    if (Mods::kColumns) columns.load(mods, at, walk);
    uint seen = 0xffffffff;
    if (is_masked)
      seen = seen_scores<false, kWhole, kDown, kAcross, Mods::kColumns>(mods, true, at.batch, at.head, query, key, end,
                                                                        place, lane, columns.held, own_rows);
    if (!metal::simd_any(seen != 0)) {  // of a simdgroup's scores, none counts
      if (kCopiesLate)
        flex_copy_next<kKeys, kSize, kPitch, kThreads>(stages + stage * kStage, k_rows, v_rows, walk, thread_index);
      continue;
    }

    Fragments<float, kDown, kAcross> scores;
    product_transposed<kPitch>(scores, queries, keys);
    Fragments<T, kDown, kAcross> weights;
    float shrink[kDown];
    weights_of(weights, scores, largest, total, shrink, mods, scale, at, query, key, is_masked, seen, place);
    if (kCopiesLate)
      flex_copy_next<kKeys, kSize, kPitch, kThreads>(stages + stage * kStage, k_rows, v_rows, walk, thread_index);
    FlexSums<true>::template add<kPitch, false>(sums, shrink, weights, keys + kKeys * kPitch);
  }

  // Results take the place of queries, for which a threadgroup without tiles has not waited.
  metalcore_await_copies(0);
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  float factors[kDown];
  const uint own_row = query + place.row;
  finish_rows<kWhole, false, kDown>(factors, total, largest, lse, largest_scores,
                                    flex_number(p, at.batch, at.head, own_row), 1, own_row, at.end, place);
  flex_store_by_tile<kWhole, kPitch>(sums, factors, own, first_row(out, p.out, at.batch, at.head, 0), p.out.row, query,
                                     at.end, kSize, lane, place);
}
