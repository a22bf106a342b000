// Attention of few queries to many keys by products of matrices, for 16-bit numbers. More than 4 rows (queries times
// the heads of a group) share the keys: by plain multiplications arithmetic is the limit there, and not memory.
//
// A threadgroup has R rows and a part of the keys, of which each simdgroup takes 16 every few. A simdgroup has a tile
// of threadgroup memory of its own, so that simdgroups wait for each other only at the end, when their maxima, sums and
// results become one. Where several threadgroups share the keys, merge.metal merges their results.
#pragma once

#include "attention/decode_walk_matrices.h"

// A threadgroup's memory has tiles for kMaxSimdgroups. Narrow kernels are for threads with at most 128 registers, as
// Apple's GPUs have them.
template <typename T, uint D, uint R, bool kNarrow, uint kMaxSimdgroups = 4>
[[kernel]] [[max_total_threads_per_threadgroup(32 * kMaxSimdgroups)]] void attention_decode_matrices(
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
  threadgroup int positions[R];
  threadgroup ulong query_rows[R];
  threadgroup ulong out_rows[R];

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
  const bool paged = params.key_layout == KEYS_PAGED, begins = !kNarrow && start < seen.end;
  if (begins && paged) find<true>(walk.places, start, seen.end, keys, kv_indices, params, walk.share, lane);
  if (begins && !paged) find<false>(walk.places, start, seen.end, keys, kv_indices, params, walk.share, lane);
  if (thread_index < R) {
    const uint row = rows.first + min(thread_index, rows.count - 1);
    const uint query = row / params.group;
    const uint head = head_of(rows, row, params);
    const ulong token = rows.first_query + query;
    positions[thread_index] = static_cast<int>(query) + offset_of(rows, keys.length, params);
    query_rows[thread_index] = rows.outer * params.q.batch + head * params.q.head + token * params.q.token;
    out_rows[thread_index] =
        rows.outer * params.out.batch + head * params.out.head + token * params.out.token + split * params.out.part;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  device const uchar* first_keys[kLaneKeys];
  walk.key_rows.find(first_keys, walk.places, params.k);
  metalcore_await_earlier_kernels(first_keys, 0);
  if (begins) walk.ahead.load(walk.key_rows, first_keys);
  // All loads of a thread are on their way at once.
  constexpr uint kVectors = D / 8, kEach = R * kVectors / (32 * kMaxSimdgroups);
  for (uint first = thread_index; first < R * kVectors; first += kEach * threads.x) {
    Pack<T> numbers[kEach];
#pragma unroll
    for (uint j = 0; j < kEach; ++j) {
      const uint i = min(first + j * threads.x, R * kVectors - 1);
      const uint element = min(i % kVectors * 8, params.head_size - 8);
      numbers[j] = *reinterpret_cast<device const Pack<T>*>(q + query_rows[i / kVectors] + element);
    }
#pragma unroll
    for (uint j = 0; j < kEach; ++j) {
      const uint i = first + j * threads.x, row = i / kVectors, element = i % kVectors * 8;
      const bool exists = row < rows.count && element < params.head_size;
      if (i < R * kVectors)
        *reinterpret_cast<threadgroup Pack<T>*>(queries + row * kPitch + element) = {exists ? numbers[j].words
                                                                                            : uint4(0u)};
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  Fragments<float, kDown, D / 8> result;
  clear(result);
  RowSoftmax<kDown> softmax;
#pragma unroll
  for (uint m = 0; m < kDown; ++m) softmax.largest[m] = -INFINITY, softmax.sum[m] = 0.0f;
  threadgroup T* const tile = tiles + simdgroup * kTile;
  if (paged)
    run<kNarrow, true, T, D, R>(walk, result, softmax, seen, start, step, keys, kv_indices, queries, tile, positions,
                                params, lane);
  else
    run<kNarrow, false, T, D, R>(walk, result, softmax, seen, start, step, keys, kv_indices, queries, tile, positions,
                                 params, lane);

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
          first ? lse + logarithm_of(rows, row, split, params) : nullptr, params);
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
      const ulong to = out_rows[m * 8 + row] + element;
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
#define INSTANTIATE(name, T, D, R, ...)                                                               \
  template [[host_name("attention_decode_matrices_" name #D "x" #R                                    \
                       "_" #T)]] [[kernel]] decltype(attention_decode_matrices<T, D, R, __VA_ARGS__>) \
      attention_decode_matrices<T, D, R, __VA_ARGS__>;
