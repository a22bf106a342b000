// Attention of few queries to many keys by products of matrices, for 16-bit numbers. More than 4 rows (queries times
// the heads of a group) share the keys: by plain multiplications arithmetic is the limit there, and not memory.
//
// A threadgroup has R rows and a part of the keys. Each step has 16 keys for each of its simdgroups, which computes
// their scores. Then all simdgroups have the weights of all keys in threadgroup memory, and each adds some columns of
// the values: it has few sums, and nothing is left to merge at the end. Where several threadgroups share the keys,
// merge.metal merges their results.
#pragma once

#include "attention/decode_together.h"
#include "attention/decode_walk_matrices.h"

// How a kernel for R rows of D numbers uses its registers and its threadgroup memory.
template <uint D, uint R>
struct MatrixShape {
  static constexpr constant bool kHeavy = D == 128 && R == 32;  // it fills both
  static constexpr constant uint kTilesAhead = kHeavy ? 2 : 1;  // of a simdgroup, on their way into registers
  static constexpr constant uint kAtOnce = D == 64 ? 2 : 4;     // operands of scores whose loads have one wait
  // Weights of few rows are two numbers of 16 bits, which have twice the bits of one: results are about as exact as
  // those of decode.metal. Tensor cores multiply 16 rows at least: the smaller numbers are the other 8. Weights of more
  // rows are rounded, as in forward.metal.
  static constexpr constant bool kSplit = R == 8;
  static constexpr constant uint kDown = kSplit ? 2 : R / 8;  // matrices of sums below each other
};

// Rounded numbers as floats. Compilers round two bfloats at once where nobody takes the pair apart.
inline float2 widened(half2 x) { return float2(x); }
inline float2 widened(bfloat2 x) {
  const uint word = as_type<uint>(x);
  return as_type<float2>(uint2(word << 16, word & 0xffff0000u));
}

// The weights of all keys of a step, as operands of a product of 16-bit matrices.
template <typename T, uint D, uint R, uint kSimdgroups>
struct WeightTile {
  using S = MatrixShape<D, R>;
  using Pair = Number<vec<T, 2>>;
  static constexpr constant uint kPitch = kSimdgroups * kTileKeys + 8;
  static constexpr constant uint kElements = (S::kSplit ? 2 : 1) * R * kPitch;

  threadgroup T* upper;  // the larger numbers; the smaller ones follow

  METAL_FUNC void store(float2 two, uint row, uint column) const {
    const vec<T, 2> rounded = vec<T, 2>(two);
    threadgroup T* const to = upper + row * kPitch + column;
    reinterpret_cast<threadgroup Pair*>(to)->value = rounded;
    if (S::kSplit) reinterpret_cast<threadgroup Pair*>(to + R * kPitch)->value = vec<T, 2>(two - widened(rounded));
  }
  // Adds all weights times the first columns of their values. All operands are on their way before the first product.
  template <uint kColumns>
  METAL_FUNC void multiply_values(thread Fragments<float, S::kDown, kColumns>& sums,
                                  threadgroup const T* values) const {
    Fragments<T, S::kDown, 2> weights[kSimdgroups];
    RightFragments<T, 2, kColumns> value[kSimdgroups];
#pragma unroll
    for (uint i = 0; i < kSimdgroups; ++i) {
      load<kPitch>(weights[i], upper + i * kTileKeys);
      load<kTilePitch<D>>(value[i], values + i * kTileKeys * kTilePitch<D>);
    }
#pragma unroll
    for (uint i = 0; i < kSimdgroups; ++i) multiply(sums, weights[i], 0, value[i]);
  }
};

