// Where the keys and values of a request lie, which rows and keys a threadgroup of decode's kernels has, and how the
// softmax of its simdgroups becomes one.
#pragma once

#include <metal_stdlib>

#include "attention/attention.h"
#include "common/pack.h"
#include "attention/numbers.h"

using namespace metal;

// Lengths and places of pages are in device memory, so the host has not seen them. They are bounded here: no value of
// theirs leads out of a tensor, and a key whose page does not exist is not seen.
struct KeyRows {
  uint length;       // keys of the request
  uint first_page;   // index into kv_indices
  ulong key, value;  // the first key's and value's place in memory, in elements

  KeyRows(uint request, uint kv_head, constant AttentionDecodeParams& params, device const int* kv_indptr,
          device const int* kv_last_page_len)
      : length(params.keys), first_page(0), key(kv_head * params.k.head), value(kv_head * params.v.head) {
    if (params.key_layout == KEYS_EACH) {
      key += request * params.k.batch;
      value += request * params.v.batch;
      return;
    }
    const bool paged = params.key_layout == KEYS_PAGED;
    const int most = static_cast<int>(paged ? params.indices : params.keys);
    const int begin = clamp(kv_indptr[request], 0, most);
    const int end = clamp(kv_indptr[request + 1], begin, most);
    length = static_cast<uint>(end - begin);
    if (!paged) {
      key += begin * params.k.token;
      value += begin * params.v.token;
      return;
    }
    first_page = static_cast<uint>(begin);
    const int last = clamp(kv_last_page_len[request], 0, static_cast<int>(params.page_size));
    if (length) length = (length - 1) * params.page_size + static_cast<uint>(last);
  }

  // Finds the page of key number `i`, which is less than `length`, and its slot there; returns false where it has no
  // page in the pool. Keys that are not in pages are all in page 0.
  bool find(uint i, constant AttentionDecodeParams& params, device const int* kv_indices, thread ulong& page,
            thread uint& slot) const {
    page = 0;
    slot = i;
    if (params.key_layout != KEYS_PAGED) return true;
    const uint number = mulhi(2 * i, params.page_magic) >> params.page_shift;
    const uint index = static_cast<uint>(kv_indices[first_page + number]);
    const bool exists = index < params.pages;
    page = exists ? index : 0;
    slot = i - number * params.page_size;
    return exists;
  }
};

inline void pack(thread Pack<float>& x, thread const float (&numbers)[4]) {
  x.words = as_type<uint4>(float4(numbers[0], numbers[1], numbers[2], numbers[3]));
}
template <typename T>
inline void pack(thread Pack<T>& x, thread const T (&numbers)[8]) {
  x.words = uint4(as_type<uint2>(vec<T, 4>(numbers[0], numbers[1], numbers[2], numbers[3])),
                  as_type<uint2>(vec<T, 4>(numbers[4], numbers[5], numbers[6], numbers[7])));
}

// Loads a lane's N vectors of rows of `size` numbers. A lane whose vector would lie behind the row's end gets another
// one. Rows that are not general have vectors, and are fewer than 2^32 bytes apart.
template <bool kGeneral, typename T, uint LANES, uint N>
struct RowVectors {
  static constexpr constant uint kVector = 16 / sizeof(T);

  device const T* first;  // row of the first page
  ulong page, token;      // distances in elements
  uint part, size;
  bool vectors;
  device const uchar* places[N];  // of the first row's vectors

  RowVectors(device const T* first, int64_t page, int64_t token, uint part, uint size, bool vectors)
      : first(first), page(page), token(token), part(part), size(size), vectors(vectors) {
#pragma unroll
    for (uint n = 0; n < N; ++n)
      places[n] =
          reinterpret_cast<device const uchar*>(first + min(part + n * LANES, max(size / kVector, 1u) - 1) * kVector);
  }

  void load(thread Pack<T> (&x)[N], ulong number, uint slot) const {
    if (!kGeneral) {
      const ulong from = number * page * sizeof(T);
#pragma unroll
      for (uint n = 0; n < N; ++n)
        x[n] = *reinterpret_cast<device const Pack<T>*>(
            places[n] + from + static_cast<ulong>(slot) * static_cast<uint>(token * sizeof(T)));
      return;
    }
    const ulong from = number * page + slot * token;
    if (vectors) {
#pragma unroll
      for (uint n = 0; n < N; ++n) x[n] = *reinterpret_cast<device const Pack<T>*>(places[n] + from * sizeof(T));
      return;
    }
#pragma unroll
    for (uint n = 0; n < N; ++n) {
      const uint element = (part + n * LANES) * kVector;
      T numbers[kVector];
#pragma unroll
      for (uint i = 0; i < kVector; ++i) numbers[i] = first[from + min(element + i, size - 1)];
      pack(x[n], numbers);
    }
  }
};

// The request whose queries a tile of R rows belongs to, among requests of different lengths. `tile` becomes the tile's
// number in the request. Without such a request it is params.batch.
template <uint R>
inline uint find_request(thread uint& tile, constant AttentionDecodeParams& params, device const int* qo_indptr,
                         uint lane) {
  const int all = static_cast<int>(params.queries);
  uint before = 0;
  for (uint base = 0; base < params.batch; base += 32) {
    const uint request = min(base + lane, params.batch - 1);
    const int begin = clamp(qo_indptr[request], 0, all);
    const int end = clamp(qo_indptr[request + 1], begin, all);
    const uint rows = base + lane < params.batch ? static_cast<uint>(end - begin) * params.group : 0;
    const uint tiles = (rows + R - 1) / R;
    const uint through = before + simd_prefix_inclusive_sum(tiles);
    const uint ahead = simd_sum(through > tile ? 0u : 1u);
    if (ahead < 32) {
      tile -= simd_shuffle(through - tiles, static_cast<ushort>(ahead));
      return base + ahead;
    }
    before = simd_broadcast(through, static_cast<ushort>(31));
  }
  return params.batch;
}

