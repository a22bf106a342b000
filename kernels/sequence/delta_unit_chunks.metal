// gated_delta_rule_chunks (delta_chunks_backward.metal, which has the formulas) by units that multiply tensors, for
// heads of 128 bfloats.
#include "sequence/delta_tiles.h"
#include "sequence/delta_unit_chunks.h"

constexpr constant uint kKeys = 128, kNumbers = 32;  // of a thread's products

// The columns of a half's products.
inline uint key_of(uint pair, uint thread_index) { return thread_index / 128 * 64 + chunk_column(pair, thread_index); }

inline void scale_products(thread float* products, threadgroup const float* factors, float factor, uint thread_index) {
#pragma unroll
  for (uint n = 0; n < kNumbers; ++n) products[n] *= factors[chunk_row(n / 2, thread_index)] * factor;
}

// Adds the products of the rows of a half's products, times a sign, and of x, with its inverse lengths.
template <typename T>
inline void add_dots(threadgroup float (*sums)[DELTA_CHUNK], thread const float* products, float sign,
                     device const T* x, long stride, threadgroup const float* lengths, uint count, uint thread_index) {
#pragma unroll
  for (uint m = 0; m < 2; ++m) {
    const uint row = chunk_row(m, thread_index);
    float product = 0.0f;
    if (row < count) {
#pragma unroll
      for (uint pair = m; pair < kNumbers / 2; pair += 2) {
        const vec<T, 2> own = *reinterpret_cast<device const vec<T, 2>*>(x + row * stride + key_of(pair, thread_index));
        product += dot(float2(products[2 * pair], products[2 * pair + 1]), static_cast<float2>(own));
      }
    }
    product += simd_shuffle_xor(product, 1);  // over the lanes of the row
    product += simd_shuffle_xor(product, 2);
    if (thread_index % 4 == 0) sums[thread_index / 128][row] += product * lengths[row] * sign;
  }
}

inline void store_products(device float* to, thread const float* products, uint stride, uint count, uint thread_index) {
#pragma unroll
  for (uint pair = 0; pair < kNumbers / 2; ++pair) {
    const uint row = chunk_row(pair, thread_index);
    if (row < count)
      *reinterpret_cast<device float2*>(to + ulong(row) * stride + key_of(pair, thread_index)) =
          float2(products[2 * pair], products[2 * pair + 1]);
  }
}

