// gated_delta_rule by chunks of positions, whose errors u, results o and last state are products of matrices. With the
// decays d(i, j) from position j to i, d(i) from before the chunk to i, and the state S before it:
//
//   (I + M) u = v - d(i) k S          where M(i, j) = d(i, j) beta(j) (k(i) k(j)), j < i
//   o = scale (d(i) q S + P beta u)   where P(i, j) = d(i, j) (q(i) k(j)), j <= i
//
// The first kernel has all chunks at once, and leaves the inverse of I + M, and P. The second one walks along the
// chunks of a sequence with some columns of the state in threadgroup memory.
#include "sequence/delta_walk.h"

constexpr constant uint kTall = kChunk + 4;  // pitch of the products of positions

// The inverse of I + M. M lies by columns, right of the diagonal, and its inverse takes the blocks of 16 by 16 on and
// left of it. A simdgroup has a row of blocks.
inline void invert(threadgroup float* system, uint simdgroup, uint lane) {
  const uint own = simdgroup * kOwn;
  threadgroup float* const diagonal = system + own * kTall + own;
  float values[kOwn];  // a lane's column, by substitution
#pragma unroll
  for (uint i = 0; i < kOwn; ++i) values[i] = i == lane % kOwn ? 1.0f : 0.0f;
#pragma unroll
  for (uint i = 0; i < kOwn; ++i) {
#pragma unroll
    for (uint below = i + 1; below < kOwn; ++below) values[below] -= diagonal[i * kTall + below] * values[i];
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
  if (lane < kOwn) {
#pragma unroll
    for (uint i = 0; i < kOwn; ++i) diagonal[i * kTall + lane] = values[i];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  // The blocks at a distance from the diagonal need those that are nearer to it.
  for (uint distance = 1; distance < kSimdgroups; ++distance) {
    if (simdgroup >= distance) {
      const uint column = own - distance * kOwn;
      threadgroup float* const block = system + own * kTall + column;
      Fragments<float, 2, 2> sums, rows;
      RightFragments<float, 2, 2> terms;
      clear(sums);
      for (uint term = column; term < own; term += kOwn) {
#pragma unroll
        for (uint m = 0; m < 2; ++m) {
#pragma unroll
          for (uint k = 0; k < 2; ++k)
            simdgroup_load(rows.at[m][k], system + (term + k * 8) * kTall + own + m * 8, kTall, ulong2(0), true);
        }
        load<kTall>(terms, system + term * kTall + column);
        multiply(sums, rows, 0, terms);
      }
      store<kTall>(sums, block);
      simdgroup_barrier(mem_flags::mem_threadgroup);
      load<kTall>(terms, block);
      load<kTall>(rows, diagonal);
      clear(sums);
      multiply(sums, rows, 0, terms);
      simdgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
      for (uint m = 0; m < 2; ++m) {
#pragma unroll
        for (uint n = 0; n < 2; ++n) elements(sums.at[m][n]) *= -1.0f;
      }
      store<kTall>(sums, block);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
}

// Neighbouring elements of a chunk's matrix, as they are or as sums of three bfloats.
template <bool PARTS, int N>
inline void put_elements(device float* to, uint at, vec<float, N> elements) {
  if constexpr (!PARTS) {
    *reinterpret_cast<device vec<float, N>*>(to + at) = elements;
  } else {
    device vec<bfloat, N>* own = reinterpret_cast<device vec<bfloat, N>*>(reinterpret_cast<device bfloat*>(to) + at);
#pragma unroll
    for (uint part = 0; part < 3; ++part, own += kChunk * kChunk / N) {
      const vec<bfloat, N> rounded = static_cast<vec<bfloat, N>>(elements);
      *own = rounded;
      elements -= static_cast<vec<float, N>>(rounded);
    }
  }
}

template <bool PARTS, typename T>
[[kernel]] [[max_total_threads_per_threadgroup(DELTA_INVERSE_PROMISE(PARTS))]] void gated_delta_rule_inverse(
    device const T* q [[buffer(0)]], device const T* k [[buffer(1)]], device const float* g [[buffer(2)]],
    device const float* beta [[buffer(3)]], device const int* ends [[buffer(4)]], device float* inverses [[buffer(5)]],
    device float* scores [[buffer(6)]], device float* factors [[buffer(7)]],
    constant DeltaRuleParams& params [[buffer(8)]], uint group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  constexpr uint kWidth = 128 / sizeof(T), kPitch = kWidth + 16 / sizeof(T);
  constexpr uint kTerms = 4 / sizeof(T);  // fragments of a row at a time
  alignas(16) threadgroup T keys[2 * kChunk * kPitch];
  threadgroup T* const queries = keys + kChunk * kPitch;
  // M by columns, once keys and queries are not needed.
  threadgroup float* const system = reinterpret_cast<threadgroup float*>(keys);
  threadgroup float lengths[2][kChunk];         // of q and k, their inverses
  threadgroup float high[kChunk], low[kChunk];  // the logarithm of d(i), in two parts, since differences count
  threadgroup float strengths[kChunk];
  const uint lane = thread_index % 32, simdgroup = thread_index / 32;
  const Place place = place_of(lane);
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
  const ulong matrix = chunk * kChunk * (PARTS ? 3 : 2) / 2;
  Fragments<float, 2, kChunk / 8> by_queries, by_keys;  // products with keys
  clear(by_queries);
  clear(by_keys);
  for (uint first = 0; first < params.keys; first += kWidth) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    fetch_rows<kWidth, kPitch>(keys, k, params.k[1], count, first, params.keys, params.wide, thread_index);
    fetch_rows<kWidth, kPitch>(queries, q, params.q[1], count, first, params.keys, params.wide, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll 1
    for (uint term = 0; term < kWidth; term += kTerms * 8) {
      Fragments<T, 2, kTerms> rows;
      RightFragments<T, kTerms, kChunk / 8> columns;
      load_transposed<kPitch>(columns, keys + term);
      load<kPitch>(rows, queries + simdgroup * kOwn * kPitch + term);
      multiply(by_queries, rows, 0, columns);
      load<kPitch>(rows, keys + simdgroup * kOwn * kPitch + term);
      if (params.corrects) multiply(by_keys, rows, 0, columns);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
  for (uint m = 0; m < 2; ++m) {
    const uint later = simdgroup * kOwn + m * 8 + place.row;
    const float of_query = lengths[0][later] * params.scale, of_key = lengths[1][later];
#pragma unroll
    for (uint n = 0; n < kChunk / 8; ++n) {
      const uint earlier = n * 8 + place.column;
      float2 score = float2(0.0f), factor = float2(0.0f);
      if (n * 8 < (simdgroup + 1) * kOwn) {  // others are zero
        const float2 decay = float2(decay_of(high, low, later, earlier), decay_of(high, low, later, earlier + 1)) *
                             float2(lengths[1][earlier], lengths[1][earlier + 1]);
        const float2 found = decay * elements(by_queries.at[m][n]) * of_query;
        const float2 of_system =
            decay * elements(by_keys.at[m][n]) * float2(strengths[earlier], strengths[earlier + 1]) * of_key;
        score = float2(earlier <= later ? found.x : 0.0f, earlier + 1 <= later ? found.y : 0.0f);
        factor = float2(earlier < later ? of_system.x : 0.0f, earlier + 1 < later ? of_system.y : 0.0f);
      }
      put_elements<PARTS>(scores + matrix, later * kChunk + earlier, score);
      system[earlier * kTall + later] = factor.x;
      system[(earlier + 1) * kTall + later] = factor.y;
    }
  }
  if (thread_index < kChunk) {
    const float since = exp(high[thread_index] + low[thread_index]);
    device float* const own_factors = factors + chunk * DELTA_FACTORS + thread_index;
    own_factors[0] = since * lengths[1][thread_index];
    own_factors[kChunk] = since * lengths[0][thread_index] * params.scale;
    own_factors[2 * kChunk] = decay_of(high, low, kChunk - 1, thread_index) * lengths[1][thread_index];
    own_factors[3 * kChunk] = since;
    own_factors[4 * kChunk] = high[thread_index];
    own_factors[5 * kChunk] = low[thread_index];
    own_factors[6 * kChunk] = lengths[0][thread_index];
    own_factors[7 * kChunk] = lengths[1][thread_index];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (!params.corrects) return;
  invert(system, simdgroup, lane);
  for (uint i = thread_index; i < kChunk * kChunk / 4; i += DELTA_THREADS) {
    const uint row = i / (kChunk / 4), column = i % (kChunk / 4) * 4;
    threadgroup const float4* const found = reinterpret_cast<threadgroup const float4*>(system + row * kTall + column);
    put_elements<PARTS>(inverses + matrix, i * 4, column / kOwn <= row / kOwn ? *found : float4(0.0f));
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
    device const float* const own_factors = factors + chunk * DELTA_FACTORS * kChunk;
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
    LowerRows inverse_rows, score_rows;
    if (W::kAhead && params.corrects) inverse_rows.load<false>(inverses + chunk * kChunk * kChunk, simdgroup, place);
    Fragments<float, 2, W::kAcross> found =
        walk.read(keys, updates, own_keys, params.k[1], count, params, thread_index);
#pragma unroll
    for (uint n = 0; n < W::kAcross; ++n) {
      const uint row = walk.position() + n * 8 + place.column;
      const float2 factor = params.corrects ? *reinterpret_cast<device const float2*>(own_factors + row) : float2(0.0f);
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
    if (W::kAhead && !params.for_derivative) score_rows.load<false>(scores + chunk * kChunk * kChunk, simdgroup, place);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (params.corrects) {
      clear(by_key);
      if (W::kAhead)
        inverse_rows.add<false, kPitch>(by_key, updates, simdgroup);
      else
        add_lower<false, kPitch>(by_key, inverses + chunk * kChunk * kChunk, updates, simdgroup, place);
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
      if (W::kAhead)
        score_rows.add<false, kPitch>(by_query, updates, simdgroup);
      else
        add_lower<false, kPitch>(by_query, scores + chunk * kChunk * kChunk, updates, simdgroup, place);
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
  INSTANTIATE("gated_delta_rule_inverse", types, gated_delta_rule_inverse<false, T>)    \
  INSTANTIATE("gated_delta_rule_walk_128x32", types, gated_delta_rule_walk<128, 32, T>) \
  INSTANTIATE("gated_delta_rule_walk_128x16", types, gated_delta_rule_walk<128, 16, T>) \
  INSTANTIATE("gated_delta_rule_walk_256x16", types, gated_delta_rule_walk<256, 16, T>)
INSTANTIATE_CHUNKS("_float", float)
INSTANTIATE_CHUNKS("_half", half)
INSTANTIATE_CHUNKS("_bfloat", bfloat)
INSTANTIATE("gated_delta_rule_inverse_parts", "_bfloat", gated_delta_rule_inverse<true, bfloat>)
