// The next positions of layers that keep a state, as models generate: one program, since models call both in turn.
#include "sequence/conv1d_vectors.h"
#include "sequence/delta_state.h"
#include "sequence/delta_step.h"

// causal_conv1d_update: the next positions of causal_conv1d, whose state is changed in place. A thread has a channel.
// It holds the last positions of the state in registers, which are all that most states keep.
template <uint M, typename T>
kernel void causal_conv1d_update(device const T* x [[buffer(0)]], device T* state [[buffer(1)]],
                                 device const uchar* weight [[buffer(2)]], device const uchar* bias [[buffer(3)]],
                                 device const int* counts [[buffer(4)]], device const int* rows [[buffer(5)]],
                                 device T* y [[buffer(6)]], constant CausalConv1dUpdateParams& params [[buffer(7)]],
                                 uint2 at [[thread_position_in_grid]]) {
  const uint channel = at.x, batch = at.y;
  const int length = static_cast<int>(params.length), kept = static_cast<int>(params.state_length);
  const int row = params.has_rows ? rows[batch] : static_cast<int>(batch);
  x += batch * params.x[0] + channel * params.x[1];
  y += batch * params.out[0] + channel * params.out[1];
  if (row < 0 || row >= static_cast<int>(params.states)) {
    for (int t = 0; t < length; ++t) y[t * params.out[2]] = static_cast<T>(row < 0 ? 0.0f : NAN);
    return;
  }
  state += row * params.state[0] + channel * params.state[1];
  const long stride = params.state[2];
  const int begin = params.is_ring ? (counts[batch] % kept + kept) % kept : 0;
  const Window<M> weights = weights_of<M, T>(weight, params.wide, params.width, channel);
  const float addend = params.has_bias ? parameter_at<T>(bias, params.wide, channel) : 0.0f;
  Window<M> window;
#pragma unroll
  for (int s = 0; s < static_cast<int>(M); ++s) {
    const int place = kept - 1 - s;
    window.value[s] = place >= 0 ? static_cast<float>(state[(begin + place) % kept * stride]) : 0.0f;
  }
  for (int t = 0; t < length; ++t) {
    const T next = x[t * params.x[2]];
    window.push(static_cast<float>(next));
    const float sum = window.product(weights, params.width, addend);
    y[t * params.out[2]] = static_cast<T>(params.silu ? Silu<T>::forward(sum) : sum);
    if (params.is_ring) state[(begin + t) % kept * stride] = next;
  }
  if (params.is_ring) return;
  for (int i = 0; i < kept - static_cast<int>(M); ++i)
    state[i * stride] = i + length < kept ? state[(i + length) * stride] : x[(i + length - kept) * params.x[2]];
#pragma unroll
  for (int s = 0; s < static_cast<int>(M); ++s)
    if (s < kept) state[(kept - 1 - s) * stride] = static_cast<T>(window.value[s]);
}

INSTANTIATE_CONV1D("causal_conv1d_update", causal_conv1d_update)

// One new position, and states that keep `kept` positions side by side: a thread has the channels of a word of x, and
// reads and writes words.
template <uint kept, typename T>
[[kernel]] void causal_conv1d_step(device const T* x [[buffer(0)]], device T* state [[buffer(1)]],
                                   device const uchar* weight [[buffer(2)]], device const uchar* bias [[buffer(3)]],
                                   device const int* rows [[buffer(4)]], device T* y [[buffer(5)]],
                                   constant CausalConv1dUpdateParams& params [[buffer(6)]],
                                   uint2 at [[thread_position_in_grid]]) {
  constexpr uint N = Word<T>::kCount;
  const uint channel = at.x * N, batch = at.y;
  const int row = params.has_rows ? rows[batch] : static_cast<int>(batch);
  x += batch * params.x[0] + channel;
  y += batch * params.out[0] + channel;
  float results[N], numbers[N];
  if (row < 0 || row >= static_cast<int>(params.states)) {
#pragma unroll
    for (uint n = 0; n < N; ++n) results[n] = row < 0 ? 0.0f : NAN;
    put<N>(y, results);
    return;
  }
  state += row * params.state[0] + channel * kept;
  const Neighbours<N, T> next(x, true);
  Neighbours<N, T> words[kept];
#pragma unroll
  for (uint i = 0; i < kept; ++i) words[i] = Neighbours<N, T>(state + i * N, true);
  float before[N * kept], after[N * kept];
#pragma unroll
  for (uint i = 0; i < kept; ++i) words[i].spread(before + i * N);
  next.spread(numbers);
#pragma unroll
  for (uint n = 0; n < N; ++n) {
    const Taps taps = taps_of<T>(weight, bias, params, params.width, channel + n);
    float window[kWindow] = {numbers[n]};
#pragma unroll
    for (uint s = 1; s < kWindow; ++s) window[s] = before[n * kept + kept - s];
#pragma unroll
    for (uint i = 0; i < kept; ++i) after[n * kept + i] = i + 1 < kept ? before[n * kept + i + 1] : numbers[n];
    results[n] = activated<T>(taps.product(window, params.width), params.silu);
  }
#pragma unroll
  for (uint i = 0; i < kept; ++i) {
    float part[N];
#pragma unroll
    for (uint n = 0; n < N; ++n) part[n] = after[i * N + n];
    put<N>(state + i * N, part);
  }
  put<N>(y, results);
}

#define INSTANTIATE_STEPS(types, T)                                    \
  INSTANTIATE("causal_conv1d_step_3", types, causal_conv1d_step<3, T>) \
  INSTANTIATE("causal_conv1d_step_4", types, causal_conv1d_step<4, T>)
INSTANTIATE_STEPS("_float", float)
INSTANTIATE_STEPS("_half", half)
INSTANTIATE_STEPS("_bfloat", bfloat)

// gated_delta_rule for one position, as models generate. A threadgroup has some neighbouring columns of a head's state
// (delta_state.h), and all that it needs of them is one pass: what the state gives for q follows from what it gave
// before the position.
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