// Rows are the queries of a request times the heads of a group, in this order. A threadgroup has those from `first` on.
struct TileRows {
  uint request;  // params.batch where the threadgroup has none
  uint kv_head;
  uint first_query, queries;  // of the request
  ulong outer;                // of the queries' batch
  uint first, count;
};
template <uint R>
inline TileRows find_rows(uint tile, uint request, uint kv_head, constant AttentionDecodeParams& params,
                          device const int* qo_indptr, uint lane) {
  TileRows rows = {request, kv_head, 0, params.queries, request, 0, 0};
  if (params.ragged) {
    rows.request = find_request<R>(tile, params, qo_indptr, lane);
    if (rows.request == params.batch) return rows;
    const int begin = clamp(qo_indptr[rows.request], 0, static_cast<int>(params.queries));
    rows.first_query = static_cast<uint>(begin);
    rows.queries =
        static_cast<uint>(clamp(qo_indptr[rows.request + 1], begin, static_cast<int>(params.queries)) - begin);
    rows.outer = 0;
  }
  rows.first = tile * R;
  rows.count = min(R, rows.queries * params.group - rows.first);
  return rows;
}

// The place of a row's query among the keys, less its number in the request.
inline int offset_of(TileRows rows, uint keys, constant AttentionDecodeParams& params) {
  return params.lower_right ? static_cast<int>(keys) - static_cast<int>(rows.queries) : 0;
}

// The keys that a threadgroup walks over. Where they are `bounded`, not all rows see all of them.
struct Seen {
  uint begin, end;
  bool bounded;
};
// Those of one of `splits` threadgroups, of the keys that any of the rows sees. Each has as many times `unit` keys as
// the others, and the first ones may have one more. There is no division, since the first keys wait for it.
inline Seen find_keys(TileRows rows, uint keys, uint split, uint unit, constant AttentionDecodeParams& params) {
  const int offset = offset_of(rows, keys, params);
  const int first_position = static_cast<int>(rows.first / params.group) + offset;
  const int last_position = static_cast<int>((rows.first + rows.count - 1) / params.group) + offset;
  const int low = max(0, first_position - params.left);
  const int high = min(static_cast<int>(keys), last_position + params.right + 1);
  const uint count = static_cast<uint>(max(0, high - low));
  const uint units = (count + unit - 1) / unit;
  uint each = mulhi(units, params.split_step);  // or one too few
  each += units - each * params.splits >= params.splits ? 1 : 0;
  const uint more = units - each * params.splits;
  const uint begin = split * each + min(split, more), end = begin + each + (split < more ? 1 : 0);
  return {static_cast<uint>(low) + begin * unit, static_cast<uint>(low) + min(end * unit, count),
          first_position != last_position};
}

inline uint head_of(TileRows rows, uint row, constant AttentionDecodeParams& params) {
  return rows.kv_head * params.group + row % params.group;
}
// Where the logarithm of a row's sum goes.
inline ulong logarithm_of(TileRows rows, uint row, uint split, constant AttentionDecodeParams& params) {
  return rows.outer * params.lse.batch + head_of(rows, row, params) * params.lse.head +
         (rows.first_query + row / params.group) * params.lse.token + split * params.lse.part;
}

// Writes the logarithm of a row's sum, which is 2^base times `total`.
inline void write_logarithm(device Number<float>* logarithm, float base, float total,
                            constant AttentionDecodeParams& params) {
  const float rest = log2(total);
  logarithm->value = total == 0.0f ? -INFINITY : params.rests != 0 ? base : natural(base, rest);
  if (params.rests != 0) logarithm[params.rests].value = total == 0.0f ? 0.0f : rest;
}

// The softmax of row `number` of R over all simdgroups of a threadgroup: returns what to multiply the result of one of
// them by, and writes the row's logarithm where there is a place for it.
template <uint R, uint kMaxSimdgroups>
inline float merge_softmax(threadgroup const float* maxima, threadgroup const float* sums, uint simdgroups,
                           uint simdgroup, uint number, uint head, device const uchar* sinks,
                           device Number<float>* logarithm, constant AttentionDecodeParams& params) {
  const float sink = params.sink_type == NUMBER_NONE ? -INFINITY : number_at(sinks, head, params.sink_type) * M_LOG2E_F;
  float top = sink;
#pragma unroll
  for (uint i = 0; i < kMaxSimdgroups; ++i)
    if (i < simdgroups) top = max(top, maxima[i * R + number]);
  const float base = base_of(top);
  float total = fast::exp2(sink - base);
#pragma unroll
  for (uint i = 0; i < kMaxSimdgroups; ++i)
    if (i < simdgroups) total += fast::exp2(maxima[i * R + number] - base) * sums[i * R + number];
  if (logarithm) write_logarithm(logarithm, base, total, params);
  return fast::exp2(maxima[simdgroup * R + number] - base) * (total == 0.0f ? 0.0f : 1.0f / total);  // a NaN stays
}
