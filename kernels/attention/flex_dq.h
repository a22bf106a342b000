// The gradient of queries, and for each query what softmax's derivative subtracts: see dq.metal.
#pragma once

#include "flex_captured.h"
#include "products.h"

template <typename T, uint kSize, uint kDown, uint kSimds, uint kKeys, bool kNarrow, bool kWhole>
constexpr uint flex_dq_tile() {
  return ((kNarrow ? kKeys : 2 * kKeys) + (kNarrow ? 16 * kDown * kSimds : 0)) * (kSize + 16 / sizeof(T));
}

// What diagonals have of threadgroup memory.
template <uint kKeys, uint kSimds>
constexpr uint flex_dq_numbers() {
  return 8 * flex_numbers_pitch<kKeys>() * kSimds;
}

// The gradients of scores, in the place of `scores`.
template <bool kEdge, typename Mods, uint kDown, uint kAcross>
METAL_FUNC void gradients_of_queries(thread Fragments<float, kDown, kAcross>& scores,
                                     thread Fragments<float, kDown, kAcross>& products, thread const Mods& mods,
                                     thread float* rows, threadgroup float* numbers, float scale,
                                     thread const float* logarithms, thread const float* subtracted, uint seen,
                                     FlexPlace at, FlexSlots slots, uint query, uint key, uint keys, Place place,
                                     uint lane) {
  constexpr uint kPitch = flex_numbers_pitch<8 * kAcross>();
  float columns[2 * flex_columns<kAcross>() * Mods::kKeys + 1];
  fill(columns, 0.0f);
#pragma unroll
  for (uint m = 0; m < kDown; ++m) {
#pragma unroll
    for (uint n = 0; n < kAcross; ++n) {
      thread metal::float2& two = elements(scores.at[m][n]);
      metal::float2 gradient = elements(products.at[m][n]);
#pragma unroll
      for (uint i = 0; i < 2; ++i) {
        const uint row = query + m * 8 + place.row, column = key + n * 8 + place.column + i;
        float weight = two[i], slope = gradient[i];
        flex_gradient<kEdge, true>(mods, weight, slope, scale, logarithms[m], subtracted[m],
                                   (seen >> flex_bit(kAcross, m, n, i) & 1) != 0, at.batch, at.head, row, column);
        if constexpr (Mods::kCaptured)
          flex_captured<kAcross>(mods, rows + m * Mods::kRows, columns,
                                 numbers + place.row * kPitch + n * 8 + place.column + i, n, i, weight, two[i] * scale,
                                 weight * (gradient[i] - subtracted[m]), at, slots, row, column, place, lane);
        two[i] = slope;
      }
    }
    if constexpr (Mods::kDiagonals > 0)
      flex_diagonals<8 * kAcross>(mods, numbers, at, slots, query + m * 8, key, keys, lane);
  }
  if constexpr (Mods::kKeys > 0) flex_add_columns<kAcross>(mods, columns, at, slots, key, place);
}

// Adds a lane's part of the products of fragments and of a tile's rows.
template <uint kPitch, typename T, uint kDown, uint kAcross>
METAL_FUNC void add_products(thread float (&sums)[kDown], thread Fragments<T, kDown, kAcross>& a,
                             threadgroup const T* tile) {
#pragma unroll
  for (uint n = 0; n < kAcross; ++n) {
    Fragments<T, kDown, 1> right;
    load<kPitch>(right, tile + n * 8);
#pragma unroll
    for (uint m = 0; m < kDown; ++m) {
      const metal::float2 product = metal::float2(elements(a.at[m][n])) * metal::float2(elements(right.at[m][0]));
      sums[m] += product.x + product.y;
    }
  }
}

// Adds up what four lanes have for each query that softmax's derivative subtracts it, stores it, and loads the
// logarithms, which are infinite for queries that see nothing or do not exist.
template <uint kDown>
METAL_FUNC void finish_subtracted(thread float (&subtracted)[kDown], thread float (&logarithms)[kDown],
                                  device float* delta, device const float* lse, device const float* d_lse,
                                  constant FlexParams& p, FlexPlace at, uint query, Place place) {
#pragma unroll
  for (uint m = 0; m < kDown; ++m) {
    float sum = subtracted[m];
    sum += metal::simd_shuffle_xor(sum, 1);
    sum += metal::simd_shuffle_xor(sum, 8);
    const uint row = query + m * 8 + place.row;
    logarithms[m] = INFINITY;
    if (row < at.end) {
      const int64_t number = flex_number(p, at.batch, at.head, row);
      if (lse[number] != -INFINITY) logarithms[m] = lse[number];
      if (p.has_lse_gradient != 0) sum -= d_lse[number] * kLog2E;  // that of a logarithm to base 2
      if (place.column == 0) delta[number] = sum;
    }
    subtracted[m] = sum;
  }
}

