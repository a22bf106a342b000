// Which rows and keys a threadgroup of decode's kernels has, and how the softmax of its simdgroups becomes one.
#pragma once

#include <metal_stdlib>

#include "attention/kv_rows.h"
#include "attention/numbers.h"

using namespace metal;

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
// Those of one of `splits` threadgroups, of the keys that any of the rows sees. They are multiples of `step`, except
// for the last ones.
inline Seen find_keys(TileRows rows, uint keys, uint split, uint step, constant AttentionDecodeParams& params) {
  const int offset = offset_of(rows, keys, params);
  const int first_position = static_cast<int>(rows.first / params.group) + offset;
  const int last_position = static_cast<int>((rows.first + rows.count - 1) / params.group) + offset;
  const int low = max(0, first_position - params.left);
  const int high = min(static_cast<int>(keys), last_position + params.right + 1);
  const uint count = static_cast<uint>(max(0, high - low));
  const uint share = (count + params.splits * step - 1) / (params.splits * step) * step;
  return {static_cast<uint>(low) + min(split * share, count),
          static_cast<uint>(low) + min(split * share + share, count), first_position != last_position};
}

inline uint head_of(TileRows rows, uint row, constant AttentionDecodeParams& params) {
  return rows.kv_head * params.group + row % params.group;
}
// Where the logarithm of a row's sum goes.
inline ulong logarithm_of(TileRows rows, uint row, uint split, constant AttentionDecodeParams& params) {
  return rows.outer * params.lse.batch + head_of(rows, row, params) * params.lse.head +
         (rows.first_query + row / params.group) * params.lse.token + split * params.lse.part;
}

// The softmax of row `number` of R over all simdgroups of a threadgroup: writes its logarithm, and what to multiply
// each simdgroup's result by.
template <uint R>
inline void merge_softmax(threadgroup const float* maxima, threadgroup const float* sums, threadgroup float* weights,
                          uint simdgroups, uint number, uint head, device const uchar* sinks, device float* logarithm,
                          constant AttentionDecodeParams& params) {
  const float sink = params.sink_type == NUMBER_NONE ? -INFINITY : number_at(sinks, head, params.sink_type) * M_LOG2E_F;
  float top = sink;
#pragma unroll 1
  for (uint i = 0; i < simdgroups; ++i) top = max(top, maxima[i * R + number]);
  const float base = base_of(top);
  float total = fast::exp2(sink - base);
#pragma unroll 1
  for (uint i = 0; i < simdgroups; ++i) total += fast::exp2(maxima[i * R + number] - base) * sums[i * R + number];
  const float norm = total == 0.0f ? 0.0f : 1.0f / total;  // a NaN stays
#pragma unroll 1
  for (uint i = 0; i < simdgroups; ++i) weights[i * R + number] = fast::exp2(maxima[i * R + number] - base) * norm;
  const float rest = log2(total);
  *logarithm = total == 0.0f ? -INFINITY : params.rests != 0 ? base : natural(base, rest);
  if (params.rests != 0) logarithm[params.rests] = total == 0.0f ? 0.0f : rest;
}
