// A simdgroup's walk over the keys of a threadgroup of decode.metal.
#pragma once

#include "attention/decode_rows.h"
#include "common/earlier.h"
#include "common/sums.h"

inline float add_products(float4 a, float4 b, float sum) {
  return fma(a.w, b.w, fma(a.z, b.z, fma(a.y, b.y, fma(a.x, b.x, sum))));
}

// A group of lanes shares the scores of R rows and AHEAD keys: score j of row r has number r * AHEAD + j, and lane i of
// the group has those from i * R * AHEAD / kLanes on, all of one row.
template <typename S, uint R, uint AHEAD>
struct Shares {
  static constexpr constant uint kScores = R * AHEAD;
  static constexpr constant uint kMine = kScores > S::kLanes ? kScores / S::kLanes : 1;    // scores that a lane has
  static constexpr constant uint kRepeat = kScores < S::kLanes ? S::kLanes / kScores : 1;  // lanes that have the same
};

// Softmax of a lane's row, over the keys that its group of lanes has had. Weights are powers of 2 of scores less the
// base, which follows the largest score only where that is kSlack more: results are seldom scaled then.
struct Running {
  static constexpr constant float kSlack = 8.0f;

  float largest;    // of the lane's own scores
  float reference;  // what the base is made of
  float sum;        // of the lane's own weights
};

// The rows of a threadgroup: places of queries, masks and results in memory, and of queries among the keys.
struct RowPlaces {
  threadgroup int* positions;
  threadgroup ulong* queries;
  threadgroup ulong* masks;
  threadgroup ulong* results;
};

