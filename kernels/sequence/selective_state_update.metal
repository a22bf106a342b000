// selective_state_update: one position of a selective state space, whose state is changed in place. Some lanes share
// the states of a channel.
#include "sequence/scan_tile.h"

template <typename T>
inline float number(device const T* numbers, bool wide, long at) {
  return wide ? reinterpret_cast<device const float*>(numbers)[at] : static_cast<float>(numbers[at]);
}

// The same where it is given, else 0. It is read in any case, so that no load waits behind a branch for another one:
// `any` is a place that can be read.
template <typename T>
inline float optional(bool given, device const T* numbers, bool wide, long at, device const T* any) {
  const float found = number(given ? numbers : any, given && wide, given ? at : 0);
  return given ? found : 0.0f;
}

// S is the state's type in memory. With `quads` each lane moves four neighbouring states at once.
template <uint LANES, typename T, typename S>
[[kernel]] [[max_total_threads_per_threadgroup(SCAN_THREADS)]] void selective_state_update(
    device S* state [[buffer(0)]], device const T* x [[buffer(1)]], device const T* steps [[buffer(2)]],
    device const float* A [[buffer(3)]], device const T* B [[buffer(4)]], device const T* C [[buffer(5)]],
    device const T* skip [[buffer(6)]], device const T* gate [[buffer(7)]], device const T* bias [[buffer(8)]],
    device const int* rows [[buffer(9)]], device T* out [[buffer(10)]],
    constant SelectiveStateUpdateParams& params [[buffer(11)]], uint index [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  constexpr uint kChannels = SCAN_THREADS / LANES;
  const uint part = thread_index % LANES, channels = params.heads * params.dim;
  const uint blocks = (channels + kChannels - 1) / kChannels, batch = index / blocks;
  const uint own = index % blocks * kChannels + thread_index / LANES, channel = min(own, channels - 1);
  const uint head = channel / params.dim, i = channel % params.dim, group = head / params.group_heads;
  const int row = params.has_rows ? rows[batch] : static_cast<int>(batch);
  const bool has_row = row >= 0 && row < static_cast<int>(params.rows), holds = own < channels;
  const float input = static_cast<float>(x[batch * params.x[0] + head * params.x[1] + i * params.x[2]]);
  const float shift = optional(params.has_bias, bias, params.wide_bias, head * params.bias[0] + i * params.bias[1], x);
  const float factor = optional(params.has_skip, skip, params.wide_skip, head * params.skip[0] + i * params.skip[1], x);
  const float opening =
      optional(params.has_gate, gate, false, batch * params.gate[0] + head * params.gate[1] + i * params.gate[2], x);
  float y = 0.0f;
  const float given =
      number(steps, params.wide_steps, batch * params.step[0] + head * params.step[1] + i * params.step[2]) + shift;
  state += row * params.state[0] + head * params.state[1] + i * params.state[2];
  A += head * params.A[0] + i * params.A[1];
  B += batch * params.B[0] + group * params.B[1];
  C += batch * params.C[0] + group * params.C[1];
  for (uint begin = part * 4; begin < params.states; begin += LANES * 4) {
    if (!holds || !has_row) break;
    const uint count = min(4u, params.states - begin);
    float4 h = float4(0.0f), rates = float4(0.0f), row_B = float4(0.0f), row_C = float4(0.0f);
    if (params.quads) h = static_cast<float4>(*reinterpret_cast<device const vec<S, 4>*>(state + begin));
#pragma unroll
    for (uint n = 0; n < 4; ++n) {
      const uint at = begin + min(n, count - 1);  // those behind the last are not used
      rates[n] = A[at * params.A[2]];
      row_B[n] = static_cast<float>(B[at * params.B[2]]);
      row_C[n] = n < count ? static_cast<float>(C[at * params.C[2]]) : 0.0f;
    }
#pragma unroll
    for (uint n = 0; n < 4; ++n)
      if (!params.quads && n < count) h[n] = static_cast<float>(state[(begin + n) * params.state[3]]);
    const float step = params.softplus ? softplus(given) : given;  // once all loads are on their way
    h = decay_of<T>(step, rates) * h + step * input * row_B;
    y += sum(h * row_C);
    if (params.quads) *reinterpret_cast<device vec<S, 4>*>(state + begin) = static_cast<vec<S, 4>>(h);
#pragma unroll
    for (uint n = 0; n < 4; ++n)
      if (!params.quads && n < count) state[(begin + n) * params.state[3]] = static_cast<S>(h[n]);
  }
#pragma unroll
  for (ushort across = 1; across < LANES; across *= 2) y += simd_shuffle_xor(y, across);
  if (!holds || part != 0) return;
  if (params.has_skip) y += input * factor;
  if (params.has_gate) y *= Silu<T>::forward(opening);
  // Entries with a negative row are padding.
  out[ulong(batch) * channels + channel] = static_cast<T>(has_row ? y : row < 0 ? 0.0f : NAN);
}

#define INSTANTIATE_LANES(types, ...)                                                      \
  INSTANTIATE("selective_state_update_16", types, selective_state_update<4, __VA_ARGS__>)  \
  INSTANTIATE("selective_state_update_64", types, selective_state_update<16, __VA_ARGS__>) \
  INSTANTIATE("selective_state_update_128", types, selective_state_update<32, __VA_ARGS__>)
INSTANTIATE_LANES("_float_float", float, float)
INSTANTIATE_LANES("_half_half", half, half)
INSTANTIATE_LANES("_half_float", half, float)
INSTANTIATE_LANES("_bfloat_bfloat", bfloat, bfloat)
INSTANTIATE_LANES("_bfloat_float", bfloat, float)
