// The gradients of q, k, g and beta of gated_delta_rule by chunks, with the symbols of delta_chunks.metal and
// delta_walk_back.metal. All chunks are found at once. With w = B u, and products of do and of dv with u in the place
// of scores,
//
//   dq(i) = scale (d(i) S do(i) + sum over j <= i of d(i, j) (do(i) w(j)) k(j))
//   dk(i) = beta(i) y(i) - d(i) S dv(i) - sum over j < i of d(i, j) (dv(i) w(j)) k(j)
//   y(j) = d(·, j) D u(j) + scale sum over i >= j of d(i, j) (do(i) u(j)) q(i) - sum over i > j of d(i, j) (dv(i) u(j))
//   k(i) dbeta(j) = k(j) y(j)
//
// The gradient of g follows from these: with G, the sum of g from the chunk's beginning on, S is exp(G) times a sum of
// terms that have a factor exp(-G) each, so that the gradient of G at a position is q dq + k dk, where the part of dk
// that comes from adding to S, beta y, counts as negative, and at the chunk's last position the sum of S D is added.
#include "sequence/delta_products.h"

// The products of two matrices' elements, of which a thread has some.
inline float overlap_of(device const float* a, device const float* b, uint size, bool wide, uint thread_index) {
  float sum = 0.0f;
  if (wide) {
#pragma unroll 4
    for (uint i = 4 * thread_index; i < size; i += 4 * kThreads)
      sum += dot(*reinterpret_cast<device const float4*>(a + i), *reinterpret_cast<device const float4*>(b + i));
    return sum;
  }
  for (uint i = thread_index; i < size; i += kThreads) sum += a[i] * b[i];
  return sum;
}