// Adds keys seen.begin to seen.end - 1 to the sums of a simdgroup's columns. `start` is the simdgroup's first key,
// which is on its way. Keys and values come into the simdgroup's tile in turn: while it holds the one, the other is on
// its way into registers. Heavy kernels, of which few share a core, have the next two on their way.
//
// Tensor cores round sums towards zero, so each product takes up to 2^-23 from them. Numbers of 16 bits do not show it
// before a threadgroup has had some ten thousand keys, and the host gives it fewer.
template <bool kPaged, typename T, uint D, uint R, uint kSimdgroups, uint kColumns>
METAL_FUNC void run(thread MatrixWalk<T, D>& walk, thread TileAhead<T, D / 64> (&ahead)[MatrixShape<D, R>::kTilesAhead],
                    thread Fragments<float, MatrixShape<D, R>::kDown, kColumns>& sums,
                    thread RowSoftmax<R / 8>& softmax, Seen seen, uint start, thread const KeyRows& keys,
                    device const int* kv_indices, threadgroup const T* queries, threadgroup T* tiles,
                    WeightTile<T, D, R, kSimdgroups> weights, threadgroup float* maxima,
                    threadgroup const MatrixRows<R>& rows, constant AttentionDecodeParams& params, uint lane,
                    uint simdgroup) {
  using S = MatrixShape<D, R>;
  constexpr uint kDown = R / 8, kPitch = kTilePitch<D>, kTile = kTileKeys * kPitch, kStep = kSimdgroups * kTileKeys;
  thread TileAhead<T, D / 64>&keys_ahead = ahead[0], &values_ahead = ahead[S::kTilesAhead - 1];
  const Place place = place_of(lane);
  threadgroup T* const tile = tiles + simdgroup * kTile;
  threadgroup T* const own = tile + walk.share.key * kPitch + walk.share.part * kPackElements<T>;
#pragma unroll
  for (uint j = 0; j < kLaneKeys; ++j) walk.places.page[j] = kPaged ? walk.places.page[j] : 0;
  for (uint first = seen.begin; first < seen.end; first += kStep, start += kStep) {
    const bool last = first + kStep >= seen.end;
    threadgroup_barrier(mem_flags::mem_threadgroup);  // all are done with the values
    keys_ahead.store(own, kPitch);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    if (S::kTilesAhead == 1) values_ahead.load(walk.value_rows, walk.places, params.v);
    const uint found = walk.places.found;
    if (!last) find<kPaged>(walk.places, start + kStep, seen.end, keys, kv_indices, params, walk.share, lane);
    if (S::kTilesAhead > 1 && !last) keys_ahead.load(walk.key_rows, walk.places, params.k);

    Fragments<float, kDown, 2> scores;
    score<D, R, S::kAtOnce>(scores, queries, tile, start, found, seen.bounded, rows, place, params);
    float top = -INFINITY;  // of the row whose maximum the lane writes
#pragma unroll
    for (uint m = 0; m < kDown; ++m) {
      const float2 larger = max(elements(scores.at[m][0]), elements(scores.at[m][1]));
      float of_row = max(larger.x, larger.y);
      of_row = max(of_row, simd_shuffle_xor(of_row, 1));
      of_row = max(of_row, simd_shuffle_xor(of_row, 8));
      top = place.column == 2 * m ? of_row : top;
    }
    if (place.column < 2 * kDown) maxima[simdgroup * R + place.column * 4 + place.row] = top;
    threadgroup_barrier(mem_flags::mem_threadgroup);  // all have their maxima, and are done with their keys

    if (found != kAllFound) values_ahead.clear_others(found, walk.share);
    values_ahead.store(own, kPitch);
    if (S::kTilesAhead == 1 && !last) keys_ahead.load(walk.key_rows, walk.places, params.k);
    if (S::kTilesAhead > 1 && !last) values_ahead.load(walk.value_rows, walk.places, params.v);
    float shrink[kDown];
#pragma unroll
    for (uint m = 0; m < kDown; ++m) {
      float largest = softmax.largest[m];
#pragma unroll
      for (uint i = 0; i < kSimdgroups; ++i) largest = max(largest, maxima[i * R + m * 8 + place.row]);
      const float base = base_of(largest);
      shrink[m] = fast::exp2(softmax.largest[m] - base);
      softmax.largest[m] = largest;
      float sum = 0.0f;
#pragma unroll
      for (uint n = 0; n < 2; ++n) {
        const float2 two = fast::exp2(elements(scores.at[m][n]) - base);
        sum += two.x + two.y;
        weights.store(two, m * 8 + place.row, simdgroup * kTileKeys + n * 8 + place.column);
      }
      softmax.sum[m] = fma(softmax.sum[m], shrink[m], sum);
    }
#pragma unroll
    for (uint m = 0; m < S::kDown; ++m) {
#pragma unroll
      for (uint n = 0; n < kColumns; ++n) elements(sums.at[m][n]) *= shrink[m % kDown];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);  // all have their weights and values
    weights.multiply_values(sums, tiles + simdgroup * kColumns * 8);
  }
}

