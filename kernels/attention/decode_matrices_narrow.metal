// The kernels that multiply matrices for few queries, for GPUs whose threads have at most 128 registers, as Apple's
// have them. They multiply weights as floats.
//
// A threadgroup has R rows and a part of the keys, of which each simdgroup takes 16 every few. A simdgroup has a tile
// of threadgroup memory of its own, so that simdgroups wait for each other only at the end, when their maxima, sums and
// results become one. Where several threadgroups share the keys, merge.metal merges their results.
#include "attention/decode_walk_matrices.h"

constexpr constant uint kMaxSimdgroups = 4;

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

// Adds keys start, start + step …, and the fifteen behind each, to the rows' sums. `tile` is the simdgroup's own. Keys
// and values come into it in turn. There are no registers to load the next ones before the tile is free.
template <bool kPaged, typename T, uint D, uint R>
METAL_FUNC void run(thread MatrixWalk<T, D>& walk, thread Fragments<float, R / 8, D / 8>& sums,
                    thread RowSoftmax<R / 8>& softmax, Seen seen, uint start, uint step, thread const KeyRows& keys,
                    device const int* kv_indices, threadgroup const T* queries, threadgroup T* tile,
                    threadgroup const MatrixRows<R>& rows, constant AttentionDecodeParams& params, uint lane) {
  constexpr uint kDown = R / 8, kPitch = kTilePitch<D>, kColumns = 4;
  const Place place = place_of(lane);
  TileAhead<T, D / 64> ahead;
  threadgroup T* const own = tile + walk.share.key * kPitch + walk.share.part * kPackElements<T>;
#pragma unroll
  for (uint j = 0; j < kLaneKeys; ++j) walk.places.page[j] = kPaged ? walk.places.page[j] : 0;
  for (; start < seen.end; start += step) {
    find<kPaged>(walk.places, start, seen.end, keys, kv_indices, params, walk.share, lane);
    ahead.load(walk.key_rows, walk.places, params.k);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    ahead.store(own, kPitch);
    simdgroup_barrier(mem_flags::mem_threadgroup);

    Fragments<float, kDown, 2> scores;
    const uint found = walk.places.found;
    score<D, R, 1>(scores, queries, tile, start, found, seen.bounded, rows, place, params);
    float shrink[kDown];
    weigh(scores, softmax, shrink);

    ahead.load(walk.value_rows, walk.places, params.v);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    if (found != kAllFound) ahead.clear_others(found, walk.share);
    ahead.store(own, kPitch);
    simdgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
    for (uint n = 0; n < D / 8; n += kColumns) {
      Fragments<float, kDown, kColumns> product;
#pragma unroll
      for (uint m = 0; m < kDown; ++m) {
#pragma unroll
        for (uint i = 0; i < kColumns; ++i) elements(product.at[m][i]) = elements(sums.at[m][n + i]) * shrink[m];
      }
#pragma unroll
      for (uint k = 0; k < 2; ++k) {
        Floats<1, kColumns> value;
        load<kPitch>(value, tile + k * 8 * kPitch + n * 8);
        multiply(product, scores, k, value);
      }
#pragma unroll
      for (uint m = 0; m < kDown; ++m) {
#pragma unroll
        for (uint i = 0; i < kColumns; ++i) elements(sums.at[m][n + i]) = elements(product.at[m][i]);
      }
    }
  }
}