// Sums over the positions i >= t > j of `scores`, whose diagonal and upper part are zero, for the thread's position t.
inline float sum_across(threadgroup float* scores, uint thread_index) {
  if (thread_index < kChunk) {
    float sum = 0.0f;  // of the row's elements before the column
    for (uint j = 0; j < kChunk; ++j) {
      const float score = scores[thread_index * kTall + j];
      scores[thread_index * kTall + j] = sum;
      sum += score;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float sum = 0.0f;
  for (uint i = thread_index; i < kChunk; ++i) sum += scores[i * kTall + thread_index];
  return sum;
}

template <typename T, bool WIDE>
[[kernel]] [[max_total_threads_per_threadgroup(DELTA_CHUNK_PROMISE)]] void gated_delta_rule_chunks(
    device const T* grad [[buffer(0)]], device const T* q [[buffer(1)]], device const T* k [[buffer(2)]],
    device const float* g [[buffer(3)]], device const float* beta [[buffer(4)]], device const int* ends [[buffer(5)]],
    device const float* errors [[buffer(6)]], device const float* value_grads [[buffer(7)]],
    device const float* states [[buffer(8)]], device const float* state_grads [[buffer(9)]],
    device float* gq [[buffer(10)]], device float* gk [[buffer(11)]], device float* gg [[buffer(12)]],
    device float* gbeta [[buffer(13)]], constant DeltaRuleParams& params [[buffer(14)]],
    uint group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  // Tiles, or scores and a tile, or what simdgroups sum.
  alignas(16) threadgroup float memory[kMemory];
  threadgroup float lengths[2][kChunk];         // of q and k, their inverses
  threadgroup float high[kChunk], low[kChunk];  // the logarithm of d(i)
  threadgroup float since[kChunk], until[kChunk], strengths[kChunk], learned[kChunk];
  threadgroup float* const scores = memory;
  threadgroup float* const tile = memory + kChunk * kTall;
  const uint lane = thread_index % 32, simdgroup = thread_index / 32;
  const uint head = group % params.value_heads, place = group / params.value_heads;
  const Share share(thread_index);
  const Span span = chunk_of(ends, params, place);
  const uint count = span.end - span.begin;
  if (count == 0) return;
  const uint key_head = head / (params.value_heads / params.heads);
  q += span.batch * params.q[0] + span.begin * params.q[1] + key_head * params.q[2];
  k += span.batch * params.k[0] + span.begin * params.k[1] + key_head * params.k[2];
  grad += span.batch * params.grad[0] + span.begin * params.grad[1] + head * params.grad[2];
  const ulong at = (ulong(span.batch) * params.length + span.begin) * params.value_heads + head;
  const long value_stride = long(params.value_heads) * params.values,
             key_stride = long(params.value_heads) * params.keys;
  errors += at * params.values;
  value_grads += at * params.values;
  gq += at * params.keys;
  gk += at * params.keys;
  states += ulong(group) * params.keys * params.values;
  state_grads += ulong(group) * params.keys * params.values;
  if (simdgroup < kSimdgroups) measure(lengths[0], lengths[1], q, k, count, params, simdgroup, lane);
  add_gates(high, low, g + at, count, params, thread_index);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (thread_index < kChunk) {
    const float strength = strength_of(beta + at, thread_index, count, params);
    since[thread_index] = exp(high[thread_index] + low[thread_index]);
    until[thread_index] = decay_of(high, low, kChunk - 1, thread_index);
    strengths[thread_index] = strength;
    learned[thread_index] = strength * lengths[1][thread_index];
  }
  float overlap = 0.0f, across = 0.0f;
  // Products of the gradients' rows with rows of q and k, of this simdgroup's keys: y k is there before and after the
  // chunk's own positions are added.
  float reads[2] = {}, carried[2] = {}, written[2] = {};
  for (uint first = 0; first < params.keys; first += kRows) {
    const uint rows = min(kRows, params.keys - first);
    const ulong matrix = ulong(first) * params.values;
    if (params.has_gate)
      overlap += overlap_of(states + matrix, state_grads + matrix, rows * params.values, WIDE, thread_index);
    Part learns[2], sums[2];  // y, and what q or v reads
    // What comes from behind the chunk.
    multiply_rows(learns, memory, errors, value_stride, count, state_grads + matrix, params.values, rows, params.values,
                  WIDE, share, thread_index);
    scale_rows(learns, until + share.row, 1.0f, lane);
    add_dots(carried, learns, 1.0f, k, params.k[1], lengths[1], count, first, params.keys, WIDE, share);
    // The gradients of results, and then those of values.
#pragma unroll 1
    for (uint pass = 0; pass < (params.corrects ? 2 : 1); ++pass) {
      const bool of_results = pass == 0;
      const float scale = of_results ? params.scale : 1.0f, sign = of_results ? 1.0f : -1.0f;
      device const T* const x = of_results ? q : k;
      const long stride = of_results ? params.q[1] : params.k[1];
      const long grad_stride = of_results ? params.grad[1] : value_stride;
      multiply_rows(sums, memory, grad, value_grads, of_results, grad_stride, count, states + matrix, params.values,
                    rows, params.values, WIDE, share, thread_index);
      scale_rows(sums, since + share.row, scale, lane);
      if (!params.corrects)
        add_dots(reads, sums, 1.0f, q, params.q[1], lengths[0], count, first, params.keys, WIDE, share);
      Part found[1];
      multiply_rows(found, memory, grad, value_grads, of_results, grad_stride, count, errors, value_stride, count,
                    params.values, WIDE, share, thread_index);
#pragma unroll
      for (uint m = 0; m < 2; ++m) {
#pragma unroll
        for (uint n = 0; n < 4; ++n) {
          const uint later = share.row_of(m), earlier = share.column_of<1>(0, n);
          const float2 pair = elements(found[0].at[m][n]) * scale;
          elements(found[0].at[m][n]) =
              float2(earlier < later + of_results ? pair.x * decay_of(high, low, later, earlier) : 0.0f,
                     earlier + 1 < later + of_results ? pair.y * decay_of(high, low, later, earlier + 1) : 0.0f);
        }
      }
      // Without corrections the products of all pairs of positions are known, and those between which the gate lies are
      // summed by themselves. The difference of all that is read and written would lose what pairs on one side have.
      if (params.has_gate && !params.corrects && first == 0) {
        Part products[1];
        multiply_rows(products, memory, q, params.q[1], count, k, params.k[1], count, params.keys, WIDE, share,
                      thread_index);
#pragma unroll
        for (uint m = 0; m < 2; ++m) {
#pragma unroll
          for (uint n = 0; n < 4; ++n) {
            const uint row = share.row_of(m), column = share.column_of<1>(0, n);
            const float2 factors =
                float2(column < row ? learned[column] : 0.0f, column + 1 < row ? learned[column + 1] : 0.0f);
            elements(products[0].at[m][n]) *= elements(found[0].at[m][n]) * factors * lengths[0][row];
          }
        }
        store_scores(products, scores, share);
        across = sum_across(scores, thread_index);
      }
      store_scores(found, scores, share);
      add_scores<false>(sums, scores, tile, 1.0f, k, params.k[1], count, first, params.keys, WIDE, learned, share,
                        thread_index);
      if (params.corrects)
        add_dots(reads, sums, sign, x, stride, lengths[pass], count, first, params.keys, WIDE, share);
      add_scores<true>(learns, scores, tile, sign, x, stride, count, first, params.keys, WIDE, lengths[pass], share,
                       thread_index);
      if (of_results) put(sums, gq, key_stride, count, first, params.keys, WIDE, share);
    }
    add_dots(written, learns, 1.0f, k, params.k[1], lengths[1], count, first, params.keys, WIDE, share);
    scale_rows(learns, strengths + share.row, 1.0f, lane);
    if (params.corrects) {
#pragma unroll
      for (uint m = 0; m < 2; ++m) {
#pragma unroll
        for (uint n = 0; n < 8; ++n) elements(learns[n / 4].at[m][n % 4]) -= elements(sums[n / 4].at[m][n % 4]);
      }
    }
    put(learns, gk, key_stride, count, first, params.keys, WIDE, share);
  }
  overlap = simd_sum(overlap);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  threadgroup float* const read_sums = memory;
  threadgroup float* const carried_sums = memory + 2 * kChunk;
  threadgroup float* const written_sums = memory + 4 * kChunk;
  threadgroup float* const overlaps = memory + 6 * kChunk;
  if (share.place.column == 0) {
#pragma unroll
    for (uint m = 0; m < 2; ++m) {
      const uint own = share.half * kChunk + share.row_of(m);
      read_sums[own] = reads[m];
      carried_sums[own] = carried[m];
      written_sums[own] = written[m];
    }
  }
  if (lane == 0) overlaps[simdgroup] = overlap;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (thread_index >= count) return;
  const ulong own = at + ulong(thread_index) * params.value_heads;
  if (params.weighted) gbeta[own] = written_sums[thread_index] + written_sums[kChunk + thread_index];
  if (!params.has_gate) return;
  float behind = 0.0f, sum = across;
#pragma unroll
  for (uint s = 0; s < kThreads / 32; ++s) behind += overlaps[s];
  behind *= since[kChunk - 1];
  for (uint i = count; i-- > 0;) {
    const bool later = i >= thread_index;
    const float read = read_sums[i] + read_sums[kChunk + i];
    if (params.corrects || !later) behind += strengths[i] * (carried_sums[i] + carried_sums[kChunk + i]);
    if (later) sum += params.corrects ? read - strengths[i] * (written_sums[i] + written_sums[kChunk + i]) : read;
  }
  gg[own] = behind + sum;
}

#define INSTANTIATE_GRADIENTS(types, T)                                                \
  INSTANTIATE("gated_delta_rule_chunks_wide", types, gated_delta_rule_chunks<T, true>) \
  INSTANTIATE("gated_delta_rule_chunks", types, gated_delta_rule_chunks<T, false>)
INSTANTIATE_GRADIENTS("_float", float)
INSTANTIATE_GRADIENTS("_half", half)
INSTANTIATE_GRADIENTS("_bfloat", bfloat)