// It has 32 * kSimdgroups threads. A kernel for up to 512 has at most 128 registers a thread, so that four threadgroups
// of 128 threads share a core.
template <typename T, uint D, uint R, uint kSimdgroups>
[[kernel]][[max_total_threads_per_threadgroup(D * R > 2048 ? 32 * kSimdgroups : 512)]] void attention_decode_matrices(
    device const T* q [[buffer(0)]], device const T* k [[buffer(1)]], device const T* v [[buffer(2)]],
    device const uchar* sinks [[buffer(4)]], device const int* qo_indptr [[buffer(5)]],
    device const int* kv_indptr [[buffer(6)]], device const int* kv_indices [[buffer(7)]],
    device const int* kv_last_page_len [[buffer(8)]], device uchar* out [[buffer(10)]],
    device float* lse [[buffer(11)]], constant AttentionDecodeParams& params [[buffer(12)]],
    uint3 group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  constexpr uint kThreads = 32 * kSimdgroups, kColumns = D / 8 / kSimdgroups;
  using S = MatrixShape<D, R>;
  using Weights = WeightTile<T, D, R, kSimdgroups>;
  alignas(16) threadgroup T queries[R * kTilePitch<D>];
  alignas(16) threadgroup T tiles[kSimdgroups * kTileKeys * kTilePitch<D>];
  alignas(16) threadgroup T weights[Weights::kElements];
  threadgroup float maxima[kSimdgroups * R];
  threadgroup float totals[kSimdgroups * R];
  threadgroup MatrixRows<R> places;

  // All before the second call is what the first keys need: it costs no time where this kernel begins early.
  if (params.ragged || params.key_layout != KEYS_EACH) metalcore_await_earlier_kernels(0);
  const bool together = params.together != 0;
  const uint split = together ? group.y % params.splits : group.y / params.kv_heads;
  const uint kv_head = together ? group.y / params.splits : group.y % params.kv_heads;
  const TileRows rows = find_rows<R>(params.first_tile + group.x, group.z, kv_head, params, qo_indptr, lane);
  if (rows.request == params.batch) return;
  const KeyRows keys(rows.request, rows.kv_head, params, kv_indptr, kv_last_page_len);
  const Seen seen = find_keys(rows, keys.length, split, kSimdgroups * kTileKeys, params);
  const uint start = seen.begin + simdgroup * kTileKeys;
  MatrixWalk<T, D> walk(keys, k, v, params, lane);
  const bool paged = params.key_layout == KEYS_PAGED, begins = seen.begin < seen.end;
  if (begins && paged) find<true>(walk.places, start, seen.end, keys, kv_indices, params, walk.share, lane);
  if (begins && !paged) find<false>(walk.places, start, seen.end, keys, kv_indices, params, walk.share, lane);
  find(places, rows, keys.length, together ? 0 : split, params, thread_index);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  device const uchar* first_keys[kLaneKeys];
  walk.key_rows.find(first_keys, walk.places, params.k);
  metalcore_await_earlier_kernels(first_keys, 0);
  TileAhead<T, D / 64> ahead[S::kTilesAhead];
  if (begins) {
    ahead[0].load(walk.key_rows, first_keys);
    if (S::kTilesAhead > 1) ahead[S::kTilesAhead - 1].load(walk.value_rows, walk.places, params.v);
  }
  load_queries<D, R, kThreads>(queries, q, places, rows.count, params, thread_index, kThreads);

  Fragments<float, S::kDown, kColumns> result;
  clear(result);
  RowSoftmax<R / 8> softmax;
#pragma unroll
  for (uint m = 0; m < R / 8; ++m) softmax.largest[m] = -INFINITY, softmax.sum[m] = 0.0f;
  if (paged)
    run<true>(walk, ahead, result, softmax, seen, start, keys, kv_indices, queries, tiles, Weights{weights}, maxima,
              places, params, lane, simdgroup);
  else
    run<false>(walk, ahead, result, softmax, seen, start, keys, kv_indices, queries, tiles, Weights{weights}, maxima,
               places, params, lane, simdgroup);

  metalcore_begin_later_kernels(0);
  const Place place = place_of(lane);
  float largest = -INFINITY, total = 0.0f;  // of one row that the lane writes
#pragma unroll
  for (uint m = 0; m < R / 8; ++m) {
    float sum = softmax.sum[m];
    sum += simd_shuffle_xor(sum, 1);
    sum += simd_shuffle_xor(sum, 8);
    if (place.column == 2 * m) largest = softmax.largest[m], total = sum;
  }
  if (place.column < R / 4) {
    maxima[simdgroup * R + place.column * 4 + place.row] = largest;
    totals[simdgroup * R + place.column * 4 + place.row] = total;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);  // all are done with queries and tiles
  if (together) {
    const SharedResults<D> shared = {reinterpret_cast<threadgroup float*>(tiles),
                                     reinterpret_cast<threadgroup float2*>(queries)};
    if (thread_index < R) {  // all simdgroups have the same largest score
      total = 0.0f;
#pragma unroll
      for (uint i = 0; i < kSimdgroups; ++i) total += totals[i * R + thread_index];
      shared.softmax[thread_index] = float2(maxima[thread_index], total);
    }
#pragma unroll
    for (uint m = 0; m < R / 8; ++m) {
      threadgroup float* const sums =
          shared.sums + (m * 8 + place.row) * shared.kPitch + simdgroup * kColumns * 8 + place.column;
#pragma unroll
      for (uint n = 0; n < kColumns; ++n) {
        float2 two = elements(result.at[m][n]);
        if (S::kSplit) two += elements(result.at[1][n]);
        *reinterpret_cast<threadgroup float2*>(sums + n * 8) = two;
      }
    }
    write_merged<D, R>(shared, rows, places, sinks, out, lse, split, params, thread_index, kThreads);
    return;
  }
  if (thread_index < rows.count) {
    const uint row = rows.first + thread_index;
    maxima[thread_index] = merge_softmax<R, kSimdgroups>(
        maxima, totals, kSimdgroups, 0, thread_index, head_of(rows, row, params), sinks,
        reinterpret_cast<device Number<float>*>(lse) + logarithm_of(rows, row, split, params), params);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
  for (uint m = 0; m < R / 8; ++m) {
    const uint number = m * 8 + place.row;
    if (number >= rows.count) continue;
    const float weight = maxima[number];
    const uint first = simdgroup * kColumns * 8 + place.column;
#pragma unroll
    for (uint n = 0; n < kColumns; ++n) {
      if (first + n * 8 >= params.value_size) continue;
      float2 two = elements(result.at[m][n]);
      if (S::kSplit) two += elements(result.at[1][n]);
      two *= weight;
      const ulong to = places.results[number] + first + n * 8;
      if (params.splits > 1) {
        reinterpret_cast<device Number<float2>*>(reinterpret_cast<device float*>(out) + to)->value = two;
        continue;
      }
      store_number(out, to, params.out_type, two.x);
      store_number(out, to + 1, params.out_type, two.y);
    }
  }
}

// Names have the largest head size that a kernel takes, and its rows.
#define INSTANTIATE(T, D, R, SIMDGROUPS)                                \
  template [[host_name("attention_decode_matrices_" #D "x" #R "_" #T)]] \
  [[kernel]] decltype(attention_decode_matrices<T, D, R, SIMDGROUPS>) attention_decode_matrices<T, D, R, SIMDGROUPS>;
