// gated_delta_rule: a simdgroup walks along a sequence with some columns of a head's state (delta_state.h).
#include "sequence/delta_state.h"

template <uint ACROSS, uint N, bool BY_CHANNEL, typename T>
[[kernel]] [[max_total_threads_per_threadgroup(DELTA_THREADS)]] void gated_delta_rule(
    device const T* q [[buffer(0)]], device const T* k [[buffer(1)]], device const T* v [[buffer(2)]],
    device const float* g [[buffer(3)]], device const float* beta [[buffer(4)]], device const int* ends [[buffer(5)]],
    device const float* state [[buffer(6)]], device T* out [[buffer(7)]], device float* final_state [[buffer(8)]],
    device float* errors [[buffer(9)]], device float* kept [[buffer(10)]], device const float* skip [[buffer(11)]],
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
  const bool writes = lane < State::kLanes;
  const Span span = span_of(ends, params, sequence);
  const uint key_head = head / (params.value_heads / params.heads);
  q += span.batch * params.q[0] + key_head * params.q[2];
  k += span.batch * params.k[0] + key_head * params.k[2];
  v += span.batch * params.v[0] + head * params.v[2];
  const ulong size = ulong(params.keys) * params.values;  // of a state
  const ulong gate_stride = ulong(params.value_heads) * params.keys;
  const ulong first_gate = span.batch * params.length * gate_stride + head * params.keys;
  State columns(lane);
  columns.load(state + (ulong(sequence) * params.value_heads + head) * size, params.has_state, params.keys,
               params.values, column);
  for (uint first = span.begin; first < span.end; first += DELTA_STEPS) {
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
    if (params.for_derivative && (first - span.begin) % DELTA_CHUNK == 0)
      columns.store(kept + ((span.place + chunk) * params.value_heads + head) * size, params.keys, params.values,
                    column);
    for (uint i = 0; i < min(uint(DELTA_STEPS), span.end - first); ++i) {
      const uint position = first + i;
      const ulong at = (ulong(span.batch) * params.length + position) * params.value_heads + head;
      const float2 value = State::of_row(v + position * params.v[1] + column, column, params.values);
      threadgroup const float4* const key = keys + i * (kPadded / 4);
      if (BY_CHANNEL)
        columns.scale(decays + i * (kPadded / 4));
      else if (params.has_gate)
        columns.scale(exp(g[at]));
      const float2 error = params.corrects ? value - columns.product(key) : value;
      columns.add(key, params.weighted ? beta[at] * error : error);
      float2 result = columns.product(queries + i * (kPadded / 4));
      if (params.has_skip) result += State::of_row(skip + head * params.values + column, column, params.values) * value;
      if (writes && params.for_derivative)
        State::write(errors + at * params.values + column, error, column, params.values);
      if (writes && !params.for_derivative)
        State::write(out + at * params.values + column, result, column, params.values);
    }
  }
  if (!params.for_derivative)
    columns.store(final_state + (ulong(sequence) * params.value_heads + head) * size, params.keys, params.values,
                  column);
}

INSTANTIATE_TYPES("gated_delta_rule", gated_delta_rule, false)
INSTANTIATE_TYPES("gated_delta_rule_by_channel", gated_delta_rule, true)
