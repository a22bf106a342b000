// What the kernels that multiply matrices for few queries have in common: where a simdgroup's keys and values are,
// their way into threadgroup memory, and the rows of a threadgroup.
#pragma once

#include "attention/decode_rows.h"
#include "attention/fragments.h"
#include "common/earlier.h"

// Keys that a simdgroup has at a time: the terms of a tensor core's product.
constexpr constant uint kTileKeys = 16;
// Eight lanes load a row of keys or values, so a lane has every fourth row.
constexpr constant uint kRowLanes = 8;
constexpr constant uint kLaneKeys = kTileKeys * kRowLanes / 32;

// Elements from row to row of tiles for heads of up to D numbers. Eight rows lie in different banks.
template <uint D>
constexpr constant uint kTilePitch = D + 8;

// What a lane loads of a simdgroup's keys: vectors `part`, part + 8 … of the keys `key`, key + 4 … On NVIDIA GPUs,
// where programs with matrices have their lanes in another order, the eight lanes of a row stand beside each other.
struct LaneShare {
  uint part, key;
};
inline LaneShare share_of(uint lane) {
  return {(lane & 1) | (lane >> 2 & 2) | (lane & 4), (lane >> 1 & 1) | (lane >> 3 & 2)};
}

// The places of a lane's keys, and bit i of `found` for the simdgroup's key number i.
struct KeyPlaces {
  uint page[kLaneKeys], slot[kLaneKeys];
  uint found;
};
constexpr constant uint kAllFound = (1u << kTileKeys) - 1;

// Finds keys start to start + kTileKeys - 1, of which those before `end` exist. Others have the place of the last one.
// Each page is looked up by one lane for all.
template <bool kPaged>
inline void find(thread KeyPlaces& places, uint start, uint end, thread const KeyRows& keys,
                 device const int* kv_indices, constant AttentionDecodeParams& params, LaneShare share, uint lane) {
  if (kPaged) {
    const uint key = start + lane % kTileKeys;
    ulong page;
    uint slot;
    const bool exists = keys.find(min(key, end - 1), params, kv_indices, page, slot) && key < end;
    places.found = static_cast<uint>(static_cast<simd_vote::vote_t>(simd_ballot(exists))) & kAllFound;
#pragma unroll
    for (uint j = 0; j < kLaneKeys; ++j) {
      const ushort from = static_cast<ushort>(j * 4 + share.key);
      places.page[j] = simd_shuffle(static_cast<uint>(page), from);
      places.slot[j] = simd_shuffle(slot, from);
    }
    return;
  }
  places.found = start + kTileKeys <= end ? kAllFound : (1u << (max(start, end) - start)) - 1;
#pragma unroll
  for (uint j = 0; j < kLaneKeys; ++j) {
    places.page[j] = 0;
    places.slot[j] = min(start + j * 4 + share.key, end - 1);
  }
}

// A lane's N vectors of rows of `size` numbers. One that would lie behind a row's end is another one.
template <typename T, uint N>
struct LaneVectors {
  device const uchar* first;  // of the first row of the first page
  uint further[N];            // bytes to the vectors

  METAL_FUNC LaneVectors(device const T* rows, uint part, uint size) {
    const uint last = size / kPackElements<T> - 1, place = min(part, last);
    first = reinterpret_cast<device const uchar*>(rows) + place * sizeof(Pack<T>);
#pragma unroll
    for (uint n = 0; n < N; ++n) further[n] = (min(part + n * kRowLanes, last) - place) * sizeof(Pack<T>);
  }
  // Finds a lane's rows.
  METAL_FUNC void find(thread device const uchar* (&rows)[kLaneKeys], thread const KeyPlaces& places,
                       constant DecodeStrides& strides) const {
#pragma unroll
    for (uint j = 0; j < kLaneKeys; ++j)
      rows[j] = first + (static_cast<ulong>(places.page[j]) * strides.batch +
                         static_cast<ulong>(places.slot[j]) * static_cast<uint>(strides.token)) *
                            sizeof(T);
  }
  METAL_FUNC void load(thread Pack<T> (&to)[N], device const uchar* row) const {
#pragma unroll
    for (uint n = 0; n < N; ++n) to[n] = *reinterpret_cast<device const Pack<T>*>(row + further[n]);
  }
};

