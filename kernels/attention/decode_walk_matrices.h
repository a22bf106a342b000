// A simdgroup's walk over the keys of a threadgroup of decode_matrices.metal.
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

// Rounded numbers as floats. Compilers round two bfloats at once where nobody takes the pair apart.
inline float2 widened(half2 x) { return float2(x); }
inline float2 widened(bfloat2 x) {
  const uint word = as_type<uint>(x);
  return as_type<float2>(uint2(word << 16, word & 0xffff0000u));
}

// Weights as operands of a product of 16-bit matrices: each is two numbers, which have twice the bits of one. Results
// are about as exact as those of decode.metal, and memory remains the limit. Narrow kernels multiply floats.
template <typename T, uint kDown>
struct SplitWeights {
  Fragments<T, kDown, 2> upper, lower;
};
template <typename T, uint kDown>
METAL_FUNC void to_operands(thread SplitWeights<T, kDown>& split, thread Fragments<float, kDown, 2>& weights) {
#pragma unroll
  for (uint m = 0; m < kDown; ++m) {
#pragma unroll
    for (uint n = 0; n < 2; ++n) {
      const float2 two = elements(weights.at[m][n]);
      elements(split.upper.at[m][n]) = vec<T, 2>(two);
      elements(split.lower.at[m][n]) = vec<T, 2>(two - widened(elements(split.upper.at[m][n])));
    }
  }
}
template <uint kDown>
METAL_FUNC void to_operands(thread Fragments<float, kDown, 2>& operands, thread Fragments<float, kDown, 2>& weights) {
  operands = weights;
}

// Adds weights times the values in the first 8 * kColumns columns of a tile.
template <uint kPitch, typename T, uint kDown, uint kColumns>
METAL_FUNC void add_values(thread Fragments<float, kDown, kColumns>& product,
                           thread const SplitWeights<T, kDown>& split, threadgroup const T* tile) {
  RightFragments<T, 2, kColumns> value;
  load<kPitch>(value, tile);
  multiply(product, split.lower, 0, value);
  multiply(product, split.upper, 0, value);
}
template <uint kPitch, typename M, typename T, uint kDown, uint kColumns>
METAL_FUNC void add_values(thread Fragments<float, kDown, kColumns>& product,
                           thread const Fragments<M, kDown, 2>& weights, threadgroup const T* tile) {
#pragma unroll
  for (uint k = 0; k < 2; ++k) {
    Floats<1, kColumns> value;
    load<kPitch>(value, tile + k * 8 * kPitch);
    multiply(product, weights, k, value);
  }
}

// Hides keys that do not exist, and those that rows do not see.
template <uint kDown>
METAL_FUNC void hide(thread Fragments<float, kDown, 2>& scores, uint start, uint found, bool bounded,
                     threadgroup const int* positions, Place place, constant AttentionDecodeParams& params) {
#pragma unroll
  for (uint m = 0; m < kDown; ++m) {
    const int position = positions[m * 8 + place.row];
    const int first = bounded ? position - params.left : 0, last = bounded ? position + params.right : INT_MAX;
#pragma unroll
    for (uint n = 0; n < 2; ++n) {
      const uint number = n * 8 + place.column;
      const int key = static_cast<int>(start + number);
      thread float2& two = elements(scores.at[m][n]);
      two.x = (found >> number & 1) != 0 && first <= key && key <= last ? two.x : -INFINITY;
      two.y = (found >> number & 2) != 0 && first <= key + 1 && key < last ? two.y : -INFINITY;
    }
  }
}

// Turns scores into weights of softmax, and gives what to multiply the rows' older sums by.
template <uint kDown>
METAL_FUNC void weigh(thread Fragments<float, kDown, 2>& scores, thread RowSoftmax<kDown>& softmax,
                      thread float (&shrink)[kDown]) {
#pragma unroll
  for (uint m = 0; m < kDown; ++m) {
    float top = softmax.largest[m];
#pragma unroll
    for (uint n = 0; n < 2; ++n) top = max(top, max(elements(scores.at[m][n]).x, elements(scores.at[m][n]).y));
    top = max(top, simd_shuffle_xor(top, 1));
    top = max(top, simd_shuffle_xor(top, 8));
    const float base = base_of(top);
    shrink[m] = fast::exp2(softmax.largest[m] - base);
    softmax.largest[m] = top;
    float sum = 0.0f;
#pragma unroll
    for (uint n = 0; n < 2; ++n) {
      thread float2& two = elements(scores.at[m][n]);
      two = fast::exp2(two - base);
      sum += two.x + two.y;
    }
    softmax.sum[m] = fma(softmax.sum[m], shrink[m], sum);
  }
}

