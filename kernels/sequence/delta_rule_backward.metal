// The derivative of gated_delta_rule, in which D is the gradient of the state: what kernels do where positions are not
// walked by chunks (delta_chunks_backward.metal), and what is the same in both cases.
//
// The first kernel walks back along a sequence with columns of D, which it keeps behind each chunk, and finds dv. Where
// each key has a gate, gated_delta_rule_rows follows (delta_rule_rows.h). The last kernel adds up what heads of v leave
// for one of q and k.
#include "sequence/delta_rule_rows.h"

template <uint ACROSS, uint N, bool BY_CHANNEL, typename T>
[[kernel]] [[max_total_threads_per_threadgroup(DELTA_THREADS)]] void gated_delta_rule_back(
    device const T* grad [[buffer(0)]], device const float* grad_state [[buffer(1)]], device const T* q [[buffer(2)]],
    device const T* k [[buffer(3)]], device const float* g [[buffer(4)]], device const float* beta [[buffer(5)]],
    device const int* ends [[buffer(6)]], device T* gv [[buffer(7)]], device float* value_grads [[buffer(8)]],
    device float* kept [[buffer(9)]], device float* state_grad [[buffer(10)]], device const float* skip [[buffer(11)]],
    constant DeltaRuleParams& params [[buffer(12)]], uint group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  using State = Columns<ACROSS, N>;
  constexpr uint kPadded = State::kPadded, kAcross = State::kColumns * kSimdgroups;
  threadgroup float4 keys[DELTA_STEPS * kPadded / 4];
  threadgroup float4 queries[DELTA_STEPS * kPadded / 4];
  threadgroup float4 decays[BY_CHANNEL ? DELTA_STEPS * kPadded / 4 : 1];
  const uint lane = thread_index % 32, simdgroup = thread_index / 32;
  const uint blocks = (params.values + kAcross - 1) / kAcross;
  const uint head = group / blocks % params.value_heads, sequence = group / blocks / params.value_heads;
  const uint column = group % blocks * kAcross + simdgroup * State::kColumns + lane % State::kLanes;
  const Span span = span_of(ends, params, sequence);
  const uint key_head = head / (params.value_heads / params.heads);
  q += span.batch * params.q[0] + key_head * params.q[2];
  k += span.batch * params.k[0] + key_head * params.k[2];
  grad += span.batch * params.grad[0] + head * params.grad[2];
  const ulong size = ulong(params.keys) * params.values;  // of a state
  const ulong gate_stride = ulong(params.value_heads) * params.keys;
  const ulong first_gate = span.batch * params.length * gate_stride + head * params.keys;
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
    if (BY_CHANNEL)
      fetch_decays<kPadded>(reinterpret_cast<threadgroup float*>(decays), g + first_gate, gate_stride, first, span.end,
                            params, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const uint chunk = (first - span.begin) / DELTA_CHUNK;
    if (first + DELTA_STEPS >= span.end || (first + DELTA_STEPS - span.begin) % DELTA_CHUNK == 0)
      columns.store(kept + ((span.place + chunk) * params.value_heads + head) * size, params.keys, params.values,
                    column);
    for (uint i = min(uint(DELTA_STEPS), span.end - first); i-- > 0;) {
      const uint position = first + i;
      const ulong at = (ulong(span.batch) * params.length + position) * params.value_heads + head;
      threadgroup const float4* const key = keys + i * (kPadded / 4);
      const float2 result_grad = State::of_row(grad + position * params.grad[1] + column, column, params.values);
      columns.add(queries + i * (kPadded / 4), result_grad);
      const float2 value_grad = (params.weighted ? beta[at] : 1.0f) * columns.product(key);
      if (lane < State::kLanes) {
        float2 sum = value_grad;
        if (params.has_skip)
          sum += State::of_row(skip + head * params.values + column, column, params.values) * result_grad;
        State::write(gv + at * params.values + column, sum, column, params.values);
        State::write(value_grads + at * params.values + column, value_grad, column, params.values);
      }
      if (params.corrects) columns.add(key, -value_grad);
      if (BY_CHANNEL)
        columns.scale(decays + i * (kPadded / 4));
      else if (params.has_gate)
        columns.scale(exp(g[at]));
    }
  }
  if (params.has_state)
    columns.store(state_grad + (ulong(sequence) * params.value_heads + head) * size, params.keys, params.values,
                  column);
}
INSTANTIATE_TYPES("gated_delta_rule_back", gated_delta_rule_back, false)
INSTANTIATE_TYPES("gated_delta_rule_back_by_channel", gated_delta_rule_back, true)

#define INSTANTIATE_VALUES(T, types)                                                            \
  INSTANTIATE("gated_delta_rule_rows_64", types, gated_delta_rule_rows<DELTA_ROWS(64), 2, T>)   \
  INSTANTIATE("gated_delta_rule_rows_128", types, gated_delta_rule_rows<DELTA_ROWS(128), 4, T>) \
  INSTANTIATE("gated_delta_rule_rows_256", types, gated_delta_rule_rows<DELTA_ROWS(256), 8, T>)