// A lane's share of kTileKeys keys or values, on their way from memory to the simdgroup's tile.
template <typename T, uint N>
struct TileAhead {
  Pack<T> packs[kLaneKeys][N];

  METAL_FUNC void load(thread const LaneVectors<T, N>& vectors, thread device const uchar* const (&rows)[kLaneKeys]) {
#pragma unroll
    for (uint j = 0; j < kLaneKeys; ++j) vectors.load(packs[j], rows[j]);
  }
  METAL_FUNC void load(thread const LaneVectors<T, N>& vectors, thread const KeyPlaces& places,
                       constant DecodeStrides& strides) {
    device const uchar* rows[kLaneKeys];
    vectors.find(rows, places, strides);
    load(vectors, rows);
  }
  // The memory of a page that does not exist is another one's, and may hold anything.
  METAL_FUNC void clear_others(uint found, LaneShare share) {
#pragma unroll
    for (uint j = 0; j < kLaneKeys; ++j)
#pragma unroll
      for (uint n = 0; n < N; ++n)
        packs[j][n].words = select(uint4(0u), packs[j][n].words, uint4(found >> (j * 4 + share.key) & 1) != 0u);
  }
  METAL_FUNC void store(threadgroup T* tile, uint pitch) const {
#pragma unroll
    for (uint j = 0; j < kLaneKeys; ++j)
#pragma unroll
      for (uint n = 0; n < N; ++n)
        *reinterpret_cast<threadgroup Pack<T>*>(tile + j * 4 * pitch + n * kRowLanes * kPackElements<T>) = packs[j][n];
  }
};

// Softmax of the lane's rows: their largest scores, and the sums of the lane's own weights.
template <uint kDown>
struct RowSoftmax {
  float largest[kDown], sum[kDown];
};

// Where a threadgroup's R rows are in the queries and in the results, and where their queries stand among the keys.
template <uint R>
struct MatrixRows {
  ulong queries[R], results[R];
  int positions[R];
};
template <uint R>
METAL_FUNC void find(threadgroup MatrixRows<R>& places, TileRows rows, uint keys, uint split,
                     constant AttentionDecodeParams& params, uint thread_index) {
  if (thread_index >= R) return;
  const uint row = rows.first + min(thread_index, rows.count - 1);
  const uint query = row / params.group;
  const uint head = head_of(rows, row, params);
  const ulong token = rows.first_query + query;
  places.positions[thread_index] = static_cast<int>(query) + offset_of(rows, keys, params);
  places.queries[thread_index] = rows.outer * params.q.batch + head * params.q.head + token * params.q.token;
  places.results[thread_index] =
      rows.outer * params.out.batch + head * params.out.head + token * params.out.token + split * params.out.part;
}

// Hides keys that do not exist, and those that rows do not see.
template <uint kDown, uint kAcross, uint R>
METAL_FUNC void hide(thread Fragments<float, kDown, kAcross>& scores, uint start, uint found, bool bounded,
                     threadgroup const MatrixRows<R>& rows, Place place, constant AttentionDecodeParams& params) {
#pragma unroll
  for (uint m = 0; m < kDown; ++m) {
    const int position = rows.positions[m * 8 + place.row];
    const int first = bounded ? position - params.left : 0, last = bounded ? position + params.right : INT_MAX;
#pragma unroll
    for (uint n = 0; n < kAcross; ++n) {
      const uint number = n * 8 + place.column;
      const int key = static_cast<int>(start + number);
      thread float2& two = elements(scores.at[m][n]);
      two.x = (found >> number & 1) != 0 && first <= key && key <= last ? two.x : -INFINITY;
      two.y = (found >> number & 2) != 0 && first <= key + 1 && key < last ? two.y : -INFINITY;
    }
  }
}

