// gated_delta_rule_chunks (delta_chunks_backward.metal, which has the formulas) and gated_delta_rule_keys by units that
// multiply tensors, for heads of 128 bfloats. A threadgroup has a chunk's positions and a head of keys, and goes
// through the heads of values that share it.
#include <metal_tensor>

#include "sequence/delta_unit_chunks.h"

constexpr constant uint kChunk = DELTA_CHUNK, kKeys = 128, kNumbers = 32;  // of a thread's products

inline void scale_products(thread float* products, threadgroup const float* factors, float factor, uint thread_index) {
#pragma unroll
  for (uint n = 0; n < kNumbers; ++n) products[n] *= factors[chunk_row(n / 2, thread_index)] * factor;
}

// The products of the rows of a half's products and of brought rows, with their inverse lengths.
template <bool OF_QUERIES, typename C>
inline void find_dots(threadgroup float (*dots)[DELTA_CHUNK], thread C& chunk, threadgroup const float* lengths,
                      uint thread_index) {
#pragma unroll
  for (uint m = 0; m < 2; ++m) {
    const uint row = chunk_row(m, thread_index);
    float product = 0.0f;
#pragma unroll
    for (uint pair = m; pair < kNumbers / 2; pair += 2) {
      const float2 own = OF_QUERIES ? chunk.query_pair(pair) : chunk.key_pair(pair);
      product += dot(float2(chunk.products[2 * pair], chunk.products[2 * pair + 1]), own);
    }
    product += simd_shuffle_xor(product, 1);  // over the lanes of the row
    product += simd_shuffle_xor(product, 2);
    if (thread_index % 4 == 0) dots[thread_index / 128][row] = product * lengths[row];
  }
}

// Sums over positions i >= t > j of pairs at the places of scores: of the rows that a simdgroup has and the columns of
// its half. Those of t behind the first half lack all that rows have in it, the totals.
inline void sum_across(threadgroup float (*across)[DELTA_CHUNK], threadgroup float* totals, thread const float* pairs,
                       uint thread_index) {
  const uint lane = thread_index % 32, half_begin = thread_index / 128 * 32;
  float sums[8] = {};
#pragma unroll
  for (uint m = 0; m < 2; ++m) {
    const uint i = chunk_row(m, thread_index);
    float before = 0.0f;
#pragma unroll
    for (uint pair = m; pair < 8; pair += 2) {
      const uint t = half_begin + chunk_column(pair, thread_index);
      const float first = pairs[2 * pair], own = first + pairs[2 * pair + 1];
      const float next = simd_shuffle_xor(own, 1), others = simd_shuffle_xor(own + next, 2);
      const float sum = before + (lane & 2 ? others : 0.0f) + (lane & 1 ? next : 0.0f);
      sums[pair / 2 * 2] += t <= i ? sum : 0.0f;
      sums[pair / 2 * 2 + 1] += t < i ? sum + first : 0.0f;
      before += (own + next) + others;
    }
    if (half_begin == 0 && lane % 4 == 0) totals[i] = before;
  }
#pragma unroll
  for (uint n = 0; n < 8; ++n) {
#pragma unroll
    for (ushort step = 4; step < 32; step *= 2) sums[n] += simd_shuffle_xor(sums[n], step);
    if (lane < 4) across[thread_index / 32 % 4][half_begin + n / 2 * 8 + lane * 2 + n % 2] = sums[n];
  }
}

// Where a thread's first number of a half's products is in rows of a head.
inline uint first_of(uint m, uint stride, uint thread_index) {
  return chunk_row(m, thread_index) * stride + thread_index / 128 * 64 + chunk_column(m, thread_index);
}

inline void add_parts(thread float* numbers, device const float* from, uint stride, uint count, uint thread_index) {
#pragma unroll
  for (uint m = 0; m < 2; ++m) {
    if (chunk_row(m, thread_index) >= count) continue;
    device const float* const own = from + first_of(m, stride, thread_index);
#pragma unroll
    for (uint pair = m; pair < kNumbers / 2; pair += 2) {
      const float2 part = *reinterpret_cast<device const float2*>(own + pair / 2 * 8);
      numbers[2 * pair] += part.x;
      numbers[2 * pair + 1] += part.y;
    }
  }
}
inline void store_parts(device float* to, thread const float* numbers, uint stride, uint count, uint thread_index) {
#pragma unroll
  for (uint m = 0; m < 2; ++m) {
    if (chunk_row(m, thread_index) >= count) continue;
    device float* const own = to + first_of(m, stride, thread_index);
#pragma unroll
    for (uint pair = m; pair < kNumbers / 2; pair += 2)
      *reinterpret_cast<device ulong*>(own + pair / 2 * 8) =
          as_type<ulong>(float2(numbers[2 * pair], numbers[2 * pair + 1]));
  }
}

