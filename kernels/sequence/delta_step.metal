// gated_delta_rule for one position, as models generate. A threadgroup has some neighbouring columns of a head's state
// (delta_state.h), and all that it needs of them is one pass: what the state gives for q follows from what it gave
// before the position.
#include "sequence/delta_state.h"
#include "sequence/delta_step.h"

template <uint KEYS, typename T>
[[kernel]] [[max_total_threads_per_threadgroup(DELTA_THREADS)]] void gated_delta_rule_step(
    device const T* q [[buffer(0)]], device const T* k [[buffer(1)]], device const T* v [[buffer(2)]],
    device const float* g [[buffer(3)]], device const float* beta [[buffer(4)]],
    device const float4* state [[buffer(5)]], device T* out [[buffer(6)]], device float4* final_state [[buffer(7)]],
    device const float* skip [[buffer(8)]], constant DeltaRuleParams& params [[buffer(9)]],
    uint group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  constexpr uint kLanes = DELTA_STEP_LANES(KEYS), N = DELTA_STEP_ROWS;
  constexpr uint kParts = DELTA_THREADS / kLanes;  // of the rows: those of a thread are so far apart
  constexpr uint kLaneParts = 32 / kLanes;         // … in a simdgroup
  threadgroup float4 given[KEYS];                  // of a row: the numbers of k and of q, and the decay
  threadgroup float4 parts[2][kSimdgroups][kLanes];
  const uint lane = thread_index % 32, simdgroup = thread_index / 32, quad = lane % kLanes;
  const uint part = simdgroup * kLaneParts + lane / kLanes, keys = params.keys, quads = params.values / 4;
  const uint blocks = (quads + kLanes - 1) / kLanes;
  const uint head = group / blocks % params.value_heads, sequence = group / blocks / params.value_heads;
  const uint column = group % blocks * kLanes + quad, at = sequence * params.value_heads + head;  // column: of quads
  const bool inside = column < quads;
  const uint key_head = head / (params.value_heads / params.heads);
  q += sequence * params.q[0] + key_head * params.q[2];
  k += sequence * params.k[0] + key_head * params.k[2];
  v += sequence * params.v[0] + head * params.v[2] + column * 4;
  const ulong first = (ulong(at) * keys + part) * quads + column;
  state += first;
  final_state += first;
  float4 rows[N];
#pragma unroll
  for (uint n = 0; n < N; ++n, state += kParts * quads)
    rows[n] = params.has_state && inside && part + n * kParts < keys ? *state : float4(0.0f);
  // All loads are on their way before a thread waits for one.
  constexpr uint kOwn = KEYS / 32;
  T own_keys[kOwn], own_queries[kOwn], own_values[4];
#pragma unroll
  for (uint n = 0; n < kOwn; ++n) {
    const uint row = n * 32 + lane;
    own_keys[n] = row < keys ? k[row] : static_cast<T>(0.0f);
    own_queries[n] = row < keys ? q[row] : static_cast<T>(0.0f);
  }
#pragma unroll
  for (uint i = 0; i < 4; ++i) own_values[i] = inside ? v[i] : static_cast<T>(0.0f);
  const float strength = params.weighted ? beta[at] : 1.0f;
  const float gate = params.has_gate && !params.by_channel ? g[at] : 0.0f;
  // Each simdgroup finds the products of k and q.
  float products[3] = {};
#pragma unroll
  for (uint n = 0; n < kOwn; ++n) {
    const uint row = n * 32 + lane;
    const float key = static_cast<float>(own_keys[n]), query = static_cast<float>(own_queries[n]);
    products[0] += key * query;
    products[1] += key * key;
    products[2] += query * query;
    if (n % kSimdgroups == simdgroup)
      given[row] = float4(key, query, exp(params.by_channel && row < keys ? g[ulong(at) * keys + row] : gate), 0.0f);
  }
  const float both = simd_sum(products[0]);
  const float key_factor = params.normalized ? inverse_length(simd_sum(products[1])) : 1.0f;
  const float query_factor = params.scale * (params.normalized ? inverse_length(simd_sum(products[2])) : 1.0f);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float4 found[2] = {float4(0.0f), float4(0.0f)};  // for k and for q
#pragma unroll
  for (uint n = 0; n < N; ++n) {
    const float4 of_row = given[part + n * kParts];
    rows[n] *= of_row.z;
    found[0] += of_row.x * rows[n];
    found[1] += of_row.y * rows[n];
  }
#pragma unroll
  for (uint i = 0; i < 2; ++i) {
#pragma unroll
    for (ushort step = kLanes; step < 32; step *= 2) found[i] += simd_shuffle_xor(found[i], step);
    if (lane < kLanes) parts[i][simdgroup][lane] = found[i];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
  for (uint i = 0; i < 2; ++i) {
    found[i] = parts[i][0][quad];
#pragma unroll
    for (uint n = 1; n < kSimdgroups; ++n) found[i] += parts[i][n][quad];
  }
  if (!inside) return;
  float4 value;
#pragma unroll
  for (uint i = 0; i < 4; ++i) value[i] = static_cast<float>(own_values[i]);
  const float4 error = params.corrects ? value - key_factor * found[0] : value;
  const float4 added = strength * error * key_factor;
#pragma unroll
  for (uint n = 0; n < N; ++n, final_state += kParts * quads)
    if (part + n * kParts < keys) *final_state = rows[n] + given[part + n * kParts].x * added;
  if (part != 0) return;
  const float4 result = query_factor * (found[1] + both * added);
  out += (ulong(at) * quads + column) * 4;
#pragma unroll
  for (uint i = 0; i < 4; ++i)
    out[i] = static_cast<T>(params.has_skip ? result[i] + skip[(head * quads + column) * 4 + i] * value[i] : result[i]);
}

#define INSTANTIATE_STEP(types, ...)                                                       \
  INSTANTIATE("gated_delta_rule_step_64", types, gated_delta_rule_step<64, __VA_ARGS__>)   \
  INSTANTIATE("gated_delta_rule_step_128", types, gated_delta_rule_step<128, __VA_ARGS__>) \
  INSTANTIATE("gated_delta_rule_step_256", types, gated_delta_rule_step<256, __VA_ARGS__>)
INSTANTIATE_STEP("_float", float)
INSTANTIATE_STEP("_half", half)
INSTANTIATE_STEP("_bfloat", bfloat)