// Where a simdgroup's keys and values come from.
template <typename T, uint D>
struct MatrixWalk {
  static constexpr constant uint kVectors = D / (8 * kRowLanes);  // of a row that a lane loads

  LaneShare share;
  LaneVectors<T, kVectors> key_rows, value_rows;
  KeyPlaces places = {};  // until a simdgroup finds its first keys, if it has any

  METAL_FUNC MatrixWalk(thread const KeyRows& keys, device const T* k, device const T* v,
                        constant AttentionDecodeParams& params, uint lane)
      : share(share_of(lane)),
        key_rows(k + keys.key, share.part, params.head_size),
        value_rows(v + keys.value, share.part, params.value_size) {}
};

// Loads the first `count` of R rows of queries into a tile; others are zero. A threadgroup has up to kThreads threads.
// All loads of a thread are on their way at once.
template <uint D, uint R, uint kThreads, typename T>
METAL_FUNC void load_queries(threadgroup T* tile, device const T* q, threadgroup const MatrixRows<R>& rows, uint count,
                             constant AttentionDecodeParams& params, uint thread_index, uint threads) {
  constexpr uint kVectors = D / 8, kAll = R * kVectors, kEach = (kAll + kThreads - 1) / kThreads;
  const bool whole = kAll % kThreads == 0 && threads == kThreads;
  for (uint done = 0; done < kAll; done += kEach * threads) {
    const uint first = done + thread_index;
    Pack<T> numbers[kEach];
#pragma unroll
    for (uint j = 0; j < kEach; ++j) {
      const uint i = min(first + j * threads, kAll - 1);
      const uint element = min(i % kVectors * 8, params.head_size - 8);
      numbers[j] = *reinterpret_cast<device const Pack<T>*>(q + rows.queries[i / kVectors] + element);
    }
#pragma unroll
    for (uint j = 0; j < kEach; ++j) {
      const uint i = first + j * threads, row = i / kVectors, element = i % kVectors * 8;
      const bool exists = row < count && element < params.head_size;
      if (whole || i < kAll)
        *reinterpret_cast<threadgroup Pack<T>*>(tile + row * kTilePitch<D> + element) = {exists ? numbers[j].words
                                                                                                : uint4(0u)};
    }
  }
}

// Scores of the rows with the keys of a tile, which are keys `start` to start + kTileKeys - 1 of the request. A
// simdgroup loads kAtOnce operands of each side, and then multiplies them: it waits once for all of these loads.
template <uint D, uint R, uint kAtOnce, typename T>
METAL_FUNC void score(thread Fragments<float, R / 8, 2>& scores, threadgroup const T* queries,
                      threadgroup const T* tile, uint start, uint found, bool bounded,
                      threadgroup const MatrixRows<R>& rows, Place place, constant AttentionDecodeParams& params) {
  clear(scores);
#pragma unroll
  for (uint first = 0; first < D; first += 16 * kAtOnce) {
    Fragments<T, R / 8, 2> query[kAtOnce];
    RightFragments<T, 2, 2> key[kAtOnce];
#pragma unroll
    for (uint i = 0; i < kAtOnce; ++i) {
      load<kTilePitch<D>>(query[i], queries + first + i * 16);
      load_transposed<kTilePitch<D>>(key[i], tile + first + i * 16);
    }
#pragma unroll
    for (uint i = 0; i < kAtOnce; ++i) multiply(scores, query[i], 0, key[i]);
  }
#pragma unroll
  for (uint m = 0; m < R / 8; ++m) {
#pragma unroll
    for (uint n = 0; n < 2; ++n) elements(scores.at[m][n]) *= params.query_scale;
  }
  if (bounded || found != kAllFound) hide(scores, start, found, bounded, rows, place, params);
}