template <typename T, uint D, uint R>
[[kernel]] [[max_total_threads_per_threadgroup(32 * kMaxSimdgroups)]] void attention_decode_matrices_narrow(
    device const T* q [[buffer(0)]], device const T* k [[buffer(1)]], device const T* v [[buffer(2)]],
    device const uchar* sinks [[buffer(4)]], device const int* qo_indptr [[buffer(5)]],
    device const int* kv_indptr [[buffer(6)]], device const int* kv_indices [[buffer(7)]],
    device const int* kv_last_page_len [[buffer(8)]], device uchar* out [[buffer(10)]],
    device float* lse [[buffer(11)]], constant AttentionDecodeParams& params [[buffer(12)]],
    uint3 group [[threadgroup_position_in_grid]], uint3 threads [[threads_per_threadgroup]],
    uint thread_index [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  constexpr uint kDown = R / 8, kPitch = kTilePitch<D>, kTile = kTileKeys * kPitch;
  alignas(16) threadgroup T queries[R * kPitch];
  alignas(16) threadgroup T tiles[kMaxSimdgroups * kTile];
  threadgroup float maxima[kMaxSimdgroups * R];
  threadgroup float sums[kMaxSimdgroups * R];
  threadgroup MatrixRows<R> places;

  // All before the second call is what the first keys need: it costs no time where this kernel begins early.
  if (params.ragged || params.key_layout != KEYS_EACH) metalcore_await_earlier_kernels(0);
  const uint split = group.y / params.kv_heads;
  const TileRows rows =
      find_rows<R>(params.first_tile + group.x, group.z, group.y % params.kv_heads, params, qo_indptr, lane);
  if (rows.request == params.batch) return;
  const KeyRows keys(rows.request, rows.kv_head, params, kv_indptr, kv_last_page_len);
  const uint simdgroups = threads.x / 32;
  const uint step = simdgroups * kTileKeys;
  const Seen seen = find_keys(rows, keys.length, split, kTileKeys, params);
  const uint start = seen.begin + simdgroup * kTileKeys;
  MatrixWalk<T, D> walk(keys, k, v, params, lane);
  find(places, rows, keys.length, split, params, thread_index);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  metalcore_await_earlier_kernels(0);
  load_queries<D, R, 32 * kMaxSimdgroups>(queries, q, places, rows.count, params, thread_index, threads.x);
  threadgroup_barrier(mem_flags::mem_threadgroup);

  Fragments<float, kDown, D / 8> result;
  clear(result);
  RowSoftmax<kDown> softmax;
#pragma unroll
  for (uint m = 0; m < kDown; ++m) softmax.largest[m] = -INFINITY, softmax.sum[m] = 0.0f;
  threadgroup T* const tile = tiles + simdgroup * kTile;
  if (params.key_layout == KEYS_PAGED)
    run<true, T, D, R>(walk, result, softmax, seen, start, step, keys, kv_indices, queries, tile, places, params, lane);
  else
    run<false, T, D, R>(walk, result, softmax, seen, start, step, keys, kv_indices, queries, tile, places, params,
                        lane);

  metalcore_begin_later_kernels(0);
  const Place place = place_of(lane);
#pragma unroll
  for (uint m = 0; m < kDown; ++m) {
    float sum = softmax.sum[m];
    sum += simd_shuffle_xor(sum, 1);
    sum += simd_shuffle_xor(sum, 8);
    if (place.column == 0) {
      maxima[simdgroup * R + m * 8 + place.row] = softmax.largest[m];
      sums[simdgroup * R + m * 8 + place.row] = sum;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  // Eight rows at a time take the place of the keys: floats are twice as long, and half as many.
  constexpr uint kMerged = 8 * kPitch;
  threadgroup float* const merged = reinterpret_cast<threadgroup float*>(tiles);
#pragma unroll
  for (uint m = 0; m < kDown; ++m) {
    if (m > 0) threadgroup_barrier(mem_flags::mem_threadgroup);
    if (m * 8 + place.row < rows.count) {
      const uint number = m * 8 + place.row, row = rows.first + number;
      const bool first = simdgroup == 0 && place.column == 0;
      const float weight = merge_softmax<R, kMaxSimdgroups>(
          maxima, sums, simdgroups, simdgroup, number, head_of(rows, row, params), sinks,
          first ? reinterpret_cast<device Number<float>*>(lse) + logarithm_of(rows, row, split, params) : nullptr,
          params);
#pragma unroll
      for (uint n = 0; n < D / 8; ++n)
        *reinterpret_cast<threadgroup float2*>(merged + simdgroup * kMerged + place.row * kPitch + n * 8 +
                                               place.column) = elements(result.at[m][n]) * weight;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll 2
    for (uint i = thread_index; i < 8 * D / 4; i += threads.x) {
      const uint row = i / (D / 4), element = i % (D / 4) * 4;
      if (m * 8 + row >= rows.count || element >= params.value_size) continue;
      float4 value = float4(0.0f);
#pragma unroll
      for (uint other = 0; other < kMaxSimdgroups; ++other)
        if (other < simdgroups)
          value += *reinterpret_cast<threadgroup const float4*>(merged + other * kMerged + row * kPitch + element);
      const ulong to = places.results[m * 8 + row] + element;
      if (params.splits > 1) {
        *reinterpret_cast<device float4*>(reinterpret_cast<device float*>(out) + to) = value;
        continue;
      }
#pragma unroll
      for (uint n = 0; n < 4; ++n) store_number(out, to + n, params.out_type, value[n]);
    }
  }
}

// Names have the largest head size that a kernel takes, and its rows.
#define INSTANTIATE(T, D, R)                                                   \
  template [[host_name("attention_decode_matrices_narrow_" #D "x" #R "_" #T)]] \
  [[kernel]] decltype(attention_decode_matrices_narrow<T, D, R>) attention_decode_matrices_narrow<T, D, R>;

INSTANTIATE(half, 64, 16)
INSTANTIATE(half, 128, 8)
INSTANTIATE(bfloat, 64, 16)
INSTANTIATE(bfloat, 128, 8)
