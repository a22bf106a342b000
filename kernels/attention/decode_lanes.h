// Attention of 2 to 8 rows (queries times the heads of a group) of 64 16-bit numbers to many keys, by products of
// matrices: the same as decode_matrices.h does, in another way. Lanes load keys and values such that they are the
// operands of products, and have the weights of softmax: nothing goes through threadgroup memory before the end.
//
// A threadgroup has a part of the keys, of which each simdgroup takes K in turn. They wait for each other only at the
// end, when their sums become one. So there is more of memory's data on its way, but less to hide a simdgroup's
// waiting: it is for GPUs whose cores all have as many of these threadgroups as fit.
#pragma once

#include "attention/decode_together.h"
#include "attention/decode_walk_matrices.h"

// Rows of a threadgroup, and numbers of a row.
constexpr constant uint R = 8, D = 64;

// Rounded numbers as floats. Compilers round two bfloats at once where nobody takes the pair apart.
inline float2 rounded_floats(half2 x) { return float2(x); }
inline float2 rounded_floats(bfloat2 x) {
  const uint word = as_type<uint>(x);
  return as_type<float2>(uint2(word << 16, word & 0xffff0000u));
}

// Number 2 i, or 2 i + 1 where `odd`, of two packs.
template <typename T>
METAL_FUNC vec<T, 2> beside(thread const Pack<T>& a, thread const Pack<T>& b, uint i, bool odd) {
  const vec<T, 2> x = as_type<vec<T, 2>>(a.words[i]), y = as_type<vec<T, 2>>(b.words[i]);
  return odd ? vec<T, 2>(x.y, y.y) : vec<T, 2>(x.x, y.x);
}

// Where K keys are: lane i has the place of key i % K, if they are in pages. Bit i of `found` is for key number i.
struct KeyTile {
  uint start, last;  // the last key that there is
  uint page, slot, found;
};
template <uint K>
constexpr constant uint kAllFoundOf = K == 32 ? ~0u : (1u << K % 32) - 1;
template <bool kPaged, uint K>
inline KeyTile find_tile(uint start, uint end, thread const KeyRows& keys, device const int* kv_indices,
                         constant AttentionDecodeParams& params, uint lane) {
  KeyTile tile = {start, end - 1, 0, 0, kAllFoundOf<K>};
  if (kPaged) {
    const uint key = start + lane % K;
    ulong page;
    const bool exists = keys.find(min(key, end - 1), params, kv_indices, page, tile.slot) && key < end;
    tile.page = static_cast<uint>(page);
    tile.found = static_cast<uint>(static_cast<simd_vote::vote_t>(simd_ballot(exists))) & kAllFoundOf<K>;
  } else if (start + K > end) {
    tile.found = (1u << (end - start)) - 1;
  }
  return tile;
}

// A lane's vectors of N rows of keys or values: `part`, part + kApart …
template <typename T, uint N, uint kVectors, uint kApart>
struct LaneRows {
  Pack<T> packs[N][kVectors];

  // Row number j of the lane is the tile's number + j % kBeside + 8 * (j / kBeside).
  template <bool kPaged, uint kBeside>
  static METAL_FUNC void find(thread device const T* (&rows)[N], device const T* from, thread const KeyTile& tile,
                              uint number, constant DecodeStrides& strides) {
#pragma unroll
    for (uint j = 0; j < N; ++j) {
      const uint own = number + j % kBeside + 8 * (j / kBeside);
      const uint slot = kPaged ? simd_shuffle(tile.slot, static_cast<ushort>(own)) : min(tile.start + own, tile.last);
      rows[j] = from + static_cast<ulong>(slot) * static_cast<uint>(strides.token);
      if (kPaged) rows[j] += static_cast<ulong>(simd_shuffle(tile.page, static_cast<ushort>(own))) * strides.batch;
    }
  }
  METAL_FUNC void load(thread device const T* const (&rows)[N], uint part) {
#pragma unroll
    for (uint j = 0; j < N; ++j) {
#pragma unroll
      for (uint n = 0; n < kVectors; ++n)
        packs[j][n] = reinterpret_cast<device const Pack<T>*>(rows[j] + part * kPackElements<T>)[n * kApart];
    }
  }
};