// Stores the gradients of rows, given those of the normalized ones, and their products with these.
template <bool OF_QUERIES, typename T, typename C>
inline void store_gradients(device T* to, thread const float* numbers, thread C& chunk,
                            threadgroup const float* lengths, threadgroup const float* dots, uint stride, uint count,
                            uint thread_index) {
#pragma unroll
  for (uint m = 0; m < 2; ++m) {
    const uint row = chunk_row(m, thread_index);
    if (row >= count) continue;
    device T* const own = to + first_of(m, stride, thread_index);
    const float length = lengths[row], along = length * dots[row];
#pragma unroll
    for (uint pair = m; pair < kNumbers / 2; pair += 2) {
      const float2 elements = OF_QUERIES ? chunk.query_pair(pair) : chunk.key_pair(pair);
      const float2 found = length * (float2(numbers[2 * pair], numbers[2 * pair + 1]) - along * elements);
      *reinterpret_cast<device uint*>(own + pair / 2 * 8) = as_type<uint>(static_cast<vec<T, 2>>(found));
    }
  }
}

template <typename T>
[[kernel]] [[max_total_threads_per_threadgroup(DELTA_UNIT_THREADS)]] void gated_delta_rule_chunks_unit(
    device const T* grad [[buffer(0)]], device const T* q [[buffer(1)]], device const T* k [[buffer(2)]],
    device const float* beta [[buffer(4)]], device const int* ends [[buffer(5)]],
    device const float* errors [[buffer(6)]], device const float* value_grads [[buffer(7)]],
    device const float* states [[buffer(8)]], device const float* state_grads [[buffer(9)]],
    device float* parts_q [[buffer(10)]], device float* parts_k [[buffer(11)]], device float* gg [[buffer(12)]],
    device float* gbeta [[buffer(13)]], constant DeltaRuleParams& params [[buffer(14)]],
    device const float* factors [[buffer(15)]], device T* gq [[buffer(16)]], device T* gk [[buffer(17)]],
    uint group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup float memory[DELTA_CHUNK * DELTA_CHUNK];
  threadgroup float lengths[2][kChunk];         // of q and k, their inverses
  threadgroup float high[kChunk], low[kChunk];  // the logarithm of d(i)
  threadgroup float since[kChunk], until[kChunk], strengths[kChunk], learned[kChunk];
  // Products of rows and their gradients, by halves: of q, of what is read by k, of y, and of its part in the chunk.
  threadgroup float of_q[2][kChunk], of_k[2][kChunk], carried[2][kChunk], writes[2][kChunk];
  threadgroup float dots[2][kChunk];                         // sums of them over heads
  threadgroup float by_query[2][kChunk], by_key[2][kChunk];  // the parts of of_q and of_k that the state before has
  threadgroup float across[4][kChunk], totals[kChunk];
  threadgroup float overlaps[DELTA_UNIT_THREADS / 32];  // parts of the sum of S D
  const uint lane = thread_index % 32, simdgroup = thread_index / 32;
  const uint key_head = group % params.heads, place = group / params.heads;
  const uint repeats = params.value_heads / params.heads, stride = params.value_heads * kKeys;
  const Span span = chunk_of(ends, params, place);
  const uint count = span.end - span.begin;
  if (count == 0) return;
  q += span.batch * params.q[0] + span.begin * params.q[1] + key_head * params.q[2];
  k += span.batch * params.k[0] + span.begin * params.k[1] + key_head * params.k[2];
  grad += span.batch * params.grad[0] + span.begin * params.grad[1];
  const ulong position = ulong(span.batch) * params.length + span.begin;
  const ulong own_rows = (position * params.heads + key_head) * kKeys;
  auto chunk = metalcore_unit_chunks(memory, q, thread_index, 0);
  chunk.bring_keys(k, params.k[1], count);
  float of_queries[kNumbers];
#pragma unroll 1
  for (uint repeat = 0; repeat < repeats; ++repeat) {
    const uint head = key_head * repeats + repeat;
    const ulong at = position * params.value_heads + head, matrix = ulong(place) * params.value_heads + head;
    chunk.hold_result_grads(grad + head * params.grad[2], params.grad[1], count);
    if (simdgroup == 0) {  // which alone reads these behind the last barrier of the head before
#pragma unroll
      for (uint i = lane; i < kChunk; i += 32) {
        device const float* const own = factors + matrix * DELTA_FACTORS * kChunk + i;
        device const float* const last = own + (kChunk - 1 - i);
        const float strength = i < count ? beta[at + ulong(i) * params.value_heads] : 0.0f;
        since[i] = own[3 * kChunk];
        high[i] = own[4 * kChunk];
        low[i] = own[5 * kChunk];
        until[i] = exp((last[4 * kChunk] - own[4 * kChunk]) + (last[5 * kChunk] - own[5 * kChunk]));
        lengths[0][i] = own[6 * kChunk];
        lengths[1][i] = own[7 * kChunk];
        strengths[i] = strength;
        learned[i] = strength * own[7 * kChunk];
      }
    }
    chunk.bring_errors(errors + at * kKeys, stride, count);
    chunk.bring_value_grads(value_grads + at * kKeys, stride, count);
    chunk.bring_matrix(state_grads + matrix * kKeys * kKeys);
    chunk.wait();
    // What comes from behind the chunk: y.
    float later[kNumbers], of_keys[kNumbers], result_scores[16], value_scores[16];
    chunk.read_by_errors();
    scale_products(&chunk.products[0], until, 1.0f, thread_index);
    find_dots<false>(carried, chunk, lengths[1], thread_index);
#pragma unroll
    for (uint n = 0; n < kNumbers; ++n) later[n] = chunk.products[n];
    chunk.score_result_grads();
#pragma unroll
    for (uint n = 0; n < 16; ++n) result_scores[n] = chunk.scores[n];
    chunk.score_value_grads();
#pragma unroll
    for (uint n = 0; n < 16; ++n) value_scores[n] = chunk.scores[n];
    chunk.wait();
    // What comes from before the chunk.
    chunk.bring_queries(q, params.q[1], count);
    const float overlap = simd_sum(chunk.exchange_matrix(states + matrix * kKeys * kKeys));
    if (lane == 0) overlaps[simdgroup] = overlap;
#pragma unroll
    for (uint n = 0; n < 16; ++n) {
      const uint i = chunk_row(n / 2, thread_index);
      const uint j = thread_index / 128 * 32 + chunk_column(n / 2, thread_index) + n % 2;
      const float decay = exp((high[i] - high[j]) + (low[i] - low[j]));
      result_scores[n] = j <= i ? result_scores[n] * params.scale * decay : 0.0f;
      value_scores[n] = j < i ? -value_scores[n] * decay : 0.0f;
    }
    chunk.wait();
    if (params.has_gate) {
      float pairs[16];
      chunk.score_queries();
#pragma unroll
      for (uint n = 0; n < 16; ++n)
        pairs[n] = result_scores[n] * chunk.scores[n] * lengths[0][chunk_row(n / 2, thread_index)];
      chunk.score_keys();
#pragma unroll
      for (uint n = 0; n < 16; ++n) {
        const uint i = chunk_row(n / 2, thread_index);
        const uint j = thread_index / 128 * 32 + chunk_column(n / 2, thread_index) + n % 2;
        pairs[n] += value_scores[n] * chunk.scores[n] * lengths[1][i];
        pairs[n] = j < i ? pairs[n] * learned[j] : 0.0f;
      }
      sum_across(across, totals, pairs, thread_index);
    }
    chunk.read_by_result_grads();
    scale_products(&chunk.products[0], since, params.scale, thread_index);
    find_dots<true>(by_query, chunk, lengths[0], thread_index);
#pragma unroll
    for (uint n = 0; n < kNumbers; ++n) of_queries[n] = chunk.products[n];
    chunk.read_by_value_grads();
    scale_products(&chunk.products[0], since, -1.0f, thread_index);
    find_dots<false>(by_key, chunk, lengths[1], thread_index);
#pragma unroll
    for (uint n = 0; n < kNumbers; ++n) of_keys[n] = chunk.products[n];
    chunk.wait();
    // What comes from other positions of the chunk.
#pragma unroll
    for (uint n = 0; n < 16; ++n) chunk.scores[n] = result_scores[n];
    chunk.put_scores(0, learned, lengths[0]);
#pragma unroll
    for (uint n = 0; n < 16; ++n) chunk.scores[n] = value_scores[n];
    chunk.put_scores(1, learned, lengths[1]);
    chunk.wait();
#pragma unroll
    for (uint n = 0; n < kNumbers; ++n) chunk.products[n] = of_queries[n];
    chunk.weigh_keys(0);
    find_dots<true>(of_q, chunk, lengths[0], thread_index);
#pragma unroll
    for (uint n = 0; n < kNumbers; ++n) {
      of_queries[n] = chunk.products[n];
      chunk.products[n] = of_keys[n];
    }
    chunk.weigh_keys(1);
    find_dots<false>(of_k, chunk, lengths[1], thread_index);
#pragma unroll
    for (uint n = 0; n < kNumbers; ++n) of_keys[n] = chunk.products[n];
    chunk.weigh_back();
    find_dots<false>(writes, chunk, lengths[1], thread_index);
#pragma unroll
    for (uint n = 0; n < kNumbers; ++n)
      chunk.products[n] = strengths[chunk_row(n / 2, thread_index)] * (later[n] + chunk.products[n]) + of_keys[n];
    // The sums of gradients over heads pass through device memory, where there are several.
    const uint key_stride = params.heads * kKeys;
    if (repeat > 0) {
      add_parts(of_queries, parts_q + own_rows, key_stride, count, thread_index);
      add_parts(&chunk.products[0], parts_k + own_rows, key_stride, count, thread_index);
    }
    if (repeat + 1 < repeats) {
      store_parts(parts_q + own_rows, of_queries, key_stride, count, thread_index);
      store_parts(parts_k + own_rows, &chunk.products[0], key_stride, count, thread_index);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (simdgroup > 0) continue;
    // A lane has two positions beside each other.
    float behind[2];
    float2 sums[2];  // of what is read from before the chunk, and in its first half
#pragma unroll
    for (uint m = 0; m < 2; ++m) {
      const uint i = 2 * lane + m;
      const float of_state = carried[0][i] + carried[1][i], of_beta = of_state + (writes[0][i] + writes[1][i]);
      dots[0][i] = (of_q[0][i] + of_q[1][i]) + (repeat > 0 ? dots[0][i] : 0.0f);
      dots[1][i] = strengths[i] * of_beta + (of_k[0][i] + of_k[1][i]) + (repeat > 0 ? dots[1][i] : 0.0f);
      if (i < count) gbeta[at + ulong(i) * params.value_heads] = of_beta;
      behind[m] = i < count ? strengths[i] * of_state : 0.0f;
      sums[m] = float2((by_query[0][i] + by_query[1][i]) + (by_key[0][i] + by_key[1][i]), totals[i]);
    }
    if (params.has_gate) {
      const float of_states = simd_sum(lane < DELTA_UNIT_THREADS / 32 ? overlaps[lane] * since[kChunk - 1] : 0.0f);
      // The sums before a position, and from it on.
      const float first = behind[0];
      behind[0] = of_states + simd_prefix_exclusive_sum(first + behind[1]);
      behind[1] = behind[0] + first;
      sums[0] += sums[1];
#pragma unroll
      for (ushort step = 1; step < 32; step *= 2) {
        const float2 others = simd_shuffle_down(sums[0], step);
        if (lane + step < 32) sums[0] += others;
      }
      const float2 after = simd_shuffle_down(sums[0], 1);
      if (lane < 31) sums[1] += after;
#pragma unroll
      for (uint m = 0; m < 2; ++m) {
        const uint t = 2 * lane + m;
        const float inside = (across[0][t] + across[1][t]) + (across[2][t] + across[3][t]);
        if (t < count)
          gg[at + ulong(t) * params.value_heads] = behind[m] + (sums[m].x + (inside + (t < 32 ? 0.0f : sums[m].y)));
      }
    }
    if (!params.normalized)
      dots[0][2 * lane] = dots[0][2 * lane + 1] = dots[1][2 * lane] = dots[1][2 * lane + 1] = 0.0f;
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  store_gradients<true>(gq + own_rows, of_queries, chunk, lengths[0], dots[0], params.heads * kKeys, count,
                        thread_index);
  store_gradients<false>(gk + own_rows, &chunk.products[0], chunk, lengths[1], dots[1], params.heads * kKeys, count,
                         thread_index);
}

INSTANTIATE("gated_delta_rule_chunks_unit", "_bfloat", gated_delta_rule_chunks_unit<bfloat>)
