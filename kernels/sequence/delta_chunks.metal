// gated_delta_rule by chunks of positions, whose errors u, results o and last state are products of matrices. With the
// decays d(i, j) from position j to i, d(i) from before the chunk to i, and the state S before it:
//
//   (I + M) u = v - d(i) k S          where M(i, j) = d(i, j) beta(j) (k(i) k(j)), j < i
//   o = scale (d(i) q S + P beta u)   where P(i, j) = d(i, j) (q(i) k(j)), j <= i
//
// The first kernel has all chunks at once, and leaves the inverse of I + M, and P. The second one walks along the
// chunks of a sequence with some columns of the state in threadgroup memory.
#include "sequence/delta_walk.h"

template <typename T>
[[kernel]] [[max_total_threads_per_threadgroup(DELTA_THREADS)]] void gated_delta_rule_inverse(
    device const T* q [[buffer(0)]], device const T* k [[buffer(1)]], device const float* g [[buffer(2)]],
    device const float* beta [[buffer(3)]], device const int* ends [[buffer(4)]], device float* inverses [[buffer(5)]],
    device float* scores [[buffer(6)]], device float* factors [[buffer(7)]],
    constant DeltaRuleParams& params [[buffer(8)]], uint group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  constexpr uint kWidth = 128 / sizeof(T), kPitch = kWidth + 16 / sizeof(T), kTall = kChunk + 4;
  constexpr uint kTerms = 4 / sizeof(T);  // fragments of a row at a time
  alignas(16) threadgroup T keys[2 * kChunk * kPitch];
  threadgroup T* const queries = keys + kChunk * kPitch;
  // M by columns, once keys and queries are not needed.
  threadgroup float* const system = reinterpret_cast<threadgroup float*>(keys);
  threadgroup float lengths[2][kChunk];         // of q and k, their inverses
  threadgroup float high[kChunk], low[kChunk];  // the logarithm of d(i), in two parts, since differences count
  threadgroup float strengths[kChunk];
  const uint lane = thread_index % 32, simdgroup = thread_index / 32;
  const uint head = group % params.value_heads, key_head = head / (params.value_heads / params.heads);
  const Span span = chunk_of(ends, params, group / params.value_heads);
  const uint count = span.end - span.begin;
  q += span.batch * params.q[0] + span.begin * params.q[1] + key_head * params.q[2];
  k += span.batch * params.k[0] + span.begin * params.k[1] + key_head * params.k[2];
  const ulong at = (ulong(span.batch) * params.length + span.begin) * params.value_heads + head;
  measure(lengths[0], lengths[1], q, k, count, params, simdgroup, lane);
  add_gates(high, low, g + at, count, params, thread_index);
  if (thread_index < kChunk) strengths[thread_index] = strength_of(beta + at, thread_index, count, params);
  const ulong chunk = ulong(group) * kChunk;
  device float* const own_scores = scores + chunk * kChunk;
  for (uint pass = 0; pass < (params.corrects ? 2 : 1); ++pass) {
    const bool of_queries = pass == 0;
    Fragments<float, 2, kChunk / 8> products;
    clear(products);
    for (uint first = 0; first < params.keys; first += kWidth) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
      fetch_rows<kWidth, kPitch>(keys, k, params.k[1], count, first, params.keys, params.wide, thread_index);
      if (of_queries)
        fetch_rows<kWidth, kPitch>(queries, q, params.q[1], count, first, params.keys, params.wide, thread_index);
      threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll 1
      for (uint term = 0; term < kWidth; term += kTerms * 8) {
        Fragments<T, 2, kTerms> rows;
        RightFragments<T, kTerms, kChunk / 8> columns;
        load<kPitch>(rows, (of_queries ? queries : keys) + simdgroup * kOwn * kPitch + term);
        load_transposed<kPitch>(columns, keys + term);
        multiply(products, rows, 0, columns);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
    for (uint m = 0; m < 2; ++m) {
#pragma unroll
      for (uint n = 0; n < kChunk / 8; ++n)
        simdgroup_store(products.at[m][n], system + (simdgroup * kOwn + m * 8) * kTall + n * 8, kTall);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    // Products of keys lie by rows or by columns, which are the same.
    for (uint i = thread_index; i < kChunk * kChunk; i += DELTA_THREADS) {
      const uint later = of_queries ? i / kChunk : i % kChunk, earlier = of_queries ? i % kChunk : i / kChunk;
      const float product =
          decay_of(high, low, later, earlier) * lengths[1][earlier] * system[i / kChunk * kTall + i % kChunk];
      if (of_queries)
        own_scores[i] = earlier <= later ? product * lengths[0][later] * params.scale : 0.0f;
      else
        system[i / kChunk * kTall + i % kChunk] =
            earlier < later ? product * strengths[earlier] * lengths[1][later] : 0.0f;
    }
  }
  if (thread_index < kChunk) {
    const float since = exp(high[thread_index] + low[thread_index]);
    device float* const own_factors = factors + chunk * 4 + thread_index;
    own_factors[0] = since * lengths[1][thread_index];
    own_factors[kChunk] = since * lengths[0][thread_index] * params.scale;
    own_factors[2 * kChunk] = decay_of(high, low, kChunk - 1, thread_index) * lengths[1][thread_index];
    own_factors[3 * kChunk] = since;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  // A thread has a column of the inverse, by substitution of some rows at a time.
  constexpr uint kBlock = 16;
  if (params.corrects && thread_index < kChunk) {
    // Its part below the diagonal lies on the other side of M's.
    device float* const column = inverses + chunk * kChunk + thread_index;
    threadgroup float* const found = system + thread_index;
    for (uint first = 0; first < kChunk; first += kBlock) {
      float values[kBlock];
#pragma unroll
      for (uint i = 0; i < kBlock; ++i) values[i] = first + i == thread_index ? 1.0f : 0.0f;
      for (uint j = 0; j < first; ++j) {
        const float known = j < thread_index ? 0.0f : j == thread_index ? 1.0f : found[j * kTall];
#pragma unroll
        for (uint i = 0; i < kBlock; ++i) values[i] -= system[j * kTall + first + i] * known;
      }
#pragma unroll
      for (uint i = 0; i < kBlock; ++i) {
#pragma unroll
        for (uint below = i + 1; below < kBlock; ++below)
          values[below] -= system[(first + i) * kTall + first + below] * values[i];
        if (first + i > thread_index) found[(first + i) * kTall] = values[i];
        column[(first + i) * kChunk] = values[i];
      }
    }
  }
}

template <uint KEYS, uint COLUMNS, typename T>
[[kernel]] [[max_total_threads_per_threadgroup(DELTA_PROMISE)]] void gated_delta_rule_walk(
    device const T* q [[buffer(0)]], device const T* k [[buffer(1)]], device const T* v [[buffer(2)]],
    device const float* beta [[buffer(3)]], device const int* ends [[buffer(4)]],
    device const float* state [[buffer(5)]], device const float* inverses [[buffer(6)]],
    device const float* scores [[buffer(7)]], device const float* factors [[buffer(8)]], device T* out [[buffer(9)]],
    device float* final_state [[buffer(10)]], device float* errors [[buffer(11)]], device float* kept [[buffer(12)]],
    device const float* skip [[buffer(13)]], constant DeltaRuleParams& params [[buffer(14)]],
    uint group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  using W = Walk<KEYS, COLUMNS, T>;
  constexpr uint kColumns = W::kColumns, kPitch = W::kPitch;
  alignas(16) threadgroup T keys[kChunk * W::kSlice];
  alignas(16) threadgroup float updates[W::kTiles * W::kTile];
  const uint lane = thread_index % 32, simdgroup = thread_index / 32, own = simdgroup * kOwn;
  const Place place = place_of(lane);
  const uint blocks = (params.values + kColumns - 1) / kColumns;
  const uint head = group / blocks % params.value_heads, sequence = group / blocks / params.value_heads;
  const uint block = group % blocks * kColumns;  // the first column
  const Span span = span_of(ends, params, sequence);
  const uint key_head = head / (params.value_heads / params.heads);
  q += span.batch * params.q[0] + key_head * params.q[2];
  k += span.batch * params.k[0] + key_head * params.k[2];
  v += span.batch * params.v[0] + head * params.v[2];
  const ulong size = ulong(params.keys) * params.values;  // of a state
  const ulong first_state = (ulong(sequence) * params.value_heads + head) * size;
  W walk(block, thread_index);
  walk.load(state + first_state, params.has_state, params);
  for (uint begin = span.begin; begin < span.end; begin += kChunk) {
    const uint count = min(kChunk, span.end - begin);
    const ulong chunk = (span.place + (begin - span.begin) / kChunk) * params.value_heads + head;
    const ulong at = (ulong(span.batch) * params.length + begin) * params.value_heads + head;
    device const float* const own_factors = factors + chunk * 4 * kChunk;
    device const T* const own_keys = k + begin * params.k[1];
    Fragments<float, 2, kColumns / 8> by_key, by_query;
    clear(by_query);
    if (params.for_derivative) {
      walk.store(kept + chunk * size, true, params);
    } else {
      Fragments<float, 2, W::kAcross> found =
          walk.read(keys, updates, q + begin * params.q[1], params.q[1], count, params, thread_index);
      walk.put(found, updates);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      load<kPitch>(by_query, updates + own * kPitch);
      scale_rows(by_query, own_factors + kChunk + own, 1.0f, lane);
    }
    Fragments<float, 2, W::kAcross> found =
        walk.read(keys, updates, own_keys, params.k[1], count, params, thread_index);
#pragma unroll
    for (uint n = 0; n < W::kAcross; ++n) {
      const uint row = walk.position() + n * 8 + place.column;
      const float2 factor = params.corrects ? float2(own_factors[row], own_factors[row + 1]) : float2(0.0f);
#pragma unroll
      for (uint m = 0; m < 2; ++m) {
        const uint column = walk.first + m * 8 + place.row;
        const uint rest = column < params.values ? rest_of(row, count) : 0;
        device const T* const value = v + (begin + row) * params.v[1] + column;
        const float2 values = float2(rest > 0 ? static_cast<float>(value[0]) : 0.0f,
                                     rest > 1 ? static_cast<float>(value[params.v[1]]) : 0.0f);
        elements(found.at[m][n]) = values - factor * elements(found.at[m][n]);
      }
    }
    walk.put(found, updates);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (params.corrects) {
      clear(by_key);
      add_lower<false, kPitch>(by_key, inverses + chunk * kChunk * kChunk, updates, simdgroup);
      threadgroup_barrier(mem_flags::mem_threadgroup);
    } else {
      load<kPitch>(by_key, updates + own * kPitch);
    }
#pragma unroll
    for (uint m = 0; m < 2; ++m) {
      const uint row = own + m * 8 + place.row;
      const float strength = strength_of(beta + at, row, count, params);
#pragma unroll
      for (uint n = 0; n < kColumns / 8; ++n) {
        const uint column = block + n * 8 + place.column;
        if (params.for_derivative)
          put_pair(errors + (at + ulong(row) * params.value_heads) * params.values + column, elements(by_key.at[m][n]),
                   row < count ? rest_of(column, params.values) : 0);
        elements(by_key.at[m][n]) *= strength;
      }
    }
    store<kPitch>(by_key, updates + own * kPitch);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (!params.for_derivative) {
      add_lower<false, kPitch>(by_query, scores + chunk * kChunk * kChunk, updates, simdgroup);
#pragma unroll
      for (uint m = 0; m < 2; ++m) {
        const uint row = own + m * 8 + place.row;
#pragma unroll
        for (uint n = 0; n < kColumns / 8; ++n) {
          const uint column = block + n * 8 + place.column, rest = row < count ? rest_of(column, params.values) : 0;
          float2 pair = elements(by_query.at[m][n]);
          if (params.has_skip)
            pair += pair_of(skip + head * params.values + column, rest) *
                    pair_of(v + (begin + row) * params.v[1] + column, rest);
          put_pair(out + (at + ulong(row) * params.value_heads) * params.values + column, pair, rest);
        }
      }
    }
    walk.scale(own_factors[4 * kChunk - 1]);
    walk.template learn_all<true>(keys, updates, own_factors + 2 * kChunk, 1.0f, own_keys, params.k[1], count, params,
                                  thread_index);
  }
  walk.store(final_state + first_state, !params.for_derivative, params);
}

#define INSTANTIATE_CHUNKS(types, T)                                                    \
  INSTANTIATE("gated_delta_rule_inverse", types, gated_delta_rule_inverse<T>)           \
  INSTANTIATE("gated_delta_rule_walk_128x32", types, gated_delta_rule_walk<128, 32, T>) \
  INSTANTIATE("gated_delta_rule_walk_128x16", types, gated_delta_rule_walk<128, 16, T>) \
  INSTANTIATE("gated_delta_rule_walk_256x16", types, gated_delta_rule_walk<256, 16, T>)
INSTANTIATE_CHUNKS("_float", float)
INSTANTIATE_CHUNKS("_half", half)
INSTANTIATE_CHUNKS("_bfloat", bfloat)