template <typename T, uint kSize, uint kDown, uint kSimds, uint kKeys, bool kNarrow, bool kWhole, typename Mods>
METAL_FUNC void flex_dq(device T* dq, device float* delta, device const T* q, device const T* k, device const T* v,
                        device const int* counts, device const int* indices, device const int* full_counts,
                        device const int* full_indices, device const int* order, device const T* out,
                        device const float* lse, device const T* d_out, device const float* d_lse, threadgroup T* tile,
                        threadgroup float* numbers, constant FlexParams& p, thread const Mods& mods, uint group,
                        uint thread_index, uint simd, uint lane) {
  constexpr uint kPitch = kSize + 16 / sizeof(T), kAcross = kKeys / 8, kQueries = 8 * kDown * kSimds;
  constexpr bool kEarly = !kNarrow && sizeof(T) == 2;  // there are registers to load the next tiles into meanwhile
  constexpr uint kTileRows = kNarrow ? kKeys : 2 * kKeys;
  threadgroup T* const keys = tile;
  threadgroup T* const values = kNarrow ? tile : tile + kKeys * kPitch;
  threadgroup T* const own_queries = kNarrow ? tile + kTileRows * kPitch : tile;
  threadgroup T* const own_gradients = kNarrow ? own_queries + kQueries * kPitch : tile;

  const FlexPlace at = flex_place(p, order, uint(p.first) + group, uint(p.heads), uint(p.tables.q_block),
                                  uint(p.q_length), kQueries, true);
  if (at.begin >= at.end) return;
  const uint k_length = uint(p.k_length), k_head = at.head / uint(p.group);
  const Place place = place_of(lane);
  const uint query = at.begin + simd * 8 * kDown;
  const float scale = p.scale_number();
  const bool vectors = kWhole || p.vectors != 0;
  const uint head_size = kWhole ? kSize : uint(p.head_size), value_size = kWhole ? kSize : uint(p.value_size);

  const StridedRows<T> k_rows = rows_of(k, p.k, at.batch, k_head, 0), v_rows = rows_of(v, p.v, at.batch, k_head, 0);
  using Ahead = FlexRowsAhead<kWhole, T, kKeys, kSize, kPitch, 32 * kSimds>;
  Ahead keys_ahead(k_rows, k_length, head_size, vectors, thread_index);
  Ahead values_ahead(v_rows, k_length, value_size, vectors, thread_index);
  // The threadgroup asks for rows before it waits for any. Loads of the tables come first.
  const FlexRow row = flex_row(p, counts, indices, full_counts, full_indices, at.batch, at.head, at.block);
  const StridedRows<T> q_rows = rows_of(q, p.q, at.batch, at.head, 0);
  const StridedRows<T> out_rows = rows_of(out, p.out, at.batch, at.head, 0);
  const StridedRows<T> gradient_rows = rows_of(d_out, p.d_out, at.batch, at.head, 0);
  using Own = OwnAhead<kWhole, T, kSize, kPitch, kDown, kSimds>;
  Own results_ahead(out_rows, at.end, value_size, vectors, thread_index);
  Own gradients_ahead(gradient_rows, at.end, value_size, vectors, thread_index);
  Own queries_ahead(q_rows, at.end, head_size, vectors, thread_index);
  if (kEarly) {
    results_ahead.load(at.begin);
    gradients_ahead.load(at.begin);
  }
  FlexWalk walk = flex_walk(p, row, indices, full_indices, uint(p.tables.k_block), k_length, kKeys, 1);
  if (kEarly && walk.more()) {
    keys_ahead.load(walk.at);
    values_ahead.load(walk.at);
  }

  OwnRows<kNarrow, T, kDown, kSize / 8> queries, gradients;
  float subtracted[kDown], logarithms[kDown];
  fill(subtracted, 0.0f);
  if constexpr (kEarly) {
    flex_take<kTileRows, kPitch, kSimds>(gradients, tile, gradients_ahead, at.begin, simd);
    queries_ahead.load(at.begin);
    // Results are needed only here.
    const uint own = simd * 8 * kDown;
#pragma unroll
    for (uint begin = 0; begin < kQueries; begin += kTileRows) {
      flex_show<kTileRows, kPitch>(tile, results_ahead, at.begin, begin);
      if (own >= begin && own < begin + kTileRows)
        add_products<kPitch>(subtracted, gradients, tile + (own - begin) * kPitch);
    }
    flex_take<kTileRows, kPitch, kSimds>(queries, tile, queries_ahead, at.begin, simd);
  } else {  // results are in the place of the queries first
    load_by_tile<kTileRows, kPitch, kSimds>(queries, own_queries, out_rows, at.begin, at.end, value_size, vectors,
                                            thread_index, simd);
    load_by_tile<kTileRows, kPitch, kSimds>(gradients, own_gradients, gradient_rows, at.begin, at.end, value_size,
                                            vectors, thread_index, simd);
    add_products<kPitch>(subtracted, queries, gradients);
    load_by_tile<kTileRows, kPitch, kSimds>(queries, own_queries, q_rows, at.begin, at.end, head_size, vectors,
                                            thread_index, simd);
  }
  finish_subtracted(subtracted, logarithms, delta, lse, d_lse, p, at, query, place);
  float ones[kDown], factors[kDown];
  fill(ones, 1.0f);
  fill(factors, scale);
  Fragments<float, kDown, kSize / 8> sums;
  clear(sums);
  float rows[kDown * Mods::kRows + 1];
  fill(rows, 0.0f);
  FlexSlots slots{};
  if constexpr (Mods::kCaptured) slots = flex_slots(p, mods, at, kSimds, simd);
  threadgroup float* const own_numbers = numbers + (Mods::kDiagonals > 0 ? simd * flex_dq_numbers<kKeys, 1>() : 0);
  while (walk.more()) {
    const uint key = walk.at, end = walk.end;
    const bool masked = walk.masked(), edge = masked || (!kWhole && key + kKeys > end);
    walk.next();
    uint seen = 0xffffffff;
    if (edge)
      seen = seen_scores<false, kWhole, kDown, kAcross>(mods, masked, at.batch, at.head, query, key, end, place);
    const bool counts = metal::simd_any(seen != 0);  // of a simdgroup's scores, any
    Fragments<float, kDown, kAcross> scores, products;
    if (kNarrow) {
      exchange_rows<T, kKeys, kSize, kPitch, 32 * kSimds>(values, v_rows, key, k_length, value_size, vectors,
                                                          thread_index);
      if (counts) product_transposed<kPitch>(products, gradients, values);
      exchange_rows<T, kKeys, kSize, kPitch, 32 * kSimds>(keys, k_rows, key, k_length, head_size, vectors,
                                                          thread_index);
    } else {
      if (!kEarly) {
        keys_ahead.load(key);
        values_ahead.load(key);
      }
      metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
      keys_ahead.store(keys, key);
      values_ahead.store(values, key);
      metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    }
    if (kEarly && walk.more()) {
      keys_ahead.load(walk.at);
      values_ahead.load(walk.at);
    }

    if (!counts) continue;
    product_transposed<kPitch>(scores, queries, keys);
    if (!kNarrow) product_transposed<kPitch>(products, gradients, values);
    if (edge && metal::simd_any(seen != all_bits<kDown, kAcross>()))
      gradients_of_queries<true>(scores, products, mods, rows, own_numbers, scale, logarithms, subtracted, seen, at,
                                 slots, query, key, k_length, place, lane);
    else
      gradients_of_queries<false>(scores, products, mods, rows, own_numbers, scale, logarithms, subtracted, seen, at,
                                  slots, query, key, k_length, place, lane);
    Fragments<metal::conditional_t<kNarrow, float, T>, kDown, kAcross> rounded;
    round_to(rounded, scores);
    FlexSums<(!kNarrow && sizeof(T) == 2)>::template add<kPitch, kNarrow>(sums, ones, rounded, keys);
  }

  if constexpr (Mods::kRows > 0) {
#pragma unroll
    for (uint i = 0; i < kDown * Mods::kRows; ++i) {
      float sum = rows[i];
      sum += metal::simd_shuffle_xor(sum, 1);
      sum += metal::simd_shuffle_xor(sum, 8);
      const uint row = query + i / Mods::kRows * 8 + place.row;
      if (row < at.end && place.column == 0)
        mods.row_sums[i % Mods::kRows * mods.rows() + flex_number(p, at.batch, at.head, row)] = sum;
    }
  }
  flex_store(sums, factors, first_row(dq, p.dq, at.batch, at.head, 0), p.dq.row, query, at.end, head_size, place);
}
