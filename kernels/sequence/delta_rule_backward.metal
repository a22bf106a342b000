// The derivative of gated_delta_rule, in which D is the gradient of the state: what kernels do where positions are not
// walked by chunks (delta_chunks_backward.metal), and what is the same in both cases.
//
// The first kernel walks back along a sequence with columns of D, which it keeps behind each chunk, and finds dv.
#include "sequence/delta_state.h"

template <uint ACROSS, uint N, typename T>
[[kernel]] [[max_total_threads_per_threadgroup(DELTA_THREADS)]] void gated_delta_rule_back(
    device const T* grad [[buffer(0)]], device const float* grad_state [[buffer(1)]], device const T* q [[buffer(2)]],
    device const T* k [[buffer(3)]], device const float* g [[buffer(4)]], device const float* beta [[buffer(5)]],
    device const int* ends [[buffer(6)]], device T* gv [[buffer(7)]], device float* value_grads [[buffer(8)]],
    device float* kept [[buffer(9)]], device float* state_grad [[buffer(10)]],
    constant DeltaRuleParams& params [[buffer(11)]], uint group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  using State = Columns<ACROSS, N>;
  constexpr uint kPadded = State::kPadded, kAcross = State::kColumns * kSimdgroups;
  threadgroup float4 keys[DELTA_STEPS * kPadded / 4];
  threadgroup float4 queries[DELTA_STEPS * kPadded / 4];
  const uint lane = thread_index % 32, simdgroup = thread_index / 32;
  const uint blocks = (params.values + kAcross - 1) / kAcross;
  const uint head = group / blocks % params.value_heads, sequence = group / blocks / params.value_heads;
  const uint column = group % blocks * kAcross + simdgroup * State::kColumns + lane % State::kColumns;
  const Span span = span_of(ends, params, sequence);
  const uint key_head = head / (params.value_heads / params.heads);
  q += span.batch * params.q[0] + key_head * params.q[2];
  k += span.batch * params.k[0] + key_head * params.k[2];
  grad += span.batch * params.grad[0] + head * params.grad[2];
  const ulong size = ulong(params.keys) * params.values;  // of a state
  State columns(lane);
  columns.load(grad_state + (ulong(sequence) * params.value_heads + head) * size, params.has_state_grad, params.keys,
               params.values, column);
  for (uint tiles = (span.end - span.begin + DELTA_STEPS - 1) / DELTA_STEPS; tiles > 0; --tiles) {
    const uint first = span.begin + (tiles - 1) * DELTA_STEPS;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    fetch<kPadded>(reinterpret_cast<threadgroup float*>(keys), k, params.k[1], first, span.end, 1.0f, params, simdgroup,
                   lane);
    fetch<kPadded>(reinterpret_cast<threadgroup float*>(queries), q, params.q[1], first, span.end, params.scale, params,
                   simdgroup, lane);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const uint chunk = (first - span.begin) / DELTA_CHUNK;
    if (first + DELTA_STEPS >= span.end || (first + DELTA_STEPS - span.begin) % DELTA_CHUNK == 0)
      columns.store(kept + ((span.place + chunk) * params.value_heads + head) * size, params.keys, params.values,
                    column);
    for (uint i = min(uint(DELTA_STEPS), span.end - first); i-- > 0;) {
      const uint position = first + i;
      const ulong at = (ulong(span.batch) * params.length + position) * params.value_heads + head;
      threadgroup const float4* const key = keys + i * (kPadded / 4);
      columns.add(queries + i * (kPadded / 4),
                  column < params.values ? static_cast<float>(grad[position * params.grad[1] + column]) : 0.0f);
      const float value_grad = beta[at] * columns.product(key);
      if (column < params.values && lane < State::kColumns) {
        gv[at * params.values + column] = static_cast<T>(value_grad);
        value_grads[at * params.values + column] = value_grad;
      }
      columns.add(key, -value_grad);
      if (params.has_gate) columns.scale(exp(g[at]));
    }
  }
  if (params.has_state)
    columns.store(state_grad + (ulong(sequence) * params.value_heads + head) * size, params.keys, params.values,
                  column);
}
INSTANTIATE_TYPES("gated_delta_rule_back", gated_delta_rule_back)

// The gradient of a head's q or k: the sum of those by its heads of v, and through the normalization.
template <typename T>
inline void finish(device const float* parts, device const T* x, device T* gx, constant DeltaRuleParams& params,
                   uint lane) {
  constexpr uint N = DELTA_SIZE / 32;
  float sums[N], values[N], squares = 0.0f, product = 0.0f;
#pragma unroll
  for (uint n = 0; n < N; ++n) {
    const uint i = n * 32 + lane;
    const bool inside = i < params.keys;
    sums[n] = 0.0f;
    for (uint head = 0; head < params.value_heads / params.heads; ++head)
      sums[n] += inside ? parts[ulong(head) * params.keys + i] : 0.0f;
    values[n] = inside && params.normalized ? static_cast<float>(x[i]) : 0.0f;
    squares += values[n] * values[n];
    product += values[n] * sums[n];
  }
  const float factor = params.normalized ? inverse_length(simd_sum(squares)) : 1.0f;
  const float along = simd_sum(product) * factor * factor;
#pragma unroll
  for (uint n = 0; n < N; ++n) {
    if (n * 32 + lane < params.keys) gx[n * 32 + lane] = static_cast<T>(factor * (sums[n] - along * values[n]));
  }
}

// A simdgroup has a position of a head of q and k.
template <typename T>
[[kernel]] [[max_total_threads_per_threadgroup(DELTA_THREADS)]] void gated_delta_rule_keys(
    device const T* q [[buffer(0)]], device const T* k [[buffer(1)]], device const float* parts_q [[buffer(2)]],
    device const float* parts_k [[buffer(3)]], device T* gq [[buffer(4)]], device T* gk [[buffer(5)]],
    constant DeltaRuleParams& params [[buffer(6)]], uint group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  const ulong at = ulong(group) * kSimdgroups + thread_index / 32;
  const uint head = at % params.heads, lane = thread_index % 32;
  const ulong position = at / params.heads, batch = position / params.length;
  if (batch >= params.batch) return;
  const uint i = position % params.length;
  finish(parts_q + at * (params.value_heads / params.heads) * params.keys,
         q + batch * params.q[0] + i * params.q[1] + head * params.q[2], gq + at * params.keys, params, lane);
  finish(parts_k + at * (params.value_heads / params.heads) * params.keys,
         k + batch * params.k[0] + i * params.k[1] + head * params.k[2], gk + at * params.keys, params, lane);
}
INSTANTIATE("gated_delta_rule_keys", "_float", gated_delta_rule_keys<float>)
INSTANTIATE("gated_delta_rule_keys", "_half", gated_delta_rule_keys<half>)
INSTANTIATE("gated_delta_rule_keys", "_bfloat", gated_delta_rule_keys<bfloat>)
