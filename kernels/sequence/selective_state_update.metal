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

// Four neighbouring states of a row, from `begin` on. Behind the last one it is repeated.
template <typename U>
inline vec<U, 4> four_of(device const U* row, long stride, uint begin, uint states, bool quads) {
  if (quads) return *reinterpret_cast<device const vec<U, 4>*>(row + min(begin, states - 4));
  vec<U, 4> values;
#pragma unroll
  for (uint n = 0; n < 4; ++n) values[n] = row[min(begin + n, states - 1) * stride];
  return values;
}

// The same as words. A compiler that sees elements of 16 bits takes them apart where they are loaded, and waits there.
template <typename S>
struct Words {
  uint2 words;
  Words() = default;
  Words(vec<S, 4> values) : words(as_type<uint2>(values)) {}
  float4 numbers() const { return static_cast<float4>(as_type<vec<S, 4>>(words)); }
};
template <>
struct Words<float> {
  float4 words;
  Words() = default;
  Words(float4 values) : words(values) {}
  float4 numbers() const { return words; }
};

// S is the state's type in memory, where QUADS says that each four states are a vector. LANES lanes share a channel,
// and each has ROWS channels of a head, whose states are on their way at once. What a channel has one number of is read
// by one lane, and so is its result written.
template <uint LANES, uint ROWS, bool QUADS, typename T, typename S>
[[kernel]] [[max_total_threads_per_threadgroup(SCAN_THREADS)]] void selective_state_update(
    device S* state [[buffer(0)]], device const T* x [[buffer(1)]], device const T* steps [[buffer(2)]],
    device const float* A [[buffer(3)]], device const T* B [[buffer(4)]], device const T* C [[buffer(5)]],
    device const T* skip [[buffer(6)]], device const T* gate [[buffer(7)]], device const T* bias [[buffer(8)]],
    device const int* rows [[buffer(9)]], device T* out [[buffer(10)]],
    constant SelectiveStateUpdateParams& params [[buffer(11)]], uint index [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  constexpr uint kAcross = 32 / LANES, kOwn = kAcross * ROWS;  // channels of a simdgroup: at once, and all
  constexpr uint kChannels = SCAN_THREADS / 32 * kOwn;
  const uint lane = thread_index % 32, part = lane % LANES, dim = params.dim;
  const uint blocks = (dim + kChannels - 1) / kChannels, batch = index / blocks / params.heads;
  const uint head = index / blocks % params.heads, group = head / params.group_heads;
  const uint first = index % blocks * kChannels + thread_index / 32 * kOwn;
  if (first >= dim) return;
  // The lane's own channel. Lane i of those that share channels has the channel that lanes_sums() gives it.
  const uint own = first + part * ROWS / LANES * kAcross + lane / LANES, channel = min(own, dim - 1);
  const uint mine = first + lane / LANES;  // the first channel whose states this lane has
  const bool writes = own < dim && part % (LANES / ROWS) == 0;
  out += (ulong(batch) * params.heads + head) * dim + channel;
  const int row = params.has_rows ? rows[batch] : static_cast<int>(batch);
  if (row < 0 || row >= static_cast<int>(params.rows)) {
    if (writes) *out = static_cast<T>(row < 0 ? 0.0f : NAN);  // entries with a negative row are padding
    return;
  }
  state += row * params.state[0] + head * params.state[1];
  const float input = static_cast<float>(x[batch * params.x[0] + head * params.x[1] + channel * params.x[2]]);
  const float given =
      number(steps, params.wide_steps, batch * params.step[0] + head * params.step[1] + channel * params.step[2]);
  const float shift =
      optional(params.has_bias, bias, params.wide_bias, head * params.bias[0] + channel * params.bias[1], x);
  const float factor =
      optional(params.has_skip, skip, params.wide_skip, head * params.skip[0] + channel * params.skip[1], x);
  const float opening = optional(params.has_gate, gate, false,
                                 batch * params.gate[0] + head * params.gate[1] + channel * params.gate[2], x);
  A += head * params.A[0];
  B += batch * params.B[0] + group * params.B[1];
  C += batch * params.C[0] + group * params.C[1];
  const bool one_rate = params.A[2] == 0;  // for all states of a channel
  const float rate = params.states > 0 ? A[channel * params.A[1]] : 0.0f;
  float sums[ROWS];
#pragma unroll
  for (uint r = 0; r < ROWS; ++r) sums[r] = 0.0f;
  for (uint begin = part * 4; begin - part * 4 < params.states; begin += LANES * 4) {
    const uint count = max(params.states, begin) - begin;
    Words<S> words[ROWS];
#pragma unroll
    for (uint r = 0; r < ROWS; ++r) {
      // Others write what a lane without states would read.
      const bool there = begin < params.states && mine + r * kAcross < dim;
      device const S* const states = state + (mine + r * kAcross) * params.state[2];
      if (there && QUADS) words[r] = *reinterpret_cast<device const Words<S>*>(states + begin);
      if (there && !QUADS) words[r] = four_of(states, params.state[3], begin, params.states, false);
    }
    const float4 row_B = static_cast<float4>(four_of(B, params.B[2], begin, params.states, params.quad_rows));
    const float4 row_C = static_cast<float4>(four_of(C, params.C[2], begin, params.states, params.quad_rows));
    const float step = params.softplus ? softplus(given + shift) : given + shift;
    const float decay = one_rate ? Math<T>::exp(step * rate) : step, added = step * input;
#pragma unroll
    for (uint r = 0; r < ROWS; ++r) {
      const ushort source = r * LANES / ROWS + lane / LANES * LANES;
      const float row_decay = simd_shuffle(decay, source), row_added = simd_shuffle(added, source);
      float4 decays = float4(row_decay);
      if (!one_rate)
        decays = decay_of<T>(row_decay, four_of(A + min(mine + r * kAcross, dim - 1) * params.A[1], params.A[2], begin,
                                                params.states, params.quad_rates));
      const float4 h = decays * words[r].numbers() + row_added * row_B;
#pragma unroll
      for (uint n = 0; n < 4; ++n) sums[r] += n < count ? h[n] * row_C[n] : 0.0f;
      if (mine + r * kAcross >= dim) continue;
      const vec<S, 4> values = static_cast<vec<S, 4>>(h);
      device S* const states = state + (mine + r * kAcross) * params.state[2];
      if (QUADS && count > 0) *reinterpret_cast<device Words<S>*>(states + begin) = Words<S>(values);
#pragma unroll
      for (uint n = 0; n < 4; ++n)
        if (!QUADS && n < count) states[(begin + n) * params.state[3]] = values[n];
    }
  }
  lanes_sums<LANES, ROWS>(sums, lane);
  float y = sums[0];
  if (params.has_skip) y += input * factor;
  if (params.has_gate) y *= Silu<T>::forward(opening);
  if (writes) *out = static_cast<T>(y);
}

#define INSTANTIATE_LANES(types, ...)                                                                            \
  INSTANTIATE("selective_state_update_16", types, selective_state_update<4, SCAN_ROWS(4), true, __VA_ARGS__>)    \
  INSTANTIATE("selective_state_update_64", types, selective_state_update<16, SCAN_ROWS(16), true, __VA_ARGS__>)  \
  INSTANTIATE("selective_state_update_128", types, selective_state_update<32, SCAN_ROWS(32), true, __VA_ARGS__>) \
  INSTANTIATE("selective_state_update_any", types, selective_state_update<4, SCAN_ROWS(4), false, __VA_ARGS__>)
INSTANTIATE_LANES("_float_float", float, float)
INSTANTIATE_LANES("_half_half", half, half)
INSTANTIATE_LANES("_half_float", half, float)
INSTANTIATE_LANES("_bfloat_bfloat", bfloat, bfloat)
INSTANTIATE_LANES("_bfloat_float", bfloat, float)