// Softmax of the lane's row: what its weights are powers of 2 less, and the sum of the lane's own weights. The base
// follows the largest score only where that is kSlack more: results are seldom scaled then.
struct LaneSoftmax {
  static constexpr constant float kSlack = 8.0f;

  float base, sum;
};
// The sums of a simdgroup. Matrices below each other are those of the larger and the smaller numbers of the weights.
using LaneSums = Fragments<float, 2, 8>;

// Adds K keys from start, start + step … on to the rows' sums.
//
// Tensor cores round sums towards zero, so each product takes up to 2^-23 from them. Numbers of 16 bits do not show it
// before a threadgroup has had some ten thousand keys, and the host gives it fewer.
template <bool kPaged, typename T, uint K>
METAL_FUNC void run(thread LaneSums& sums, thread LaneSoftmax& softmax, Seen seen, uint start, uint step,
                    thread const KeyRows& keys, device const T* k, device const T* v, device const int* kv_indices,
                    device const T* q, threadgroup const MatrixRows<R>& rows, uint count,
                    constant AttentionDecodeParams& params, uint lane) {
  const Place place = place_of(lane);
  const uint column = metalcore_right_column(place.row, 0), part = place.column / 2;
  k += keys.key;
  v += keys.value;
  using Keys = LaneRows<T, K / 8, 2, 4>;
  using Values = LaneRows<T, K / 4, 1, 8>;
  Keys key_rows;
  Values value_rows;
  device const T* places_of_keys[K / 8];
  device const T* places_of_values[K / 4];
#pragma unroll
  for (uint j = 0; j < K / 8; ++j) places_of_keys[j] = k;
  KeyTile tile = {};
  const bool begins = start < seen.end;
  if (begins) {
    tile = find_tile<kPaged, K>(start, seen.end, keys, kv_indices, params, lane);
    Keys::template find<kPaged, 1>(places_of_keys, k, tile, column, params.k);
  }
  metalcore_await_earlier_kernels(places_of_keys, 0);
  if (begins) {
    key_rows.load(places_of_keys, part);
    Values::template find<kPaged, 2>(places_of_values, v, tile, place.column, params.v);
    value_rows.load(places_of_values, column);
  }
  Fragments<T, 1, D / 8> queries;
#pragma unroll
  for (uint c = 0; c < 2; ++c) {
    const Pack<T> pack = *reinterpret_cast<device const Pack<T>*>(q + rows.queries[place.row] + c * 32 + part * 8);
#pragma unroll
    for (uint w = 0; w < 4; ++w)
      elements(queries.at[0][c * 4 + w]) = as_type<vec<T, 2>>(place.row < count ? pack.words[w] : 0u);
  }
  for (; start < seen.end; start += step) {
    Fragments<float, 1, K / 8> scores;
    clear(scores);
#pragma unroll
    for (uint c = 0; c < 2; ++c) {
      RightFragments<T, 4, K / 8> key;
#pragma unroll
      for (uint w = 0; w < 4; ++w) {
#pragma unroll
        for (uint n = 0; n < K / 8; ++n)
          metalcore_make_right(key.at[w][n], as_type<vec<T, 2>>(key_rows.packs[n][c].words[w]), lane, 0);
      }
      multiply(scores, queries, c * 4, key);
    }
    const uint found = tile.found;
    const bool more = start + step < seen.end;
    if (more) {
      tile = find_tile<kPaged, K>(start + step, seen.end, keys, kv_indices, params, lane);
      Keys::template find<kPaged, 1>(places_of_keys, k, tile, column, params.k);
      key_rows.load(places_of_keys, part);
    }
#pragma unroll
    for (uint n = 0; n < K / 8; ++n) elements(scores.at[0][n]) *= params.query_scale;
    if (seen.bounded || found != kAllFoundOf<K>) hide(scores, start, found, seen.bounded, rows, place, params);
    float2 larger = elements(scores.at[0][0]);
#pragma unroll
    for (uint n = 1; n < K / 8; ++n) larger = max(larger, elements(scores.at[0][n]));
    float top = max(larger.x, larger.y);
    top = max(top, simd_shuffle_xor(top, 1));
    top = max(top, simd_shuffle_xor(top, 8));
    if (simd_any(top > softmax.base + LaneSoftmax::kSlack)) {
      top = max(softmax.base, top);
      const float shrink = fast::exp2(softmax.base - base_of(top));
      softmax.base = top;
      softmax.sum *= shrink;
#pragma unroll
      for (uint n = 0; n < 8; ++n) {
        elements(sums.at[0][n]) *= shrink;
        elements(sums.at[1][n]) *= shrink;
      }
    }
    Fragments<T, 2, K / 8> weights;
    const float base = base_of(softmax.base);
#pragma unroll
    for (uint n = 0; n < K / 8; ++n) {
      const float2 two = fast::exp2(elements(scores.at[0][n]) - base);
      softmax.sum += two.x + two.y;
      const vec<T, 2> rounded = vec<T, 2>(two);
      elements(weights.at[0][n]) = rounded;
      elements(weights.at[1][n]) = vec<T, 2>(two - rounded_floats(rounded));
    }
    // The memory of a page that does not exist is another one's, and may hold anything.
    if (found != kAllFoundOf<K>) {
#pragma unroll
      for (uint j = 0; j < K / 4; ++j) {
        const bool exists = (found >> (place.column + j % 2 + 8 * (j / 2)) & 1) != 0;
        value_rows.packs[j][0].words = select(uint4(0u), value_rows.packs[j][0].words, uint4(exists) != 0u);
      }
    }
    RightFragments<T, K / 8, 8> value;
#pragma unroll
    for (uint n = 0; n < 8; ++n) {
#pragma unroll
      for (uint i = 0; i < K / 8; ++i)
        metalcore_make_right(value.at[i][n],
                             beside(value_rows.packs[2 * i][0], value_rows.packs[2 * i + 1][0], n / 2, n % 2 != 0),
                             lane, 0);
    }
    multiply(sums, weights, 0, value);
    if (more) {
      Values::template find<kPaged, 2>(places_of_values, v, tile, place.column, params.v);
      value_rows.load(places_of_values, column);
    }
  }
}