// A simdgroup's next keys or values on their way to its tile, and where they come from.
template <typename T, uint D>
struct MatrixWalk {
  static constexpr constant uint kVectors = D / (8 * kRowLanes);  // of a row that a lane loads

  LaneShare share;
  LaneVectors<T, kVectors> key_rows, value_rows;
  KeyPlaces places = {};  // until a simdgroup finds its first keys, if it has any
  TileAhead<T, kVectors> ahead;

  METAL_FUNC MatrixWalk(thread const KeyRows& keys, device const T* k, device const T* v,
                        constant AttentionDecodeParams& params, uint lane)
      : share(share_of(lane)),
        key_rows(k + keys.key, share.part, params.head_size),
        value_rows(v + keys.value, share.part, params.value_size) {}
};

// Adds keys start, start + step …, and the fifteen behind each, to the rows' sums. `tile` is the simdgroup's own. Keys
// and values come into it in turn: while it holds the one, the other is on its way into registers. Narrow kernels have
// no registers for that: they load each when the tile is free.
//
// Tensor cores round sums towards zero, so each product takes up to 2^-23 from them. Numbers of 16 bits do not show it
// before a simdgroup has had some ten thousand keys, which several threadgroups share in nearly all calls.
template <bool kNarrow, bool kPaged, typename T, uint D, uint R>
METAL_FUNC void run(thread MatrixWalk<T, D>& walk, thread Fragments<float, R / 8, D / 8>& sums,
                    thread RowSoftmax<R / 8>& softmax, Seen seen, uint start, uint step, thread const KeyRows& keys,
                    device const int* kv_indices, threadgroup const T* queries, threadgroup T* tile,
                    threadgroup const int* positions, constant AttentionDecodeParams& params, uint lane) {
  constexpr uint kDown = R / 8, kPitch = kTilePitch<D>, kColumns = 4;
  const Place place = place_of(lane);
  threadgroup T* const own = tile + walk.share.key * kPitch + walk.share.part * kPackElements<T>;
#pragma unroll
  for (uint j = 0; j < kLaneKeys; ++j) walk.places.page[j] = kPaged ? walk.places.page[j] : 0;
  for (; start < seen.end; start += step) {
    if (kNarrow) {
      find<kPaged>(walk.places, start, seen.end, keys, kv_indices, params, walk.share, lane);
      walk.ahead.load(walk.key_rows, walk.places, params.k);
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    walk.ahead.store(own, kPitch);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    if (!kNarrow) walk.ahead.load(walk.value_rows, walk.places, params.v);
    const uint found = walk.places.found;
    if (!kNarrow) find<kPaged>(walk.places, start + step, seen.end, keys, kv_indices, params, walk.share, lane);

    Fragments<float, kDown, 2> scores;
    clear(scores);
#pragma unroll
    for (uint depth = 0; depth < D / 8; depth += 2) {
      Fragments<T, kDown, 2> query;
      RightFragments<T, 2, 2> key;
      load<kPitch>(query, queries + depth * 8);
      load_transposed<kPitch>(key, tile + depth * 8);
      multiply(scores, query, 0, key);
    }
#pragma unroll
    for (uint m = 0; m < kDown; ++m) {
#pragma unroll
      for (uint n = 0; n < 2; ++n) elements(scores.at[m][n]) *= params.query_scale;
    }
    if (seen.bounded || found != kAllFound) hide(scores, start, found, seen.bounded, positions, place, params);
    float shrink[kDown];
    weigh(scores, softmax, shrink);
    conditional_t<kNarrow, Fragments<float, kDown, 2>, SplitWeights<T, kDown>> weights;
    to_operands(weights, scores);

    if (kNarrow) walk.ahead.load(walk.value_rows, walk.places, params.v);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    if (found != kAllFound) walk.ahead.clear_others(found, walk.share);
    walk.ahead.store(own, kPitch);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    if (!kNarrow) walk.ahead.load(walk.key_rows, walk.places, params.k);
#pragma unroll
    for (uint n = 0; n < D / 8; n += kColumns) {
      Fragments<float, kDown, kColumns> product;
#pragma unroll
      for (uint m = 0; m < kDown; ++m) {
#pragma unroll
        for (uint i = 0; i < kColumns; ++i) elements(product.at[m][i]) = elements(sums.at[m][n + i]) * shrink[m];
      }
      add_values<kPitch>(product, weights, tile + n * 8);
#pragma unroll
      for (uint m = 0; m < kDown; ++m) {
#pragma unroll
        for (uint i = 0; i < kColumns; ++i) elements(sums.at[m][n + i]) = elements(product.at[m][i]);
      }
    }
  }
}
