// Results, the logarithms of softmax's sums and the largest scores, both to base 2. See forward.metal for the walk.
#pragma once

#include "flex.h"

// The rows of a tile that hold what the mask finds for its keys, of which each takes 16 bytes at most.
constexpr uint flex_column_rows(uint keys, bool is_whole) { return is_whole ? (keys + 7) / 8 : 0; }

// What a threadgroup's tile has, in elements.
template <typename T, uint kSize, uint kDown, uint kSimds, uint kKeys, bool kNarrow, bool kWhole>
constexpr uint flex_forward_tile() {
  return ((kNarrow ? kKeys : 2 * kKeys) + (kNarrow ? 8 * kDown * kSimds : 0) + flex_column_rows(kKeys, kWhole)) *
         (kSize + 16 / sizeof(T));
}

// The logarithms to base 2 of products' exponentials.
template <typename Mods, uint kDown, uint kAcross>
METAL_FUNC void scale_scores(thread Fragments<float, kDown, kAcross>& scores, thread const Mods& mods, float scale,
                             FlexPlace at, uint query, uint key, Place place) {
#pragma unroll
  for (uint m = 0; m < kDown; ++m) {
    const uint row = query + m * 8 + place.row;
#pragma unroll
    for (uint n = 0; n < kAcross; ++n) {
      thread metal::float2& two = elements(scores.at[m][n]);
      if (Mods::kPlain) {
        two *= scale * kLog2E;
        continue;
      }
#pragma unroll
      for (uint i = 0; i < 2; ++i) {
        const uint column = key + n * 8 + place.column + i;
        two[i] = mods.score(two[i] * scale, int(at.batch), int(at.head), int(row), int(column)) * kLog2E;
      }
    }
  }
}

// Hides the scores whose bits are 0.
template <uint kDown, uint kAcross>
METAL_FUNC void hide_scores(thread Fragments<float, kDown, kAcross>& scores, uint seen) {
#pragma unroll
  for (uint m = 0; m < kDown; ++m) {
#pragma unroll
    for (uint n = 0; n < kAcross; ++n) {
#pragma unroll
      for (uint i = 0; i < 2; ++i)
        if ((seen >> flex_bit(kAcross, m, n, i) & 1) == 0) elements(scores.at[m][n])[i] = -INFINITY;
    }
  }
}

// Makes weights of softmax of `unit` times the scores, where `unit` is above 0, and takes them into account in the
// largest scores and in the sums, which shrink by a factor.
template <uint kDown, uint kAcross>
METAL_FUNC void weigh(thread Fragments<float, kDown, kAcross>& scores, float unit, thread float* largest,
                      thread float* total, thread float* shrink) {
#pragma unroll
  for (uint m = 0; m < kDown; ++m) {
    float most = -INFINITY;
#pragma unroll
    for (uint n = 0; n < kAcross; ++n) {
      const metal::float2 two = elements(scores.at[m][n]);
      most = metal::max(most, metal::max(two.x, two.y));
    }
    most = metal::max(most, metal::simd_shuffle_xor(most, 1));
    most = metal::max(most, metal::simd_shuffle_xor(most, 8));
    most = metal::max(largest[m], most * unit);
    const float base = base_of(most);
    shrink[m] = metal::fast::exp2(largest[m] - base);
    largest[m] = most;
    float sum = 0.0f;
#pragma unroll
    for (uint n = 0; n < kAcross; ++n) {
      thread metal::float2& two = elements(scores.at[m][n]);
      two = metal::fast::exp2(metal::fma(two, metal::float2(unit), metal::float2(-base)));
      sum += two.x + two.y;
    }
    total[m] = metal::fma(total[m], shrink[m], sum);
  }
}

// Makes weights of a tile's products. `edge` says that the mask may hide some of them.
template <typename M, typename Mods, uint kDown, uint kAcross>
METAL_FUNC void weights_of(thread Fragments<M, kDown, kAcross>& weights,
                           thread Fragments<float, kDown, kAcross>& scores, thread float* largest, thread float* total,
                           thread float* shrink, thread const Mods& mods, float scale, FlexPlace at, uint query,
                           uint key, bool edge, uint seen, Place place) {
  const float unit = scale * kLog2E;
  const bool is_plain = Mods::kPlain && unit > 0.0f;
  if (!is_plain) scale_scores(scores, mods, scale, at, query, key, place);
  if (edge && metal::simd_any(seen != all_bits<kDown, kAcross>())) hide_scores(scores, seen);
  weigh(scores, is_plain ? unit : 1.0f, largest, total, shrink);
  round_to(weights, scores);
}