// It has 4 or 8 simdgroups. Threads of a kernel for up to 384 have at most 168 registers, and for up to 512, 128.
constexpr constant uint kMaxSimdgroups = 8;
template <typename T, uint K>
[[kernel]][[max_total_threads_per_threadgroup(K == 16 ? 512 : 384)]] void attention_decode_lanes(
    device const T* q [[buffer(0)]], device const T* k [[buffer(1)]], device const T* v [[buffer(2)]],
    device const uchar* sinks [[buffer(4)]], device const int* qo_indptr [[buffer(5)]],
    device const int* kv_indptr [[buffer(6)]], device const int* kv_indices [[buffer(7)]],
    device const int* kv_last_page_len [[buffer(8)]], device uchar* out [[buffer(10)]],
    device float* lse [[buffer(11)]], constant AttentionDecodeParams& params [[buffer(12)]],
    uint3 group [[threadgroup_position_in_grid]], uint3 threads [[threads_per_threadgroup]],
    uint thread_index [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  alignas(16) threadgroup float results[R * SharedResults<D>::kPitch];
  threadgroup float2 softmax_of_rows[R];
  threadgroup float maxima[kMaxSimdgroups * R];
  threadgroup float totals[kMaxSimdgroups * R];
  threadgroup MatrixRows<R> places;

  // All before the second call is what the first keys need: it costs no time where this kernel begins early.
  if (params.ragged || params.key_layout != KEYS_EACH) metalcore_await_earlier_kernels(0);
  const bool together = params.together != 0;
  const uint split = together ? group.y % params.splits : group.y / params.kv_heads;
  const uint kv_head = together ? group.y / params.splits : group.y % params.kv_heads;
  const TileRows rows = find_rows<R>(params.first_tile + group.x, group.z, kv_head, params, qo_indptr, lane);
  if (rows.request == params.batch) return;
  const KeyRows keys(rows.request, rows.kv_head, params, kv_indptr, kv_last_page_len);
  const uint simdgroups = threads.x / 32, step = simdgroups * K;
  const Seen seen = find_keys(rows, keys.length, split, step, params);
  const uint start = seen.begin + simdgroup * K;
  find(places, rows, keys.length, together ? 0 : split, params, thread_index);
  threadgroup_barrier(mem_flags::mem_threadgroup);

  LaneSums sums;
  clear(sums);
  LaneSoftmax softmax = {-INFINITY, 0.0f};
  if (params.key_layout == KEYS_PAGED)
    run<true, T, K>(sums, softmax, seen, start, step, keys, k, v, kv_indices, q, places, rows.count, params, lane);
  else
    run<false, T, K>(sums, softmax, seen, start, step, keys, k, v, kv_indices, q, places, rows.count, params, lane);

  metalcore_begin_later_kernels(0);
  const Place place = place_of(lane);
  softmax.sum += simd_shuffle_xor(softmax.sum, 1);
  softmax.sum += simd_shuffle_xor(softmax.sum, 8);
  if (place.column == 0) {
    maxima[simdgroup * R + place.row] = softmax.base;
    totals[simdgroup * R + place.row] = softmax.sum;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float weight;
  const bool first = simdgroup == 0 && place.column == 0;
  if (together) {
    float top = -INFINITY, total = 0.0f;
#pragma unroll
    for (uint i = 0; i < kMaxSimdgroups; ++i)
      if (i < simdgroups) top = max(top, maxima[i * R + place.row]);
    const float base = base_of(top);
#pragma unroll
    for (uint i = 0; i < kMaxSimdgroups; ++i)
      if (i < simdgroups) total += fast::exp2(maxima[i * R + place.row] - base) * totals[i * R + place.row];
    if (first) softmax_of_rows[place.row] = float2(top, total);
    weight = fast::exp2(softmax.base - base);
  } else {
    const uint row = rows.first + place.row;
    weight = merge_softmax<R, kMaxSimdgroups>(
        maxima, totals, simdgroups, simdgroup, place.row, head_of(rows, row, params), sinks,
        first && place.row < rows.count
            ? reinterpret_cast<device Number<float>*>(lse) + logarithm_of(rows, row, split, params)
            : nullptr,
        params);
  }
  // Simdgroups add their sums one after the other, each at another place: four numbers of two columns of a matrix.
  const SharedResults<D> shared = {results, softmax_of_rows};
  for (uint turn = 0; turn < simdgroups; ++turn) {
#pragma unroll
    for (uint unit = 0; unit < 4; ++unit) {
      if (((unit + turn) & (simdgroups - 1)) != simdgroup) continue;
      const uint four = unit / 2 * 4, odd = unit % 2;
      float4 value;
#pragma unroll
      for (uint e = 0; e < 4; ++e)
        value[e] = (elements(sums.at[0][four + e])[odd] + elements(sums.at[1][four + e])[odd]) * weight;
      threadgroup float4* const to = reinterpret_cast<threadgroup float4*>(shared.sums + place.row * shared.kPitch +
                                                                           (place.column + odd) * 8 + four);
      *to = turn == 0 ? value : *to + value;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  if (together) {
    write_merged<D, R>(shared, rows, places, sinks, out, lse, split, params, thread_index, threads.x);
    return;
  }
  for (uint i = thread_index; i < rows.count * (D / 4); i += threads.x) {
    const uint row = i / (D / 4), element = i % (D / 4) * 4;
    const float4 value = *reinterpret_cast<threadgroup const float4*>(shared.sums + row * shared.kPitch + element);
    const ulong to = places.results[row] + element;
    if (params.splits > 1) {
      *reinterpret_cast<device float4*>(reinterpret_cast<device float*>(out) + to) = value;
      continue;
    }
#pragma unroll
    for (uint n = 0; n < 4; ++n) store_number(out, to + n, params.out_type, value[n]);
  }
}

// Names have the keys of a simdgroup, and the numbers of a row.
#define INSTANTIATE(T, K)                          \
  template [[host_name("attention_decode_lanes" #K \
                       "_64x8_" #T)]] [[kernel]] decltype(attention_decode_lanes<T, K>) attention_decode_lanes<T, K>;