template <typename T>
[[kernel]] [[max_total_threads_per_threadgroup(DELTA_UNIT_THREADS)]] void gated_delta_rule_chunks_unit(
    device const T* grad [[buffer(0)]], device const T* q [[buffer(1)]], device const T* k [[buffer(2)]],
    device const float* g [[buffer(3)]], device const float* beta [[buffer(4)]], device const int* ends [[buffer(5)]],
    device const float* errors [[buffer(6)]], device const float* value_grads [[buffer(7)]],
    device const float* states [[buffer(8)]], device const float* state_grads [[buffer(9)]],
    device float* gq [[buffer(10)]], device float* gk [[buffer(11)]], device float* gg [[buffer(12)]],
    device float* gbeta [[buffer(13)]], constant DeltaRuleParams& params [[buffer(14)]],
    uint group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup float memory[DELTA_CHUNK * DELTA_CHUNK];
  threadgroup float lengths[2][kChunk];         // of q and k, their inverses
  threadgroup float high[kChunk], low[kChunk];  // the logarithm of d(i)
  threadgroup float since[kChunk], until[kChunk], strengths[kChunk], learned[kChunk];
  threadgroup float reads[2][kChunk], writes[2][kChunk], carried[2][kChunk];  // products of rows and their gradients
  threadgroup float overlaps[DELTA_UNIT_THREADS / 32];                        // parts of the sum of S D
  const uint lane = thread_index % 32, simdgroup = thread_index / 32;
  const uint head = group % params.value_heads;
  const Span span = chunk_of(ends, params, group / params.value_heads);
  const uint count = span.end - span.begin;
  if (count == 0) return;
  const uint key_head = head / (params.value_heads / params.heads), stride = params.value_heads * kKeys;
  q += span.batch * params.q[0] + span.begin * params.q[1] + key_head * params.q[2];
  k += span.batch * params.k[0] + span.begin * params.k[1] + key_head * params.k[2];
  grad += span.batch * params.grad[0] + span.begin * params.grad[1] + head * params.grad[2];
  const ulong at = (ulong(span.batch) * params.length + span.begin) * params.value_heads + head;
  states += ulong(group) * kKeys * kKeys;
  state_grads += ulong(group) * kKeys * kKeys;
  auto chunk = metalcore_unit_chunks(memory, q, thread_index, 0);
  chunk.bring_keys(k, params.k[1], count);
  chunk.bring_result_grads(grad, params.grad[1], count);
  chunk.bring_errors(errors + at * kKeys, stride, count);
  chunk.bring_matrix(state_grads);
  if (simdgroup < kSimdgroups) measure(lengths[0], lengths[1], q, k, count, params, simdgroup, lane);
  add_gates(high, low, g + at, count, params, thread_index);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (thread_index < kChunk) {
    const float strength = strength_of(beta + at, thread_index, count, params);
    since[thread_index] = exp(high[thread_index] + low[thread_index]);
    until[thread_index] = decay_of(high, low, kChunk - 1, thread_index);
    strengths[thread_index] = strength;
    learned[thread_index] = strength * lengths[1][thread_index];
    for (uint half_index = 0; half_index < 2; ++half_index)
      reads[half_index][thread_index] = writes[half_index][thread_index] = carried[half_index][thread_index] = 0.0f;
  }
  chunk.wait();
  // What comes from behind the chunk: y.
  float later[kNumbers], of_queries[kNumbers], of_keys[kNumbers], result_scores[16];
  chunk.read_by_errors();
  scale_products(&chunk.products[0], until, 1.0f, thread_index);
  add_dots(carried, &chunk.products[0], 1.0f, k, params.k[1], lengths[1], count, thread_index);
#pragma unroll
  for (uint n = 0; n < kNumbers; ++n) later[n] = chunk.products[n];
  chunk.score_result_grads();
#pragma unroll
  for (uint n = 0; n < 16; ++n) result_scores[n] = chunk.scores[n];
  chunk.wait();
  // What comes from before the chunk.
  chunk.bring_matrix(states);
  float overlap = 0.0f;
  if (params.has_gate) {
#pragma unroll 4
    for (uint i = 4 * thread_index; i < kKeys * kKeys; i += 4 * DELTA_UNIT_THREADS)
      overlap += dot(*reinterpret_cast<device const float4*>(states + i),
                     *reinterpret_cast<device const float4*>(state_grads + i));
  }
  overlap = simd_sum(overlap);
  if (lane == 0) overlaps[simdgroup] = overlap;
  chunk.wait();
  chunk.read_by_result_grads();
  scale_products(&chunk.products[0], since, params.scale, thread_index);
#pragma unroll
  for (uint n = 0; n < kNumbers; ++n) of_queries[n] = chunk.products[n];
  chunk.wait();
  chunk.bring_value_grads(value_grads + at * kKeys, stride, count);
  chunk.wait();
  chunk.read_by_value_grads();
  scale_products(&chunk.products[0], since, 1.0f, thread_index);
#pragma unroll
  for (uint n = 0; n < kNumbers; ++n) of_keys[n] = chunk.products[n];
  chunk.score_value_grads();
  chunk.wait();
  // What comes from other positions of the chunk.
  chunk.bring_queries(q, params.q[1], count);
  float value_scores[16];
#pragma unroll
  for (uint n = 0; n < 16; ++n) {
    const uint i = chunk_row(n / 2, thread_index);
    const uint j = thread_index / 128 * 32 + chunk_column(n / 2, thread_index) + n % 2;
    const float decay = j <= i ? decay_of(high, low, i, j) : 0.0f;
    result_scores[n] = j <= i ? result_scores[n] * params.scale * decay : 0.0f;
    value_scores[n] = j < i ? chunk.scores[n] * decay : 0.0f;
    chunk.scores[n] = result_scores[n] * learned[j];
  }
  chunk.put_scores(0);
#pragma unroll
  for (uint n = 0; n < 16; ++n)
    chunk.scores[n] = value_scores[n] * learned[thread_index / 128 * 32 + chunk_column(n / 2, thread_index) + n % 2];
  chunk.put_scores(1);
  chunk.wait();
#pragma unroll
  for (uint n = 0; n < kNumbers; ++n) chunk.products[n] = of_queries[n];
  chunk.template weigh_keys<false>(0);
  add_dots(reads, &chunk.products[0], 1.0f, q, params.q[1], lengths[0], count, thread_index);
  store_products(gq + at * kKeys, &chunk.products[0], stride, count, thread_index);
#pragma unroll
  for (uint n = 0; n < kNumbers; ++n) chunk.products[n] = of_keys[n];
  chunk.template weigh_keys<false>(1);
  add_dots(reads, &chunk.products[0], -1.0f, k, params.k[1], lengths[1], count, thread_index);
#pragma unroll
  for (uint n = 0; n < kNumbers; ++n) of_keys[n] = chunk.products[n];
  chunk.wait();
#pragma unroll
  for (uint n = 0; n < 16; ++n) chunk.scores[n] = result_scores[n] * lengths[0][chunk_row(n / 2, thread_index)];
  chunk.put_scores(0);
#pragma unroll
  for (uint n = 0; n < 16; ++n) chunk.scores[n] = -value_scores[n] * lengths[1][chunk_row(n / 2, thread_index)];
  chunk.put_scores(1);
  chunk.wait();
#pragma unroll
  for (uint n = 0; n < kNumbers; ++n) chunk.products[n] = 0.0f;
  chunk.template weigh_queries<true>(0);
  chunk.template weigh_keys<true>(1);
  add_dots(writes, &chunk.products[0], 1.0f, k, params.k[1], lengths[1], count, thread_index);
#pragma unroll
  for (uint n = 0; n < kNumbers; ++n)
    chunk.products[n] = strengths[chunk_row(n / 2, thread_index)] * (later[n] + chunk.products[n]) - of_keys[n];
  store_products(gk + at * kKeys, &chunk.products[0], stride, count, thread_index);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (thread_index >= count) return;
  const ulong own = at + ulong(thread_index) * params.value_heads;
  gbeta[own] =
      (carried[0][thread_index] + carried[1][thread_index]) + (writes[0][thread_index] + writes[1][thread_index]);
  if (!params.has_gate) return;
  float behind = 0.0f, sum = 0.0f;
#pragma unroll
  for (uint s = 0; s < DELTA_UNIT_THREADS / 32; ++s) behind += overlaps[s];
  behind *= since[kChunk - 1];
  for (uint i = count; i-- > 0;) {
    const float of_state = carried[0][i] + carried[1][i];
    behind += strengths[i] * of_state;
    if (i >= thread_index)
      sum += (reads[0][i] + reads[1][i]) - strengths[i] * (of_state + (writes[0][i] + writes[1][i]));
  }
  gg[own] = behind + sum;
}

INSTANTIATE("gated_delta_rule_chunks_unit", "_bfloat", gated_delta_rule_chunks_unit<bfloat>)
