// flex_dkv() for whole tiles of 16 bits: see flex_forward_tall.h. The next tile is copied while one is visited. Keys
// and values of the threadgroup stay in its memory, which leaves registers for larger tiles.
#pragma once

#include "flex_dkv.h"
#include "flex_forward_tall.h"

// What a threadgroup's memory has, in elements: values, keys, two tiles of queries and gradients, and what the mask
// finds for keys.
template <typename T, uint kSize, uint kDown, uint kSimds, uint kQueries, bool, bool, bool, bool, uint>
constexpr uint flex_dkv_tall_tile() {
  return (16 * kDown * kSimds + 4 * kQueries) * (kSize + 16 / sizeof(T)) +
         8 * kDown * kSimds * kHeldRowBytes / sizeof(T);
}

template <typename T, uint kSize, uint kDown, uint kSimds, uint kQueries, bool kNarrow, bool kWhole, bool kWithKeys,
          bool kWithValues, uint kOwn, typename Mods>
METAL_FUNC void flex_dkv_tall(device T* dk, device T* dv, device const T* q, device const T* k, device const T* v,
                              device const int* counts, device const int* indices, device const int* full_counts,
                              device const int* full_indices, device const int* order, device const float* lse,
                              device const float* delta, device const T* d_out, threadgroup T* declared,
                              threadgroup float* numbers, constant FlexParams& p, thread const Mods& mods, uint group,
                              uint thread_index, uint simd, uint lane) {
  static_assert(kWhole && !kNarrow && kWithKeys && kWithValues, "no row of a tile is missing, and both are wanted");
  constexpr uint kPitch = kSize + 16 / sizeof(T), kAcross = kQueries / 8, kKeys = 8 * kDown * kSimds;
  constexpr uint kThreads = 32 * kSimds, kStage = 2 * kQueries * kPitch;  // of queries and gradients
  constexpr uint kBytes =
      flex_dkv_tall_tile<T, kSize, kDown, kSimds, kQueries, kNarrow, kWhole, kWithKeys, kWithValues, kOwn>() *
      sizeof(T);
  threadgroup T* const tile = metalcore_memory_of_tile<kBytes>(declared, 0);
  threadgroup T* const stages = tile + 2 * kKeys * kPitch;
  threadgroup T* const own = tile + simd * 8 * kDown * kPitch;
  threadgroup FlexHeldRow<Mods>* const rows = reinterpret_cast<threadgroup FlexHeldRow<Mods>*>(stages + 2 * kStage);

  const uint k_heads = uint(p.heads / p.group);
  const FlexPlace at =
      flex_place(p, order, uint(p.first) + group, k_heads, uint(p.tables.k_block), uint(p.k_length), kKeys, false);
  if (at.begin >= at.end) return;
  const Place place = place_of(lane);
  const uint key = at.begin + simd * 8 * kDown;
  const float scale = p.scale_number();

  const uint first_head = at.head * uint(p.group), last_head = first_head + uint(p.group) - 1;
  FlexRow row = flex_row(p, counts, indices, full_counts, full_indices, at.batch, first_head, at.block);
  flex_copy<kKeys, kSize, kPitch, kThreads>(tile, rows_of(v, p.v, at.batch, at.head, 0), at.begin, thread_index);
  flex_copy<kKeys, kSize, kPitch, kThreads>(tile + kKeys * kPitch, rows_of(k, p.k, at.batch, at.head, 0), at.begin,
                                            thread_index);
  const RowsInTile<T, kDown, kSize / 8> values = {own}, keys = {own + kKeys * kPitch};

  float ones[kDown], factors[kDown];
  fill(ones, 1.0f);
  fill(factors, scale);
  Fragments<float, kDown, kSize / 8> k_sums, v_sums;
  clear(k_sums);
  clear(v_sums);
  uint stage = 0;
  for (uint head = first_head; head <= last_head; ++head) {
    const StridedRows<T> q_rows = rows_of(q, p.q, at.batch, head, 0);
    const StridedRows<T> gradient_rows = rows_of(d_out, p.d_out, at.batch, head, 0);
    const int64_t first_number = flex_number(p, at.batch, head, 0);
    FlexWalk walk = flex_walk(p, row, indices, full_indices, uint(p.tables.q_block), uint(p.q_length), kQueries, 1);
    metal::float2 ahead;
    if (walk.more()) {
      flex_copy_both<kQueries, kSize, kPitch, kThreads>(stages + stage * kStage, q_rows, gradient_rows, walk.at,
                                                        thread_index);
      ahead = numbers_of_query(lse, delta, first_number, walk, kQueries, thread_index);
    }
    const FlexHeldRows<8 * kDown, Mods> own_rows(rows + simd * 8 * kDown, mods, at.batch, head, key, lane, place);
    while (walk.more()) {
      const uint query = walk.at;
      const bool is_masked = walk.masked();
      threadgroup T* const queries = stages + stage * kStage;
      threadgroup T* const gradients = queries + kQueries * kPitch;
      threadgroup float* const logarithms = numbers + stage * 2 * kQueries;
      threadgroup float* const subtracted = logarithms + kQueries;
      stage = 1 - stage;
      walk.next();
      if (thread_index < kQueries) {
        logarithms[thread_index] = ahead.x;
        subtracted[thread_index] = ahead.y;
      }
      metalcore_await_copies(0);
      metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);  // the tile is there, and the other stage is free
      if (walk.more()) {
        flex_copy_both<kQueries, kSize, kPitch, kThreads>(stages + stage * kStage, q_rows, gradient_rows, walk.at,
                                                          thread_index);
        ahead = numbers_of_query(lse, delta, first_number, walk, kQueries, thread_index);
      }
      uint seen = 0xffffffff;
      if (is_masked)
        seen = seen_scores<true, kWhole, kDown, kAcross>(mods, true, at.batch, head, key, query, at.end, place, lane,
                                                         nullptr, own_rows);
      if (!metal::simd_any(seen != 0)) continue;  // of a simdgroup's scores, none counts

      Fragments<float, kDown, kAcross> scores, products;
      product_transposed<kPitch>(scores, keys, queries);
      product_transposed<kPitch>(products, values, gradients);
      if (is_masked && metal::simd_any(seen != all_bits<kDown, kAcross>()))
        gradients_of_keys<true, true>(scores, products, mods, scale, logarithms, subtracted, seen, at, head, query, key,
                                      place);
      else
        gradients_of_keys<false, true>(scores, products, mods, scale, logarithms, subtracted, seen, at, head, query,
                                       key, place);
      Fragments<T, kDown, kAcross> weights, slopes;
      round_to(weights, scores);
      round_to(slopes, products);
      FlexSums<true>::template add<kPitch, false>(v_sums, ones, weights, gradients);
      FlexSums<true>::template add<kPitch, false>(k_sums, ones, slopes, queries);
    }
    if (head < last_head) row = flex_row(p, counts, indices, full_counts, full_indices, at.batch, head + 1, at.block);
  }

  // A simdgroup's results take the place of its values, for which a threadgroup without tiles has not waited.
  metalcore_await_copies(0);
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  flex_store_by_tile<kWhole, kPitch>(v_sums, ones, own, first_row(dv, p.dv, at.batch, at.head, 0), p.dv.row, key,
                                     at.end, kSize, lane, place);
  metal::simdgroup_barrier(metal::mem_flags::mem_threadgroup);
  flex_store_by_tile<kWhole, kPitch>(k_sums, factors, own, first_row(dk, p.dk, at.batch, at.head, 0), p.dk.row, key,
                                     at.end, kSize, lane, place);
}
