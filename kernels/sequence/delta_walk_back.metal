// The walk back of gated_delta_rule by chunks, with the symbols of delta_chunks.metal, B = diag(beta) and d(·, i), the
// decay from i to the chunk's end. From the gradient D of the state behind a chunk and those of o, these kernels find
// dv and the gradient of the state before the chunk, in which (I + M)^-1 comes as it does forward:
//
//   dv = (I + M)^-T B E     where E = scale Pᵀ do + d(·, i) k D
//   D = d(C) D + scale (d(i) q)ᵀ do - (d(i) k)ᵀ dv
#include "sequence/delta_walk.h"

// scale Pᵀ do of all chunks at once.
template <typename T>
[[kernel]] [[max_total_threads_per_threadgroup(DELTA_THREADS)]] void gated_delta_rule_spread(
    device const T* grad [[buffer(0)]], device const int* ends [[buffer(1)]], device const float* scores [[buffer(2)]],
    device float* value_grads [[buffer(3)]], constant DeltaRuleParams& params [[buffer(4)]],
    uint group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  constexpr uint kColumns = 64, kPitch = kColumns + 16 / sizeof(T);
  alignas(16) threadgroup T grads[kChunk * kPitch];
  const uint simdgroup = thread_index / 32;
  const uint head = group % params.value_heads;
  const Place place = place_of(thread_index % 32);
  const Span span = chunk_of(ends, params, group / params.value_heads);
  const uint count = span.end - span.begin;
  if (count == 0) return;
  const ulong at = (ulong(span.batch) * params.length + span.begin) * params.value_heads + head;
  grad += span.batch * params.grad[0] + span.begin * params.grad[1] + head * params.grad[2];
  for (uint block = 0; block < params.values; block += kColumns) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    fetch_rows<kColumns, kPitch>(grads, grad, params.grad[1], count, block, params.values, params.wide, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    Fragments<float, 2, kColumns / 8> sums;
    clear(sums);
    add_lower<true, kPitch>(sums, scores + ulong(group) * kChunk * kChunk, grads, simdgroup, place);
#pragma unroll
    for (uint m = 0; m < 2; ++m) {
      const uint row = simdgroup * kOwn + m * 8 + place.row;
      device float* to = value_grads + (at + ulong(row) * params.value_heads) * params.values + block + place.column;
#pragma unroll
      for (uint n = 0; n < kColumns / 8; ++n)
        put_pair(to + n * 8, elements(sums.at[m][n]),
                 row < count ? rest_of(block + n * 8 + place.column, params.values) : 0);
    }
  }
}

