// selective_state_update: one position of a selective state space, whose state is changed in place. Some lanes share
// the states of some channels.
#include "sequence/state_update.h"

// S is the state's type in memory. LANES lanes share a channel, and each has some neighbouring states of ROWS channels
// of a head, all on their way at once. VECTORS says that a lane's states, and what A, B and C have for them, are whole
// vectors; else there are 4, one by one. SHARED says that all states of a channel have one rate. What a channel has one
// number of is read by one lane, and so is its result written.
template <uint LANES, uint ROWS, bool VECTORS, bool SHARED, typename T, typename S>
[[kernel]] [[max_total_threads_per_threadgroup(SCAN_THREADS)]] void selective_state_update(
    device S* state [[buffer(0)]], device const T* x [[buffer(1)]], device const T* steps [[buffer(2)]],
    device const float* A [[buffer(3)]], device const T* B [[buffer(4)]], device const T* C [[buffer(5)]],
    device const T* skip [[buffer(6)]], device const T* gate [[buffer(7)]], device const T* bias [[buffer(8)]],
    device const int* rows [[buffer(9)]], device T* out [[buffer(10)]],
    constant SelectiveStateUpdateParams& params [[buffer(11)]], uint3 place [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  constexpr uint kAcross = 32 / LANES, kOwn = kAcross * ROWS;  // channels of a simdgroup: at once, and all
  constexpr uint kQuads = VECTORS ? kPackVectors<S> : 1, kStates = kQuads * 4;  // of a lane
  const uint lane = thread_index % 32, part = lane % LANES, dim = params.dim, head = place.y, batch = place.z;
  const uint first = (place.x * (SCAN_THREADS / 32) + thread_index / 32) * kOwn;
  if (first >= dim) return;
  const int row = params.has_rows ? rows[batch] : static_cast<int>(batch);
  // The lane's own channel. Lane i of those that share channels has the channel that lanes_sums() gives it.
  const uint own = first + part * ROWS / LANES * kAcross + lane / LANES, channel = min(own, dim - 1);
  const bool writes = own < dim && part % (LANES / ROWS) == 0;
  out += (ulong(batch) * params.heads + head) * dim + channel;
  if (row < 0 || row >= static_cast<int>(params.rows)) {
    if (writes) *out = static_cast<T>(row < 0 ? 0.0f : NAN);  // entries with a negative row are padding
    return;
  }
  const uint group = head / params.group_heads, mine = first + lane / LANES;  // mine: the first of the lane's channels
  const uint distance = params.state[2];                                      // of channels
  state += row * params.state[0] + head * params.state[1] + mine * params.state[2];
  A += head * params.A[0];
  B += batch * params.B[0] + group * params.B[1];
  C += batch * params.C[0] + group * params.C[1];
  float input = 0.0f, factor = 0.0f, opening = 0.0f;
  float sums[ROWS];
#pragma unroll
  for (uint r = 0; r < ROWS; ++r) sums[r] = 0.0f;
  uint begin = part * kStates;
  for (uint done = 0; done == 0 || done < params.states; done += LANES * kStates, begin += LANES * kStates) {
    const bool holds = begin < params.states;
    Pack<S> packs[ROWS];
    Quad<float> rates[SHARED ? 1 : ROWS][kQuads];
    Quad<T> quads_B[kQuads], quads_C[kQuads];
#pragma unroll
    for (uint r = 0; r < ROWS; ++r) {
      // Others write what a lane without states would read.
      packs[r].words = uint4(0u);
      if (!holds || mine + r * kAcross >= dim) continue;
      if (VECTORS)
        packs[r] = *reinterpret_cast<device const Pack<S>*>(state + (r * kAcross * distance + begin));
      else
        packs[r].words =
            in_pack(quad_of<false>(state + r * kAcross * params.state[2], params.state[3], begin, params.states));
    }
#pragma unroll
    for (uint i = 0; i < kQuads; ++i) {
      quads_B[i] = quad_of<VECTORS>(B, params.B[2], begin + i * 4, params.states);
      quads_C[i] = quad_of<VECTORS>(C, params.C[2], begin + i * 4, params.states);
    }
    if (!SHARED) {
#pragma unroll
      for (uint r = 0; r < ROWS; ++r)
#pragma unroll
        for (uint i = 0; i < kQuads; ++i)
          rates[r][i] = quad_of<VECTORS>(A + min(mine + r * kAcross, dim - 1) * params.A[1], params.A[2], begin + i * 4,
                                         params.states);
    }
    input = static_cast<float>(x[batch * params.x[0] + head * params.x[1] + channel * params.x[2]]);
    const float given =
        number(steps, params.wide_steps, batch * params.step[0] + head * params.step[1] + channel * params.step[2]);
    const float shift =
        optional(params.has_bias, bias, params.wide_bias, head * params.bias[0] + channel * params.bias[1], x);
    factor = optional(params.has_skip, skip, params.wide_skip, head * params.skip[0] + channel * params.skip[1], x);
    opening = optional(params.has_gate, gate, false,
                       batch * params.gate[0] + head * params.gate[1] + channel * params.gate[2], x);
    const float rate = SHARED && params.states > 0 ? A[channel * params.A[1]] : 0.0f;
    const float step = params.softplus ? softplus(given + shift) : given + shift;
    const float decay = SHARED ? Math<T>::exp(step * rate) : step, added = step * input;
    float4 row_B[kQuads], row_C[kQuads];
#pragma unroll
    for (uint i = 0; i < kQuads; ++i) row_B[i] = quads_B[i].numbers(), row_C[i] = quads_C[i].numbers();
#pragma unroll
    for (uint r = 0; r < ROWS; ++r) {
      const ushort source = r * LANES / ROWS + lane / LANES * LANES;
      const float row_decay = simd_shuffle(decay, source), row_added = simd_shuffle(added, source);
      float4 h[kPackVectors<S>];
      unpack(packs[r], h);
      float sum = sums[r];
#pragma unroll
      for (uint i = 0; i < kQuads; ++i) {
        h[i] = row_added * row_B[i] +
               (SHARED ? float4(row_decay) : decay_of<T>(row_decay, rates[SHARED ? 0 : r][i].numbers())) * h[i];
#pragma unroll
        for (uint n = 0; n < 4; ++n)
          if (VECTORS || begin + n < params.states) sum = fma(h[i][n], row_C[i][n], sum);
      }
      if (!holds) continue;
      sums[r] = sum;
      if (mine + r * kAcross >= dim) continue;
      if (VECTORS) *reinterpret_cast<device Pack<S>*>(state + (r * kAcross * distance + begin)) = packed<S>(h);
#pragma unroll
      for (uint n = 0; n < 4; ++n)
        if (!VECTORS && begin + n < params.states)
          state[r * kAcross * params.state[2] + (begin + n) * params.state[3]] = static_cast<S>(h[0][n]);
    }
  }
  lanes_sums<LANES, ROWS>(sums, lane);
  float y = sums[0];
  if (params.has_skip) y += input * factor;
  if (params.has_gate) y *= Silu<T>::forward(opening);
  if (writes) *out = static_cast<T>(y);
}

#define INSTANTIATE_UPDATE(size, types, LANES, shared, ...) \
  INSTANTIATE("selective_state_update_" size, types,        \
              selective_state_update<LANES, UPDATE_ROWS(LANES, shared), true, shared, __VA_ARGS__>)
#define INSTANTIATE_LANES(types, bytes, ...)                                           \
  INSTANTIATE_UPDATE("64", types, UPDATE_LANES(64, bytes), false, __VA_ARGS__)         \
  INSTANTIATE_UPDATE("128", types, UPDATE_LANES(128, bytes), false, __VA_ARGS__)       \
  INSTANTIATE_UPDATE("shared_16", types, UPDATE_LANES(16, bytes), true, __VA_ARGS__)   \
  INSTANTIATE_UPDATE("shared_64", types, UPDATE_LANES(64, bytes), true, __VA_ARGS__)   \
  INSTANTIATE_UPDATE("shared_128", types, UPDATE_LANES(128, bytes), true, __VA_ARGS__) \
  INSTANTIATE("selective_state_update_any", types, selective_state_update<4, 4, false, false, __VA_ARGS__>)
INSTANTIATE_LANES("_float_float", 4, float, float)
INSTANTIATE_LANES("_half_half", 2, half, half)
INSTANTIATE_LANES("_half_float", 4, half, float)
INSTANTIATE_LANES("_bfloat_bfloat", 2, bfloat, bfloat)
INSTANTIATE_LANES("_bfloat_float", 4, bfloat, float)