// Adds up the sums of softmax of four lanes, stores their logarithms and the largest scores, and makes factors of the
// sums of results. The numbers of the lane's rows begin at `first`, and `step` lies between those of neighbours.
// `kExact` says that results have the bits which fast functions lose.
template <bool kWhole, bool kExact, uint kDown>
METAL_FUNC void finish_rows(thread float* factors, thread float* total, thread const float* largest, device float* lse,
                            device float* largest_scores, int64_t first, int64_t step, uint row, uint end,
                            Place place) {
#pragma unroll
  for (uint m = 0; m < kDown; ++m) {
    total[m] += metal::simd_shuffle_xor(total[m], 1);
    total[m] += metal::simd_shuffle_xor(total[m], 8);
    if (place.column == 0 && (kWhole || row + m * 8 < end)) {
      const int64_t number = first + m * 8 * step;
      const float logarithm = kExact ? metal::precise::log2(total[m]) : metal::fast::log2(total[m]);
      lse[number] = total[m] == 0.0f ? -INFINITY : largest[m] + logarithm;
      largest_scores[number] = largest[m];
    }
    factors[m] = total[m] == 0.0f ? 0.0f : kExact ? 1.0f / total[m] : metal::fast::divide(1.0f, total[m]);
  }
}

// `Out` is the type of results of all keys, or float for those of a part of them. `kWhole` says that no row or element
// of a tile is missing, that rows can be loaded 16 bytes at a time, and that a threadgroup visits whole blocks.
template <typename T, uint kSize, uint kDown, uint kSimds, uint kKeys, bool kNarrow, bool kWhole, typename Out,
          typename Mods>
