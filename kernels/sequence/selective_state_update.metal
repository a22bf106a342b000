// selective_state_update: one position of a selective state space, whose state is changed in place. Some lanes share
// the states of some channels.
#include "common/sums.h"
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

// Four neighbouring states of a row, of which `count` are there. The rest repeats the last one.
template <typename U>
inline float4 four_of(device const U* row, long stride, uint begin, uint count, bool quads) {
  if (quads) return static_cast<float4>(*reinterpret_cast<device const vec<U, 4>*>(row + begin));
  if (stride == 0) return float4(static_cast<float>(row[0]));
  float4 values = float4(0.0f);
#pragma unroll
  for (uint n = 0; n < 4; ++n) values[n] = static_cast<float>(row[(begin + min(n, count - 1)) * stride]);
  return values;
}

// S is the state's type in memory. LANES lanes share a channel, and each has ROWS channels, whose states are on their
// way at once. What a channel has one number of is read by one lane, and so is its result written.
template <uint LANES, uint ROWS, typename T, typename S>
[[kernel]] [[max_total_threads_per_threadgroup(SCAN_THREADS)]] void selective_state_update(
    device S* state [[buffer(0)]], device const T* x [[buffer(1)]], device const T* steps [[buffer(2)]],
    device const float* A [[buffer(3)]], device const T* B [[buffer(4)]], device const T* C [[buffer(5)]],
    device const T* skip [[buffer(6)]], device const T* gate [[buffer(7)]], device const T* bias [[buffer(8)]],
    device const int* rows [[buffer(9)]], device T* out [[buffer(10)]],
    constant SelectiveStateUpdateParams& params [[buffer(11)]], uint index [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  constexpr uint kAcross = 32 / LANES, kOwn = kAcross * ROWS;  // channels of a simdgroup: at once, and all
  constexpr uint kChannels = SCAN_THREADS / 32 * kOwn;
  const uint lane = thread_index % 32, part = lane % LANES, channels = params.heads * params.dim;
  const uint blocks = (channels + kChannels - 1) / kChannels, batch = index / blocks;
  const uint first = index % blocks * kChannels + thread_index / 32 * kOwn;
  const int row = params.has_rows ? rows[batch] : static_cast<int>(batch);
  const bool has_row = row >= 0 && row < static_cast<int>(params.rows);
  // The lane's own channel. Lane i of those that share channels has the channel that lanes_sums() gives it.
  const uint own = first + part * ROWS / LANES * kAcross + lane / LANES;
  const uint channel = min(own, channels - 1), head = channel / params.dim, i = channel % params.dim;
  const float input = static_cast<float>(x[batch * params.x[0] + head * params.x[1] + i * params.x[2]]);
  const float given =
      number(steps, params.wide_steps, batch * params.step[0] + head * params.step[1] + i * params.step[2]);
  const float shift = optional(params.has_bias, bias, params.wide_bias, head * params.bias[0] + i * params.bias[1], x);
  const float factor = optional(params.has_skip, skip, params.wide_skip, head * params.skip[0] + i * params.skip[1], x);
  const float opening =
      optional(params.has_gate, gate, false, batch * params.gate[0] + head * params.gate[1] + i * params.gate[2], x);
  state += has_row ? row * params.state[0] : 0;
  B += batch * params.B[0];
  C += batch * params.C[0];
  float sums[ROWS];
#pragma unroll
  for (uint r = 0; r < ROWS; ++r) sums[r] = 0.0f;
  for (uint begin = part * 4; begin - part * 4 < params.states; begin += LANES * 4) {
    const uint count = min(4u, max(params.states, begin) - begin);
    float4 h[ROWS];
#pragma unroll
    for (uint r = 0; r < ROWS; ++r) {
      const uint at = first + r * kAcross + lane / LANES;
      if (at >= channels || !has_row || count == 0) continue;
      device const S* const states = state + at / params.dim * params.state[1] + at % params.dim * params.state[2];
      h[r] = four_of(states, params.state[3], begin, count, params.quads);
    }
    // Once all states are on their way.
    const float step = params.softplus ? softplus(given + shift) : given + shift;
#pragma unroll
    for (uint r = 0; r < ROWS; ++r) {
      const ushort source = r * LANES / ROWS + lane / LANES * LANES;
      const float row_step = simd_shuffle(step, source), row_input = simd_shuffle(input, source);
      const uint at = first + r * kAcross + lane / LANES;
      if (at >= channels || !has_row || count == 0) continue;
      const uint row_head = at / params.dim, group = row_head / params.group_heads;
      device const float* const row_A = A + row_head * params.A[0] + at % params.dim * params.A[1];
      const float4 rates = four_of(row_A, params.A[2], begin, count, params.quad_rates);
      const float4 row_B = four_of(B + group * params.B[1], params.B[2], begin, count, params.quad_rows);
      const float4 row_C = four_of(C + group * params.C[1], params.C[2], begin, count, params.quad_rows);
      h[r] = decay_of<T>(row_step, rates) * h[r] + row_step * row_input * row_B;
#pragma unroll
      for (uint n = 0; n < 4; ++n) sums[r] += n < count ? h[r][n] * row_C[n] : 0.0f;
    }
#pragma unroll
    for (uint r = 0; r < ROWS; ++r) {
      const uint at = first + r * kAcross + lane / LANES;
      if (at >= channels || !has_row) continue;
      device S* const states = state + at / params.dim * params.state[1] + at % params.dim * params.state[2];
      if (params.quads && count > 0)
        *reinterpret_cast<device vec<S, 4>*>(states + begin) = static_cast<vec<S, 4>>(h[r]);
#pragma unroll
      for (uint n = 0; n < 4; ++n)
        if (!params.quads && n < count) states[(begin + n) * params.state[3]] = static_cast<S>(h[r][n]);
    }
  }
  lanes_sums<LANES, ROWS>(sums, lane);
  if (own >= channels || part % (LANES / ROWS) != 0) return;
  float y = sums[0];
  if (params.has_skip) y += input * factor;
  if (params.has_gate) y *= Silu<T>::forward(opening);
  // Entries with a negative row are padding.
  out[ulong(batch) * channels + own] = static_cast<T>(has_row ? y : row < 0 ? 0.0f : NAN);
}

#define INSTANTIATE_LANES(types, ...)                                                                     \
  INSTANTIATE("selective_state_update_16", types, selective_state_update<4, SCAN_ROWS(4), __VA_ARGS__>)   \
  INSTANTIATE("selective_state_update_64", types, selective_state_update<16, SCAN_ROWS(16), __VA_ARGS__>) \
  INSTANTIATE("selective_state_update_128", types, selective_state_update<32, SCAN_ROWS(32), __VA_ARGS__>)
INSTANTIATE_LANES("_float_float", float, float)
INSTANTIATE_LANES("_half_half", half, half)
INSTANTIATE_LANES("_half_float", half, float)
INSTANTIATE_LANES("_bfloat_bfloat", bfloat, bfloat)
INSTANTIATE_LANES("_bfloat_float", bfloat, float)
