// The gradients of keys and values, of which a kernel may write one alone: see dkv.metal.
#pragma once

#include "flex.h"

// `kOwn` of the operands that a threadgroup keeps, its values and then its keys, stay in threadgroup memory.
template <typename T, uint kSize, uint kDown, uint kSimds, uint kQueries, bool kNarrow, bool kWhole, bool kWithKeys,
          bool kWithValues, uint kOwn>
constexpr uint flex_dkv_tile() {
  return ((kWithKeys && kWithValues ? 2 * kQueries : kQueries) + kOwn * 8 * kDown * kSimds) * (kSize + 16 / sizeof(T));
}

// Weights in the place of `scores`, and the gradients of scores in that of `products`.
template <bool kEdge, bool kWithKeys, typename Mods, uint kDown, uint kAcross>
METAL_FUNC void gradients_of_keys(thread Fragments<float, kDown, kAcross>& scores,
                                  thread Fragments<float, kDown, kAcross>& products, thread const Mods& mods,
                                  float scale, threadgroup const float* logarithms, threadgroup const float* subtracted,
                                  uint seen, FlexPlace at, uint head, uint query, uint key, Place place) {
#pragma unroll
  for (uint n = 0; n < kAcross; ++n) {
    const uint number = n * 8 + place.column;
    const metal::float2 lse = metal::float2(logarithms[number], logarithms[number + 1]);
    const metal::float2 delta = metal::float2(subtracted[number], subtracted[number + 1]);
#pragma unroll
    for (uint m = 0; m < kDown; ++m) {
      const uint row = key + m * 8 + place.row;
#pragma unroll
      for (uint i = 0; i < 2; ++i) {
        float weight = elements(scores.at[m][n])[i], slope = elements(products.at[m][n])[i];
        flex_gradient<kEdge, kWithKeys>(mods, weight, slope, scale, lse[i], delta[i],
                                        (seen >> flex_bit(kAcross, m, n, i) & 1) != 0, at.batch, head,
                                        query + number + i, row);
        elements(scores.at[m][n])[i] = weight;
        if (kWithKeys) elements(products.at[m][n])[i] = slope;
      }
    }
  }
}

// Returns the logarithm of a thread's query in the tile, and what is subtracted from its gradients. Queries that see
// nothing or do not exist have weights of 0.
METAL_FUNC metal::float2 numbers_of_query(device const float* lse, device const float* delta, int64_t first,
                                          thread const FlexWalk& walk, uint queries, uint thread_index) {
  const uint query = walk.at + thread_index;
  if (thread_index >= queries || query >= walk.end) return metal::float2(INFINITY, 0.0f);
  const float logarithm = lse[first + query];
  return metal::float2(logarithm == -INFINITY ? INFINITY : logarithm, delta[first + query]);
}

template <typename T, uint kSize, uint kDown, uint kSimds, uint kQueries, bool kNarrow, bool kWhole, bool kWithKeys,
          bool kWithValues, uint kOwn, typename Mods>
