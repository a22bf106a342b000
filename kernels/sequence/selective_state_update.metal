// selective_state_update: one position of a selective state space, whose state is changed in place. Some lanes share
// the states of a channel.
#include "sequence/scan_tile.h"

template <typename T>
inline float number(device const T* numbers, bool wide, long at) {
  return wide ? reinterpret_cast<device const float*>(numbers)[at] : static_cast<float>(numbers[at]);
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
  const uint channel = index % blocks * kChannels + thread_index / LANES;
  const uint head = channel / params.dim, i = channel % params.dim, group = head / params.group_heads;
  const int row = params.has_rows ? rows[batch] : static_cast<int>(batch);
  const bool has_row = row >= 0 && row < static_cast<int>(params.rows), holds = channel < channels;
  float step = 0.0f, input = 0.0f, y = 0.0f;
  if (holds) {
    step = number(steps, params.wide_steps, batch * params.step[0] + head * params.step[1] + i * params.step[2]);
    if (params.has_bias) step += number(bias, params.wide_bias, head * params.bias[0] + i * params.bias[1]);
    if (params.softplus) step = softplus(step);
    input = static_cast<float>(x[batch * params.x[0] + head * params.x[1] + i * params.x[2]]);
  }
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
      if (n >= count) continue;
      if (!params.quads) h[n] = static_cast<float>(state[(begin + n) * params.state[3]]);
      rates[n] = A[(begin + n) * params.A[2]];
      row_B[n] = static_cast<float>(B[(begin + n) * params.B[2]]);
      row_C[n] = static_cast<float>(C[(begin + n) * params.C[2]]);
    }
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
  if (params.has_skip) y += input * number(skip, params.wide_skip, head * params.skip[0] + i * params.skip[1]);
  if (params.has_gate)
    y *=
        Silu<T>::forward(static_cast<float>(gate[batch * params.gate[0] + head * params.gate[1] + i * params.gate[2]]));
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
