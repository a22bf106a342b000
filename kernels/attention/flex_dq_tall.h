// flex_dq() for whole tiles of 16 bits: see flex_forward_tall.h. The queries and the gradients of their results stay in
// threadgroup memory. Functions capture nothing that needs a gradient.
#pragma once

#include "flex_dq.h"
#include "flex_forward_tall.h"

// What a threadgroup's memory has, in elements: queries, gradients, and two tiles of keys and values, whose place the
// results have first, and what the mask finds for queries.
template <typename T, uint kSize, uint kDown, uint kSimds, uint kKeys, bool, bool>
constexpr uint flex_dq_tall_tile() {
  return (16 * kDown * kSimds + 4 * kKeys) * (kSize + 16 / sizeof(T)) + 8 * kDown * kSimds * kHeldRowBytes / sizeof(T);
}

// Adds a lane's part of the products of two tiles' rows.
template <uint kAcross, uint kPitch, typename T, uint kDown>
METAL_FUNC void add_tile_products(thread float (&sums)[kDown], threadgroup const T* left, threadgroup const T* right) {
#pragma unroll
  for (uint n = 0; n < kAcross; ++n) {
    Fragments<T, kDown, 1> a, b;
    load<kPitch>(a, left + n * 8);
    load<kPitch>(b, right + n * 8);
#pragma unroll
    for (uint m = 0; m < kDown; ++m) {
      const metal::float2 product = metal::float2(elements(a.at[m][0])) * metal::float2(elements(b.at[m][0]));
      sums[m] += product.x + product.y;
    }
  }
}

template <typename T, uint kSize, uint kDown, uint kSimds, uint kKeys, bool kNarrow, bool kWhole, typename Mods>
METAL_FUNC void flex_dq_tall(device T* dq, device float* delta, device const T* q, device const T* k, device const T* v,
                             device const int* counts, device const int* indices, device const int* full_counts,
                             device const int* full_indices, device const int* order, device const T* out,
                             device const float* lse, device const T* d_out, device const float* d_lse,
                             threadgroup T* declared, constant FlexParams& p, thread const Mods& mods, uint group,
                             uint thread_index, uint simd, uint lane) {
  static_assert(kWhole && !kNarrow && !Mods::kCaptured, "no row of a tile is missing, and no sums are wanted");
  constexpr uint kPitch = kSize + 16 / sizeof(T), kAcross = kKeys / 8, kQueries = 8 * kDown * kSimds;
  constexpr uint kThreads = 32 * kSimds, kStage = 2 * kKeys * kPitch;  // of keys and values
  static_assert(kQueries <= 4 * kKeys, "results take the place of the tiles");
  constexpr uint kBytes = flex_dq_tall_tile<T, kSize, kDown, kSimds, kKeys, kNarrow, kWhole>() * sizeof(T);
  threadgroup T* const tile = metalcore_memory_of_tile<kBytes>(declared, 0);
  threadgroup T* const stages = tile + 2 * kQueries * kPitch;
  threadgroup T* const own = tile + simd * 8 * kDown * kPitch;
  threadgroup FlexHeldRow<Mods>* const rows = reinterpret_cast<threadgroup FlexHeldRow<Mods>*>(stages + 2 * kStage);

  const FlexPlace at = flex_place(p, order, uint(p.first) + group, uint(p.heads), uint(p.tables.q_block),
                                  uint(p.q_length), kQueries, true);
  if (at.begin >= at.end) return;
  const uint k_head = at.head / uint(p.group), query = at.begin + simd * 8 * kDown;
  const Place place = place_of(lane);
  const float scale = p.scale_number();

  const FlexRow row = flex_row(p, counts, indices, full_counts, full_indices, at.batch, at.head, at.block);
  flex_copy<kQueries, kSize, kPitch, kThreads>(stages, rows_of(out, p.out, at.batch, at.head, 0), at.begin,
                                               thread_index);
  flex_copy<kQueries, kSize, kPitch, kThreads>(tile + kQueries * kPitch, rows_of(d_out, p.d_out, at.batch, at.head, 0),
                                               at.begin, thread_index);
  flex_copy<kQueries, kSize, kPitch, kThreads>(tile, rows_of(q, p.q, at.batch, at.head, 0), at.begin, thread_index);
  const StridedRows<T> k_rows = rows_of(k, p.k, at.batch, k_head, 0), v_rows = rows_of(v, p.v, at.batch, k_head, 0);
  FlexWalk walk = flex_walk(p, row, indices, full_indices, uint(p.tables.k_block), uint(p.k_length), kKeys, 1);
  metalcore_await_copies(0);
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  float subtracted[kDown], logarithms[kDown];
  fill(subtracted, 0.0f);
  add_tile_products<kSize / 8, kPitch>(subtracted, own + kQueries * kPitch, stages + simd * 8 * kDown * kPitch);
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  if (walk.more()) {
    flex_copy_both<kKeys, kSize, kPitch, kThreads>(stages, k_rows, v_rows, walk.at, thread_index);
  }
  finish_subtracted(subtracted, logarithms, delta, lse, d_lse, p, at, query, place);
  const FlexHeldRows<8 * kDown, Mods> own_rows(rows + simd * 8 * kDown, mods, at.batch, at.head, query, lane, place);

  const RowsInTile<T, kDown, kSize / 8> queries = {own}, gradients = {own + kQueries * kPitch};
  float ones[kDown], factors[kDown], no_rows[1];
  fill(ones, 1.0f);
  fill(factors, scale);
  Fragments<float, kDown, kSize / 8> sums;
  clear(sums);
  uint stage = 0;
  while (walk.more()) {
    const uint key = walk.at, end = walk.end;
    const bool is_masked = walk.masked();
    threadgroup T* const keys = stages + stage * kStage;
    stage = 1 - stage;
    walk.next();
    metalcore_await_copies(0);
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);  // the tile is there, and the other stage is free
    if (walk.more()) {
      flex_copy_both<kKeys, kSize, kPitch, kThreads>(stages + stage * kStage, k_rows, v_rows, walk.at, thread_index);
    }
    uint seen = 0xffffffff;
    if (is_masked)
      seen = seen_scores<false, kWhole, kDown, kAcross>(mods, true, at.batch, at.head, query, key, end, place, lane,
                                                        nullptr, own_rows);
    if (!metal::simd_any(seen != 0)) continue;  // of a simdgroup's scores, none counts

    Fragments<float, kDown, kAcross> scores, products;
    product_transposed<kPitch>(scores, queries, keys);
    product_transposed<kPitch>(products, gradients, keys + kKeys * kPitch);
    if (is_masked && metal::simd_any(seen != all_bits<kDown, kAcross>()))
      gradients_of_queries<true>(scores, products, mods, no_rows, nullptr, scale, logarithms, subtracted, seen, at,
                                 FlexSlots{}, query, key, uint(p.k_length), place, lane);
    else
      gradients_of_queries<false>(scores, products, mods, no_rows, nullptr, scale, logarithms, subtracted, seen, at,
                                  FlexSlots{}, query, key, uint(p.k_length), place, lane);
    Fragments<T, kDown, kAcross> rounded;
    round_to(rounded, scores);
    FlexSums<true>::template add<kPitch, false>(sums, ones, rounded, keys);
  }
  metal::simdgroup_barrier(metal::mem_flags::mem_threadgroup);
  flex_store_by_tile<kWhole, kPitch>(sums, factors, own, first_row(dq, p.dq, at.batch, at.head, 0), p.dq.row, query,
                                     at.end, kSize, lane, place);
}