METAL_FUNC void flex_forward(device Out* out, device float* lse, device float* largest_scores, device const T* q,
                             device const T* k, device const T* v, device const int* counts, device const int* indices,
                             device const int* full_counts, device const int* full_indices, device const int* order,
                             threadgroup T* tile, constant FlexParams& p, thread const Mods& mods, uint group,
                             uint thread_index, uint simd, uint lane) {
  constexpr uint kPitch = kSize + 16 / sizeof(T), kAcross = kKeys / 8, kQueries = 8 * kDown * kSimds;
  // There are registers to load the next tiles into meanwhile, or the next keys and then the values: a thread has four
  // packs of each of them or more.
  constexpr bool kHasRegisters = !kNarrow && sizeof(T) == 2 && kDown <= 2;
  constexpr bool kInTurn = kHasRegisters && kKeys * kSize / 8 >= 4 * 32 * kSimds, kEarly = kHasRegisters && !kInTurn;
  constexpr uint kTileRows = kNarrow ? kKeys : 2 * kKeys;
  constexpr bool kAhead = !kNarrow && sizeof(T) == 2;  // the threadgroup asks for its queries before it needs them
  // Results move through the tile, so that neighbouring lanes have 16 bytes each.
  constexpr bool kByTile = kAhead && kQueries <= kTileRows;
  threadgroup T* const keys = tile;
  threadgroup T* const values = kNarrow ? tile : tile + kKeys * kPitch;
  constexpr bool kHeld = kWhole && Mods::kColumns;
  threadgroup typename Mods::Column* const held =
      reinterpret_cast<threadgroup typename Mods::Column*>(tile + kTileRows * kPitch);
  threadgroup T* const own = kNarrow ? tile + kTileRows * kPitch : tile;

  const uint splits = kWhole ? 1 : uint(p.splits), index = uint(p.first) + group, split = index % splits;
  const FlexPlace at =
      flex_place(p, order, index / splits, uint(p.heads), uint(p.tables.q_block), uint(p.q_length), kQueries, true);
  if (at.begin >= at.end) return;
  const bool vectors = kWhole || p.vectors != 0;
  const uint head_size = kWhole ? kSize : uint(p.head_size), value_size = kWhole ? kSize : uint(p.value_size);
  const uint k_length = uint(p.k_length), k_head = at.head / uint(p.group);
  const Place place = place_of(lane);
  const uint query = at.begin + simd * 8 * kDown;
  const float scale = p.scale_number();

  Fragments<float, kDown, kSize / 8> sums;
  clear(sums);
  float largest[kDown], total[kDown];
#pragma unroll
  for (uint m = 0; m < kDown; ++m) largest[m] = -INFINITY, total[m] = 0.0f;

  // Loads of the tables come first, and nothing waits for queries before the first keys are on their way.
  const FlexRow row = flex_row(p, counts, indices, full_counts, full_indices, at.batch, at.head, at.block);
  metal::simdgroup_barrier(metal::mem_flags::mem_threadgroup);  // keeps compilers from mixing them
  const StridedRows<T> q_rows = rows_of(q, p.q, at.batch, at.head, 0);
  OwnAhead<kWhole, T, kSize, kPitch, kDown, kSimds> queries_ahead(q_rows, at.end, head_size, vectors, thread_index);
  if (kAhead) queries_ahead.load(at.begin);
  const StridedRows<T> k_rows = rows_of(k, p.k, at.batch, k_head, 0), v_rows = rows_of(v, p.v, at.batch, k_head, 0);
  using Ahead = FlexRowsAhead<kWhole, T, kKeys, kSize, kPitch, 32 * kSimds>;
  Ahead keys_ahead(k_rows, k_length, head_size, vectors, thread_index);
  Ahead values_ahead(v_rows, k_length, value_size, vectors, thread_index);
  FlexWalk walk =
      flex_walk(p, row, indices, full_indices, uint(p.tables.k_block), k_length, kKeys, kWhole ? 1 : uint(p.cuts));
  if (splits > 1) walk.take(split, splits);
  if (kHasRegisters && walk.more()) {
    keys_ahead.load(walk.at);
    if (kEarly) values_ahead.load(walk.at);
  }
  FlexColumns<kKeys, Mods> columns = {held, thread_index, {}};
  if (kHeld) columns.load(mods, at, walk);
  OwnRows<kNarrow, T, kDown, kSize / 8> queries;
  if constexpr (kAhead)
    flex_take<kTileRows, kPitch, kSimds>(queries, tile, queries_ahead, at.begin, simd);
  else
    load_by_tile<kTileRows, kPitch, kSimds>(queries, own, q_rows, at.begin, at.end, head_size, vectors, thread_index,
                                            simd);
  while (walk.more()) {
    const uint key = walk.at, end = walk.end;
    const bool is_masked = walk.masked(), edge = is_masked || (!kWhole && key + kKeys > end);
    walk.next();
    uint seen = 0xffffffff;
    if (edge && !kHeld)
      seen = seen_scores<false, kWhole, kDown, kAcross>(mods, is_masked, at.batch, at.head, query, key, end, place);
    if (kNarrow) {
      exchange_rows<T, kKeys, kSize, kPitch, 32 * kSimds>(keys, k_rows, key, k_length, head_size, vectors,
                                                          thread_index);
    } else if (kInTurn) {  // no simdgroup reads keys since the last barrier
      keys_ahead.store(keys, key);
      if (kHeld) columns.store(is_masked);
      metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
      values_ahead.load(key);
    } else {
      if (!kEarly) {
        keys_ahead.load(key);
        values_ahead.load(key);
      }
      metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
      keys_ahead.store(keys, key);
      values_ahead.store(values, key);
      if (kHeld) columns.store(is_masked);
      metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    }
    if (kEarly && walk.more()) {
      keys_ahead.load(walk.at);
      values_ahead.load(walk.at);
    }
    if (kHeld && is_masked)
      seen = seen_scores<false, kWhole, kDown, kAcross, kHeld>(mods, true, at.batch, at.head, query, key, end, place,
                                                               lane, held);
    const bool counts = metal::simd_any(seen != 0);  // of a simdgroup's scores, any

    Fragments<float, kDown, kAcross> scores;
    if (counts) product_transposed<kPitch>(scores, queries, keys);
    if (kInTurn) {
      values_ahead.store(values, key);
      metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
      if (walk.more()) keys_ahead.load(walk.at);
    }
    if (kHeld) columns.load(mods, at, walk);
    if (kNarrow) {  // values come while softmax is computed
      metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
      load_rows<T, kKeys, kSize, kPitch, 32 * kSimds>(values, v_rows, key, k_length, value_size, vectors, thread_index);
    }
    Fragments<metal::conditional_t<kNarrow, float, T>, kDown, kAcross> weights;
    float shrink[kDown];
    if (counts) weights_of(weights, scores, largest, total, shrink, mods, scale, at, query, key, edge, seen, place);
    if (kNarrow) metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    if (counts) FlexSums<(!kNarrow && sizeof(T) == 2)>::template add<kPitch, kNarrow>(sums, shrink, weights, values);
  }

  float factors[kDown];
  const uint own_row = query + place.row;
  const int64_t token = (int64_t(at.batch) * p.q_length + own_row) * splits + split;
  const int64_t number = splits == 1 ? flex_number(p, at.batch, at.head, own_row) : token * p.heads + at.head;
  finish_rows<kWhole, sizeof(T) == 4, kDown>(factors, total, largest, lse, largest_scores, number,
                                             splits == 1 ? 1 : splits * p.heads, own_row, at.end, place);
  device Out* const rows = first_row(out + split * p.out_part, p.out, at.batch, at.head, 0);
  if constexpr (kByTile && sizeof(Out) == sizeof(T)) {
    if (kWhole || vectors) {
      metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
      flex_store_by_tile<kWhole, kPitch>(sums, factors, tile + simd * 8 * kDown * kPitch, rows, p.out.row, query,
                                         at.end, value_size, lane, place);
      return;
    }
  }
  flex_store(sums, factors, rows, p.out.row, query, at.end, value_size, place);
}
