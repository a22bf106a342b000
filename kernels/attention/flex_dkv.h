// The gradients of keys and values, of which a kernel may write one alone: see dkv.metal.
#pragma once

#include "flex.h"

template <typename T, uint kSize, uint kDown, uint kSimds, uint kQueries, bool kNarrow, bool kWithKeys,
          bool kWithValues>
constexpr uint flex_dkv_tile() {
  return ((kWithKeys && kWithValues ? 2 * kQueries : kQueries) +
          (kNarrow ? (kWithKeys ? 16 : 8) * kDown * kSimds : 0)) *
         (kSize + 16 / sizeof(T));
}

template <typename T, uint kSize, uint kDown, uint kSimds, uint kQueries, bool kNarrow, bool kWithKeys,
          bool kWithValues, typename Mods>
METAL_FUNC void flex_dkv(device T* dk, device T* dv, device const T* q, device const T* k, device const T* v,
                         device const int* counts, device const int* indices, device const int* full_counts,
                         device const int* full_indices, device const float* lse, device const float* delta,
                         device const T* d_out, threadgroup T* tile, threadgroup float* numbers, constant FlexParams& p,
                         thread const Mods& mods, uint group, uint thread_index, uint simd, uint lane) {
  constexpr bool kBoth = kWithKeys && kWithValues;
  constexpr uint kPitch = kSize + 16 / sizeof(T), kAcross = kQueries / 8, kKeys = 8 * kDown * kSimds;
  constexpr uint kTileRows = kBoth ? 2 * kQueries : kQueries;
  threadgroup T* const queries = tile;
  threadgroup T* const gradients = kBoth ? tile + kQueries * kPitch : tile;
  threadgroup T* const own_keys = kNarrow ? tile + kTileRows * kPitch : tile;
  threadgroup T* const own_values = kNarrow && kWithKeys ? own_keys + kKeys * kPitch : own_keys;
  threadgroup float* const logarithms = numbers;
  threadgroup float* const subtracted = numbers + kQueries;

  const uint k_heads = uint(p.heads / p.group), q_length = uint(p.q_length);
  const FlexPlace at =
      flex_place(p, uint(p.first) + group, k_heads, uint(p.tables.k_block), uint(p.k_length), kKeys, false);
  if (at.begin >= at.end) return;
  const Place place = place_of(lane);
  const uint key = at.begin + simd * 8 * kDown;
  const float scale = p.scale_number();
  const bool vectors = p.vectors != 0;

  OwnRows<kNarrow, T, kDown, kSize / 8> keys, values;
  load_by_tile<kTileRows, kPitch, kSimds>(keys, own_keys, rows_of(k, p.k, at.batch, at.head, 0), at.begin, at.end,
                                          uint(p.head_size), vectors, thread_index, simd);
  if (kWithKeys)
    load_by_tile<kTileRows, kPitch, kSimds>(values, own_values, rows_of(v, p.v, at.batch, at.head, 0), at.begin, at.end,
                                            uint(p.value_size), vectors, thread_index, simd);
  float ones[kDown], factors[kDown];
  fill(ones, 1.0f);
  fill(factors, scale);
  Fragments<float, kDown, kSize / 8> k_sums, v_sums;
  clear(k_sums);
  clear(v_sums);
  for (uint head = at.head * uint(p.group); head < (at.head + 1) * uint(p.group); ++head) {
    const StridedRows<T> q_rows = rows_of(q, p.q, at.batch, head, 0);
    const StridedRows<T> gradient_rows = rows_of(d_out, p.d_out, at.batch, head, 0);
    for (FlexWalk walk = flex_walk(p, counts, indices, full_counts, full_indices, at.batch, head, at.block,
                                   uint(p.tables.q_block), q_length, kQueries, 1);
         walk.more(); walk.next()) {
      const uint query = walk.at;
      metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
      if (kWithValues)
        load_rows<T, kQueries, kSize, kPitch, 32 * kSimds>(queries, q_rows, query, q_length, uint(p.head_size), vectors,
                                                           thread_index);
      if (kWithKeys)
        load_rows<T, kQueries, kSize, kPitch, 32 * kSimds>(gradients, gradient_rows, query, q_length,
                                                           uint(p.value_size), vectors, thread_index);
      for (uint i = thread_index; i < kQueries; i += 32 * kSimds) {
        const bool exists = query + i < walk.end;
        const int64_t number = flex_number(p, at.batch, head, query + i);
        logarithms[i] = exists ? lse[number] : -INFINITY;
        subtracted[i] = exists ? delta[number] : 0.0f;
      }
      metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);

      Fragments<float, kDown, kAcross> scores, products;
      if (!kWithValues) {
        product_transposed<kPitch>(products, values, gradients);
        exchange_rows<T, kQueries, kSize, kPitch, 32 * kSimds>(queries, q_rows, query, q_length, uint(p.head_size),
                                                               vectors, thread_index);
      }
      product_transposed<kPitch>(scores, keys, queries);
      if (kBoth) product_transposed<kPitch>(products, values, gradients);
#pragma unroll
      for (uint m = 0; m < kDown; ++m) {
        const uint row = key + m * 8 + place.row;
#pragma unroll
        for (uint n = 0; n < kAcross; ++n) {
          thread metal::float2& two = elements(scores.at[m][n]);
          thread metal::float2& gradient = elements(products.at[m][n]);
#pragma unroll
          for (uint i = 0; i < 2; ++i) {
            const uint number = n * 8 + place.column + i, column = query + number;
            const FlexWeight weight = flex_weight(mods, two[i], scale, logarithms[number], row < at.end, walk.masked(),
                                                  at.batch, head, column, row);
            two[i] = weight.value;
            if (kWithKeys)
              gradient[i] =
                  flex_derivative(mods, weight, gradient[i] - subtracted[number], at.batch, head, column, row);
          }
        }
      }
      Fragments<metal::conditional_t<kNarrow, float, T>, kDown, kAcross> rounded;
      if (kWithValues) {
        round_to(rounded, scores);
        if (!kWithKeys)
          exchange_rows<T, kQueries, kSize, kPitch, 32 * kSimds>(gradients, gradient_rows, query, q_length,
                                                                 uint(p.value_size), vectors, thread_index);
        add_product<kPitch, kNarrow>(v_sums, ones, rounded, gradients);
      }
      if (kWithKeys) {
        round_to(rounded, products);
        add_product<kPitch, kNarrow>(k_sums, ones, rounded, queries);
      }
    }
  }

  if (kWithValues)
    store(v_sums, ones, first_row(dv, p.dv, at.batch, at.head, 0), p.dv.row, key, at.end, uint(p.value_size), place);
  if (kWithKeys)
    store(k_sums, factors, first_row(dk, p.dk, at.batch, at.head, 0), p.dk.row, key, at.end, uint(p.head_size), place);
}