// Finds the places of R rows, and brings their queries into threadgroup memory.
template <typename S, uint R>
inline void load_rows(threadgroup Pack<float>* to, RowPlaces places, thread const TileRows& rows,
                      thread const KeyRows& keys, uint split, device const uchar* q, device const int* mask_indptr,
                      constant AttentionDecodeParams& params, uint thread_index, uint threads) {
  if (thread_index < R) {
    const uint row = rows.first + min(thread_index, rows.count - 1);
    const uint query = row / params.group;
    const uint head = head_of(rows, row, params);
    const ulong token = rows.first_query + query;
    places.positions[thread_index] = static_cast<int>(query) + offset_of(rows, keys.length, params);
    places.queries[thread_index] = rows.outer * params.q.batch + head * params.q.head + token * params.q.token;
    places.results[thread_index] =
        rows.outer * params.out.batch + head * params.out.head + token * params.out.token + split * params.out.part;
    places.masks[thread_index] =
        params.mask_elements ? static_cast<ulong>(mask_indptr[rows.request]) + query * static_cast<ulong>(keys.length)
                             : params.mask_first + rows.request * params.mask_batch + head * params.mask_head +
                                   query * params.mask_query;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  constexpr uint kQuads = S::kVector / 4;  // float4s of a vector
  for (uint i = thread_index; i < R * S::kPadded / 4; i += threads) {
    const uint row = i / (S::kPadded / 4);
    const uint element = i % (S::kPadded / 4) * 4;
    const float4 numbers = numbers_at(q, places.queries[row], element, params.head_size, params.query_type);
    // Lanes read float4s of their vectors side by side, from different banks.
    const uint vector = element / S::kVector, quad = element % S::kVector / 4;
    const uint place = (vector / S::kLanes * kQuads + quad) * S::kLanes + vector % S::kLanes;
    to[row * (S::kPadded / 4) + place].words =
        as_type<uint4>(row < rows.count ? numbers * params.query_scale : float4(0.0f));
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// A lane's keys and values on their way into registers. Only `kGeneral` walks know masks, soft caps, and rows that
// cannot be loaded by vectors: the others have few instructions. Only `kPaged` walks know pages.
template <bool kGeneral, bool kPaged, typename T, typename S>
struct KeysAhead {
  static constexpr constant uint kAhead = kGeneral ? 1 : S::kAhead;

  RowVectors<kGeneral, T, S::kLanes, S::kKeyVectors> key_rows;
  RowVectors<kGeneral, T, S::kLanes, S::kValueVectors> value_rows;
  Pack<T> x[kAhead][S::kKeyVectors];
  Pack<T> y[kAhead][S::kValueVectors];
  bool exists[kAhead];
  ulong page[kAhead];
  uint slot[kAhead];

  KeysAhead(thread const KeyRows& keys, device const T* k, device const T* v, constant AttentionDecodeParams& params,
            uint part)
      : key_rows(k + keys.key, params.k.batch, params.k.token, part, params.head_size, params.vectors),
        value_rows(v + keys.value, params.v.batch, params.v.token, part, params.value_size, params.vectors) {}
};

// Asks for the keys from `start` on. Behind the last one that is seen stands the last one again.
template <bool kGeneral, bool kPaged, typename T, typename S>
inline void ask_keys(thread KeysAhead<kGeneral, kPaged, T, S>& ahead, uint start, Seen seen, thread const KeyRows& keys,
                     device const int* kv_indices, constant AttentionDecodeParams& params, uint lane) {
  constexpr uint kAhead = KeysAhead<kGeneral, kPaged, T, S>::kAhead;
#pragma unroll
  for (uint j = 0; j < kAhead; ++j) {
    ahead.slot[j] = min(start + j * S::kTogether + lane / S::kLanes, seen.end - 1);
    ahead.page[j] = 0;
    ahead.exists[j] = !kPaged || keys.find(ahead.slot[j], params, kv_indices, ahead.page[j], ahead.slot[j]);
  }
#pragma unroll
  for (uint j = 0; j < kAhead; ++j) ahead.key_rows.load(ahead.x[j], ahead.page[j], ahead.slot[j]);
}
// Asks for their values.
template <bool kGeneral, bool kPaged, typename T, typename S>
inline void ask_values(thread KeysAhead<kGeneral, kPaged, T, S>& ahead) {
#pragma unroll
  for (uint j = 0; j < KeysAhead<kGeneral, kPaged, T, S>::kAhead; ++j)
    ahead.value_rows.load(ahead.y[j], ahead.page[j], ahead.slot[j]);
}

// Adds keys start, start + step …, and those that the simdgroup has with each, to the rows' results. The first ones are
// on their way before the rows are found, and the next ones follow as soon as their registers are free, except where
// there are no registers to load ahead into.
template <bool kGeneral, bool kPaged, typename T, typename S, uint R, uint N>
inline void walk(thread float4 (&result)[R][N], thread Running& running, Seen seen, uint first, uint step,
                 thread const TileRows& rows, thread const KeyRows& keys, uint split, device const uchar* q,
                 device const T* k, device const T* v, device const uchar* mask, device const int* mask_indptr,
                 device const int* kv_indices, threadgroup Pack<float>* shared, RowPlaces places,
                 constant AttentionDecodeParams& params, uint thread_index, uint threads, uint lane) {
  using Ahead = KeysAhead<kGeneral, kPaged, T, S>;
  constexpr uint kAhead = Ahead::kAhead;
  constexpr uint kQuads = S::kVector / 4;  // float4s of a vector
  constexpr uint kRowLanes = S::kLanes / R;
  using Share = Shares<S, R, kAhead>;
  const uint part = lane % S::kLanes;
  const uint row = part / kRowLanes;
  const uint leader = lane & ~(S::kLanes - 1);  // the first lane of the group
  Ahead ahead(keys, k, v, params, part);
  uint start = seen.begin + first;
  metalcore_await_earlier_kernels(0);
  if (S::kEarly && start < seen.end) {
    ask_keys(ahead, start, seen, keys, kv_indices, params, lane);
    ask_values(ahead);
  }
  load_rows<S, R>(shared, places, rows, keys, split, q, mask_indptr, params, thread_index, threads);
  float base = base_of(running.reference);
  for (; start < seen.end; start += step) {
    const bool more = S::kEarly && start + step < seen.end;
    if (!S::kEarly) {
      ask_keys(ahead, start, seen, keys, kv_indices, params, lane);
      ask_values(ahead);
    }

    float scores[Share::kScores];
#pragma unroll
    for (uint i = 0; i < Share::kScores; ++i) scores[i] = 0.0f;
#pragma unroll
    for (uint n = 0; n < S::kKeyVectors; ++n) {
      float4 numbers[kAhead][kQuads];
#pragma unroll
      for (uint j = 0; j < kAhead; ++j) unpack(ahead.x[j][n], numbers[j]);
#pragma unroll
      for (uint r = 0; r < R; ++r)
#pragma unroll
        for (uint i = 0; i < kQuads; ++i) {
          const float4 query =
              as_type<float4>(shared[r * (S::kPadded / 4) + (n * kQuads + i) * S::kLanes + part].words);
#pragma unroll
          for (uint j = 0; j < kAhead; ++j)
            scores[r * kAhead + j] = add_products(query, numbers[j][i], scores[r * kAhead + j]);
        }
    }
    lanes_sums<S::kLanes, Share::kScores>(scores, lane);

    bool above = false;
#pragma unroll
    for (uint m = 0; m < Share::kMine; ++m) {
      // The key of the lane's score m.
      const uint j = (part * Share::kMine / Share::kRepeat + m) % kAhead;
      const uint number = start + j * S::kTogether + lane / S::kLanes;
      float score = scores[m];
      if (kGeneral && params.softcap != 0.0f) score = params.softcap * precise::tanh(score);
      if (kGeneral && params.mask_type != NUMBER_NONE) {
        const ulong at = places.masks[row] + min(number, seen.end - 1) * params.mask_key;
        const bool there = params.mask_elements == 0 || at < params.mask_elements;
        score = there ? plus_mask_at(score, mask, at, params.mask_type) : -INFINITY;
      }
      if (seen.bounded) {
        const int distance = static_cast<int>(number) - places.positions[row];
        if (distance > params.right || -distance > params.left) score = -INFINITY;
      }
      bool found = number < seen.end;
#pragma unroll
      for (uint i = 0; i < kAhead; ++i) found = found && (ahead.exists[i] || i != j);
      score = found ? score : -INFINITY;
      running.largest = max(running.largest, score);
      above = above || score > running.reference + Running::kSlack;
      scores[m] = score;
    }
    if (more) ask_keys(ahead, start + step, seen, keys, kv_indices, params, lane);
    if (simd_any(above)) {
      float top = running.largest;
#pragma unroll
      for (uint across = 1; across < kRowLanes; across *= 2)
        top = max(top, simd_shuffle_xor(top, static_cast<ushort>(across)));
      base = base_of(top);
      const float factor = fast::exp2(running.reference - base);
      running.reference = top;
      running.sum *= factor;
#pragma unroll
      for (uint r = 0; r < R; ++r) {
        const float of_row = simd_shuffle(factor, static_cast<ushort>(leader | (r * kRowLanes)));
#pragma unroll
        for (uint n = 0; n < S::kValueVectors * kQuads; ++n) result[r][n] *= of_row;
      }
    }
#pragma unroll
    for (uint m = 0; m < Share::kMine; ++m) {
      scores[m] = fast::exp2(scores[m] - base);
      running.sum += scores[m];
    }
#pragma unroll
    for (uint j = 0; j < kAhead; ++j) {
      float weights[R];
#pragma unroll
      for (uint r = 0; r < R; ++r) {
        const uint number = r * kAhead + j;
        weights[r] = simd_shuffle(scores[number % Share::kMine],
                                  static_cast<ushort>(leader | (number / Share::kMine * Share::kRepeat)));
      }
#pragma unroll
      for (uint n = 0; n < S::kValueVectors; ++n) {
        float4 numbers[kQuads];
        unpack(ahead.y[j][n], numbers);
#pragma unroll
        for (uint r = 0; r < R; ++r)
#pragma unroll
          for (uint i = 0; i < kQuads; ++i)
            result[r][n * kQuads + i] = fma(float4(weights[r]), numbers[i], result[r][n * kQuads + i]);
      }
    }
    if (more) ask_values(ahead);
  }
  // Several lanes have the same sum: it is added once.
  if (part % Share::kRepeat != 0) running.sum = 0.0f;
}