INSTANTIATE_VALUES(float, "_float")
INSTANTIATE_VALUES(half, "_half")
INSTANTIATE_VALUES(bfloat, "_bfloat")

// The gradient of a head's q or k: the sum of those by its heads of v, and through the normalization. A lane has some
// quads of the keys.
template <typename T>
struct KeyGradient {
  static constexpr constant uint kQuads = DELTA_SIZE / 128;

  float4 sums[kQuads], values[kQuads];

  // The elements that `row` has of quad `at`.
  template <typename U>
  static float4 quad_of(device const U* row, uint at, constant DeltaRuleParams& params) {
    if (params.wide)
      return 4 * at < params.keys ? static_cast<float4>(reinterpret_cast<device const vec<U, 4>*>(row)[at]) : 0.0f;
    float4 quad = float4(0.0f);
#pragma unroll
    for (uint i = 0; i < 4; ++i)
      if (4 * at + i < params.keys) quad[i] = static_cast<float>(row[4 * at + i]);
    return quad;
  }
  void load(device const float* parts, device const T* x, constant DeltaRuleParams& params, uint lane) {
#pragma unroll
    for (uint n = 0; n < kQuads; ++n) {
      sums[n] = quad_of(parts, n * 32 + lane, params);
      values[n] = params.normalized ? quad_of(x, n * 32 + lane, params) : 0.0f;
    }
    for (uint head = 1; head < params.value_heads / params.heads; ++head) {
      parts += params.keys;
#pragma unroll
      for (uint n = 0; n < kQuads; ++n) sums[n] += quad_of(parts, n * 32 + lane, params);
    }
  }
  void store(device T* gx, constant DeltaRuleParams& params, uint lane) const {
    float squares = 0.0f, product = 0.0f;
#pragma unroll
    for (uint n = 0; n < kQuads; ++n) {
      squares += dot(values[n], values[n]);
      product += dot(values[n], sums[n]);
    }
    const float factor = params.normalized ? inverse_length(simd_sum(squares)) : 1.0f;
    const float along = simd_sum(product) * factor * factor;
#pragma unroll
    for (uint n = 0; n < kQuads; ++n) {
      const uint at = 4 * (n * 32 + lane);
      const vec<T, 4> quad = static_cast<vec<T, 4>>(factor * (sums[n] - along * values[n]));
      if (params.wide && at < params.keys) *reinterpret_cast<device vec<T, 4>*>(gx + at) = quad;
#pragma unroll
      for (uint i = 0; i < 4; ++i)
        if (!params.wide && at + i < params.keys) gx[at + i] = quad[i];
    }
  }
};

// A simdgroup has a position of a head of q and k.
template <typename T>
[[kernel]] [[max_total_threads_per_threadgroup(DELTA_THREADS)]] void gated_delta_rule_keys(
    device const T* q [[buffer(0)]], device const T* k [[buffer(1)]], device const float* parts_q [[buffer(2)]],
    device const float* parts_k [[buffer(3)]], device const float* beta_parts [[buffer(4)]], device T* gq [[buffer(5)]],
    device T* gk [[buffer(6)]], device float* gbeta [[buffer(7)]], constant DeltaRuleParams& params [[buffer(8)]],
    uint group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  const uint at = group * kSimdgroups + thread_index / 32, head = at % params.heads, lane = thread_index % 32;
  const uint position = at / params.heads, batch = position / params.length, i = position % params.length;
  if (batch >= params.batch) return;
  const uint repeats = params.value_heads / params.heads;
  const ulong first = ulong(at) * repeats * params.keys, own = ulong(at) * params.keys;
  KeyGradient<T> of_q, of_k;
  of_q.load(parts_q + first, q + batch * params.q[0] + i * params.q[1] + head * params.q[2], params, lane);
  of_k.load(parts_k + first, k + batch * params.k[0] + i * params.k[1] + head * params.k[2], params, lane);
  of_q.store(gq + own, params, lane);
  of_k.store(gk + own, params, lane);
  // Threadgroups for some rows each have found parts of beta's gradients.
  for (ulong each = ulong(at) * repeats; params.by_channel && params.weighted && each < (ulong(at) + 1) * repeats;
       ++each) {
    const float part = lane < params.row_blocks ? beta_parts[each * params.row_blocks + lane] : 0.0f;
    const float sum = simd_sum(part);
    if (lane == 0) gbeta[each] = sum;
  }
}
INSTANTIATE("gated_delta_rule_keys", "_float", gated_delta_rule_keys<float>)
INSTANTIATE("gated_delta_rule_keys", "_half", gated_delta_rule_keys<half>)
INSTANTIATE("gated_delta_rule_keys", "_bfloat", gated_delta_rule_keys<bfloat>)