template <uint KEYS, uint COLUMNS, typename T>
[[kernel]] [[max_total_threads_per_threadgroup(DELTA_PROMISE)]] void gated_delta_rule_walk_back(
    device const T* grad [[buffer(0)]], device const float* grad_state [[buffer(1)]], device const T* q [[buffer(2)]],
    device const T* k [[buffer(3)]], device const float* beta [[buffer(4)]], device const int* ends [[buffer(5)]],
    device const float* inverses [[buffer(6)]], device const float* factors [[buffer(7)]], device T* gv [[buffer(8)]],
    device float* value_grads [[buffer(9)]], device float* kept [[buffer(10)]], device float* state_grad [[buffer(11)]],
    device const float* skip [[buffer(12)]], constant DeltaRuleParams& params [[buffer(13)]],
    uint group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  using W = Walk<KEYS, COLUMNS, T>;
  constexpr uint kColumns = W::kColumns, kPitch = W::kPitch;
  alignas(16) threadgroup T keys[kChunk * W::kSlice];  // or queries
  alignas(16) threadgroup float tile[W::kTiles * W::kTile];
  const uint lane = thread_index % 32, simdgroup = thread_index / 32, own = simdgroup * kOwn;
  const Place place = place_of(lane);
  const uint blocks = (params.values + kColumns - 1) / kColumns;
  const uint head = group / blocks % params.value_heads, sequence = group / blocks / params.value_heads;
  const uint block = group % blocks * kColumns;  // the first column
  const Span span = span_of(ends, params, sequence);
  const uint key_head = head / (params.value_heads / params.heads);
  q += span.batch * params.q[0] + key_head * params.q[2];
  k += span.batch * params.k[0] + key_head * params.k[2];
  grad += span.batch * params.grad[0] + head * params.grad[2];
  const ulong size = ulong(params.keys) * params.values;  // of a state
  const ulong first_state = (ulong(sequence) * params.value_heads + head) * size;
  W walk(block, thread_index);  // columns of D
  walk.load(grad_state + first_state, params.has_state_grad, params);
  for (uint chunks = (span.end - span.begin + kChunk - 1) / kChunk; chunks-- > 0;) {
    const uint begin = span.begin + chunks * kChunk, count = min(kChunk, span.end - begin);
    const ulong chunk = (span.place + chunks) * params.value_heads + head;
    const ulong at = (ulong(span.batch) * params.length + begin) * params.value_heads + head;
    device const float* const own_factors = factors + chunk * DELTA_FACTORS * kChunk;
    device const T* const own_keys = k + begin * params.k[1];
    walk.store(kept + chunk * size, true, params);
    LowerRows inverse_rows;
    if (W::kAhead && params.corrects) inverse_rows.load<true>(inverses + chunk * kChunk * kChunk, simdgroup, place);
    Fragments<float, 2, W::kAcross> found = walk.read(keys, tile, own_keys, params.k[1], count, params, thread_index);
    walk.put(found, tile);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    Fragments<float, 2, kColumns / 8> sums;
    load<kPitch>(sums, tile + own * kPitch);
    scale_rows(sums, own_factors + 2 * kChunk + own, 1.0f, lane);
#pragma unroll
    for (uint m = 0; m < 2; ++m) {
      const uint row = own + m * 8 + place.row;
      const float strength = strength_of(beta + at, row, count, params);
#pragma unroll
      for (uint n = 0; n < kColumns / 8; ++n) {
        const uint column = block + n * 8 + place.column;
        const float2 spread = pair_of(value_grads + (at + ulong(row) * params.value_heads) * params.values + column,
                                      row < count ? rest_of(column, params.values) : 0);
        elements(sums.at[m][n]) = (elements(sums.at[m][n]) + spread) * strength;
      }
    }
    if (params.corrects) {
      store<kPitch>(sums, tile + own * kPitch);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      clear(sums);
      if (W::kAhead)
        inverse_rows.add<true, kPitch>(sums, tile, simdgroup);
      else
        add_lower<true, kPitch>(sums, inverses + chunk * kChunk * kChunk, tile, simdgroup, place);
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
#pragma unroll
    for (uint m = 0; m < 2; ++m) {
      const uint row = own + m * 8 + place.row;
#pragma unroll
      for (uint n = 0; n < kColumns / 8; ++n) {
        const uint column = block + n * 8 + place.column, rest = row < count ? rest_of(column, params.values) : 0;
        const ulong to = (at + ulong(row) * params.value_heads) * params.values + column;
        float2 pair = elements(sums.at[m][n]);
        put_pair(value_grads + to, pair, rest);
        if (params.has_skip)
          pair += pair_of(skip + head * params.values + column, rest) *
                  pair_of(grad + (begin + row) * params.grad[1] + column, rest);
        put_pair(gv + to, pair, rest);
      }
    }
    walk.scale(own_factors[4 * kChunk - 1]);
    if (params.corrects) {
      store<kPitch>(sums, tile + own * kPitch);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      walk.template learn_all<true>(keys, tile, own_factors, -1.0f, own_keys, params.k[1], count, params, thread_index);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    fetch_slice<kColumns, kPitch>(tile, grad + begin * params.grad[1], params.grad[1], count, block, params.values,
                                  params.wide, One(), thread_index);
    walk.template learn_all<false>(keys, tile, own_factors + kChunk, 1.0f, q + begin * params.q[1], params.q[1], count,
                                   params, thread_index);
  }
  walk.store(state_grad + first_state, params.has_state, params);
}

#define INSTANTIATE_BACK(types, T)                                                                \
  INSTANTIATE("gated_delta_rule_spread", types, gated_delta_rule_spread<T>)                       \
  INSTANTIATE("gated_delta_rule_walk_back_128x32", types, gated_delta_rule_walk_back<128, 32, T>) \
  INSTANTIATE("gated_delta_rule_walk_back_128x16", types, gated_delta_rule_walk_back<128, 16, T>) \
  INSTANTIATE("gated_delta_rule_walk_back_256x16", types, gated_delta_rule_walk_back<256, 16, T>)
INSTANTIATE_BACK("_float", float)
INSTANTIATE_BACK("_half", half)
INSTANTIATE_BACK("_bfloat", bfloat)