METAL_FUNC void flex_dkv(device T* dk, device T* dv, device const T* q, device const T* k, device const T* v,
                         device const int* counts, device const int* indices, device const int* full_counts,
                         device const int* full_indices, device const int* order, device const float* lse,
                         device const float* delta, device const T* d_out, threadgroup T* tile,
                         threadgroup float* numbers, constant FlexParams& p, thread const Mods& mods, uint group,
                         uint thread_index, uint simd, uint lane) {
  constexpr bool kBoth = kWithKeys && kWithValues;
  constexpr uint kPitch = kSize + 16 / sizeof(T), kAcross = kQueries / 8, kKeys = 8 * kDown * kSimds;
  constexpr bool kEarly = !kNarrow && sizeof(T) == 2 && kBoth;  // the next tiles are loaded meanwhile
  constexpr uint kTileRows = kBoth ? 2 * kQueries : kQueries;
  threadgroup T* const queries = tile;
  threadgroup T* const gradients = kBoth ? tile + kQueries * kPitch : tile;
  threadgroup T* const own_values = kOwn > 0 ? tile + kTileRows * kPitch : tile;
  threadgroup T* const own_keys = kOwn > 1 ? own_values + kKeys * kPitch : kNarrow ? own_values : tile;
  threadgroup float* const logarithms = numbers;
  threadgroup float* const subtracted = numbers + kQueries;

  const uint k_heads = uint(p.heads / p.group), q_length = uint(p.q_length);
  const FlexPlace at =
      flex_place(p, order, uint(p.first) + group, k_heads, uint(p.tables.k_block), uint(p.k_length), kKeys, false);
  if (at.begin >= at.end) return;
  const Place place = place_of(lane);
  const uint key = at.begin + simd * 8 * kDown;
  const float scale = p.scale_number();
  const bool vectors = kWhole || p.vectors != 0;
  const uint head_size = kWhole ? kSize : uint(p.head_size), value_size = kWhole ? kSize : uint(p.value_size);

  OwnRows<kNarrow, T, kDown, kSize / 8, (kOwn > 1)> keys;
  OwnRows<kNarrow, T, kDown, kSize / 8, (kOwn > 0)> values;
  const StridedRows<T> k_rows = rows_of(k, p.k, at.batch, at.head, 0), v_rows = rows_of(v, p.v, at.batch, at.head, 0);
  const uint first_head = at.head * uint(p.group), last_head = first_head + uint(p.group) - 1;
  FlexRow row = flex_row(p, counts, indices, full_counts, full_indices, at.batch, first_head, at.block);
  if constexpr (kEarly) {
    OwnAhead<kWhole, T, kSize, kPitch, kDown, kSimds> keys_ahead(k_rows, at.end, head_size, vectors, thread_index);
    OwnAhead<kWhole, T, kSize, kPitch, kDown, kSimds> values_ahead(v_rows, at.end, value_size, vectors, thread_index);
    keys_ahead.load(at.begin);
    values_ahead.load(at.begin);
    flex_take<kTileRows, kPitch, kSimds>(keys, tile, keys_ahead, at.begin, simd);
    flex_take<kTileRows, kPitch, kSimds>(values, tile, values_ahead, at.begin, simd);
  } else {
    load_by_tile<kTileRows, kPitch, kSimds>(keys, own_keys, k_rows, at.begin, at.end, head_size, vectors, thread_index,
                                            simd);
    if (kWithKeys)
      load_by_tile<kTileRows, kPitch, kSimds>(values, own_values, v_rows, at.begin, at.end, value_size, vectors,
                                              thread_index, simd);
  }
  float ones[kDown], factors[kDown];
  fill(ones, 1.0f);
  fill(factors, scale);
  Fragments<float, kDown, kSize / 8> k_sums, v_sums;
  clear(k_sums);
  clear(v_sums);
  for (uint head = first_head; head <= last_head; ++head) {
    const StridedRows<T> q_rows = rows_of(q, p.q, at.batch, head, 0);
    const StridedRows<T> gradient_rows = rows_of(d_out, p.d_out, at.batch, head, 0);
    const int64_t first_number = flex_number(p, at.batch, head, 0);
    using Ahead = FlexRowsAhead<kWhole, T, kQueries, kSize, kPitch, 32 * kSimds>;
    Ahead queries_ahead(q_rows, q_length, head_size, vectors, thread_index);
    Ahead gradients_ahead(gradient_rows, q_length, value_size, vectors, thread_index);
    metal::float2 ahead;
    FlexWalk walk = flex_walk(p, row, indices, full_indices, uint(p.tables.q_block), q_length, kQueries, 1);
    if (kEarly && walk.more()) {
      queries_ahead.load(walk.at);
      gradients_ahead.load(walk.at);
      ahead = numbers_of_query(lse, delta, first_number, walk, kQueries, thread_index);
    }
    while (walk.more()) {
      const uint query = walk.at;
      const bool masked = walk.masked(), edge = masked || (!kWhole && at.begin + kKeys > at.end);
      uint seen = 0xffffffff;
      if (edge)
        seen = seen_scores<true, kWhole, kDown, kAcross>(mods, masked, at.batch, head, key, query, at.end, place);
      const bool counts = metal::simd_any(seen != 0);  // of a simdgroup's scores, any
      if (!kEarly) ahead = numbers_of_query(lse, delta, first_number, walk, kQueries, thread_index);
      metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
      if (kEarly) {
        queries_ahead.store(queries, query);
        gradients_ahead.store(gradients, query);
      } else {
        if (kWithValues)
          load_rows<T, kQueries, kSize, kPitch, 32 * kSimds>(queries, q_rows, query, q_length, head_size, vectors,
                                                             thread_index);
        if (kWithKeys)
          load_rows<T, kQueries, kSize, kPitch, 32 * kSimds>(gradients, gradient_rows, query, q_length, value_size,
                                                             vectors, thread_index);
      }
      if (thread_index < kQueries) {
        logarithms[thread_index] = ahead.x;
        subtracted[thread_index] = ahead.y;
      }
      metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
      walk.next();

      Fragments<float, kDown, kAcross> scores, products;
      if (!kWithValues) {
        if (counts) product_transposed<kPitch>(products, values, gradients);
        exchange_rows<T, kQueries, kSize, kPitch, 32 * kSimds>(queries, q_rows, query, q_length, head_size, vectors,
                                                               thread_index);
      }
      Fragments<metal::conditional_t<kNarrow, float, T>, kDown, kAcross> weights, slopes;
      if (counts) {
        product_transposed<kPitch>(scores, keys, queries);
        if (kBoth) product_transposed<kPitch>(products, values, gradients);
        if (edge && metal::simd_any(seen != all_bits<kDown, kAcross>()))
          gradients_of_keys<true, kWithKeys>(scores, products, mods, scale, logarithms, subtracted, seen, at, head,
                                             query, key, place);
        else
          gradients_of_keys<false, kWithKeys>(scores, products, mods, scale, logarithms, subtracted, seen, at, head,
                                              query, key, place);
        if (kWithValues) round_to(weights, scores);
        if (kWithKeys) round_to(slopes, products);
      }
      if (kEarly && walk.more()) {
        queries_ahead.load(walk.at);
        gradients_ahead.load(walk.at);
        ahead = numbers_of_query(lse, delta, first_number, walk, kQueries, thread_index);
      }
      if (kWithValues) {
        if (!kWithKeys)
          exchange_rows<T, kQueries, kSize, kPitch, 32 * kSimds>(gradients, gradient_rows, query, q_length, value_size,
                                                                 vectors, thread_index);
        if (counts)
          FlexSums<(!kNarrow && sizeof(T) == 2)>::template add<kPitch, kNarrow>(v_sums, ones, weights, gradients);
      }
      if (kWithKeys && counts)
        FlexSums<(!kNarrow && sizeof(T) == 2)>::template add<kPitch, kNarrow>(k_sums, ones, slopes, queries);
    }
    if (head < last_head) row = flex_row(p, counts, indices, full_counts, full_indices, at.batch, head + 1, at.block);
  }

  if (kWithValues)
    flex_store(v_sums, ones, first_row(dv, p.dv, at.batch, at.head, 0), p.dv.row, key, at.end, value_size, place);
  if (kWithKeys)
    flex_store(k_sums, factors, first_row(dk, p.dk, at.batch, at.head, 0), p.dk.row, key, at.end, head_size, place);
}
