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
#define INSTANTIATE_FLOATS(types, ...)     \
  INSTANTIATE_LANES(types, 4, __VA_ARGS__) \
  INSTANTIATE_UPDATE("16", types, UPDATE_LANES(16, 4), false, __VA_ARGS__)
INSTANTIATE_FLOATS("_float_float", float, float)
INSTANTIATE_LANES("_half_half", 2, half, half)
INSTANTIATE_FLOATS("_half_float", half, float)
INSTANTIATE_LANES("_bfloat_bfloat", 2, bfloat, bfloat)
INSTANTIATE_FLOATS("_bfloat_float", bfloat, float)

// selective_state_update for channels of up to 16 states of 16 bits that have a rate each. The rates have more bytes
// than the states, so a threadgroup keeps those of its channels and walks over batch entries, with the next one on its
// way.

// What a lane reads of a batch entry. Its row of the state is negative for padding.
template <uint LANES, typename T>
struct Entry {
  int row;
  device T* place;  // of the states, where the row exists
  Pack<T> states[LANES];
  Quad<T> B[kPackVectors<T>], C[kPackVectors<T>];
  Number<T> input, step, opening;
};

// LANES lanes share a channel, and each has a vector of the states of LANES channels: it adds up one of them.
template <uint LANES, typename T>
[[kernel]] [[max_total_threads_per_threadgroup(SCAN_THREADS)]] void selective_state_walk(
    device T* state [[buffer(0)]], device const T* x [[buffer(1)]], device const T* steps [[buffer(2)]],
    device const float* A [[buffer(3)]], device const T* B [[buffer(4)]], device const T* C [[buffer(5)]],
    device const T* skip [[buffer(6)]], device const T* gate [[buffer(7)]], device const T* bias [[buffer(8)]],
    device const int* rows [[buffer(9)]], device T* out [[buffer(10)]],
    constant SelectiveStateUpdateParams& params [[buffer(11)]], uint3 place [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  constexpr uint kAcross = 32 / LANES, kQuads = kPackVectors<T>;  // kAcross: channels of a simdgroup at once
  const uint lane = thread_index % 32, part = lane % LANES, dim = params.dim, head = place.y;
  const uint first = (place.x * (SCAN_THREADS / 32) + thread_index / 32) * 32;
  if (first >= dim) return;
  // The lane's own channel. Lane i of those that share channels has the channel that lanes_sums() gives it.
  const uint own = first + part * kAcross + lane / LANES, channel = min(own, dim - 1),
             group = head / params.group_heads;
  const uint mine = first + lane / LANES;  // the first of the channels whose states the lane has
  const bool holds = part * kPackElements<T> < params.states;
  const uint begin = holds ? part * kPackElements<T> : 0, distance = params.state[2] * kAcross;
  const uint channels = !holds || mine >= dim ? 0 : (dim - 1 - mine) / kAcross + 1;  // whose states there are
  const uint first_entry = place.z * params.entries, end = min(first_entry + params.entries, params.batch);
  state += head * params.state[1] + mine * params.state[2] + begin;
  A += head * params.A[0] + begin;
  B += first_entry * params.B[0] + group * params.B[1] + begin;
  C += first_entry * params.C[0] + group * params.C[1] + begin;
  const long step_at = first_entry * params.step[0] + head * params.step[1] + channel * params.step[2];
  steps = place_of(steps, params.wide_steps, step_at);
  const long next_step = params.step[0] * (params.wide_steps ? 2 : 1);
  x += first_entry * params.x[0] + head * params.x[1] + channel * params.x[2];
  if (params.has_gate) gate += first_entry * params.gate[0] + head * params.gate[1] + channel * params.gate[2];
  out += (ulong(first_entry) * params.heads + head) * dim + channel;
  float4 rates[LANES][kQuads];  // for powers of 2, which GPUs compute without a product for each
#pragma unroll
  for (uint r = 0; r < LANES; ++r)
#pragma unroll
    for (uint i = 0; i < kQuads; ++i)
      rates[r][i] =
          reinterpret_cast<device const float4*>(A + min(mine + r * kAcross, dim - 1) * params.A[1])[i] * M_LOG2E_F;
  const float shift =
      optional(params.has_bias, bias, params.wide_bias, head * params.bias[0] + channel * params.bias[1], x);
  const float factor =
      optional(params.has_skip, skip, params.wide_skip, head * params.skip[0] + channel * params.skip[1], x);

  Entry<LANES, T> next;
  // The first turn has no entry to compute, but fetches the first one.
#pragma unroll 2
  for (uint turn = first_entry; turn <= end; ++turn) {
    const Entry<LANES, T> entry = next;
    if (turn < end) {
      next.row = params.has_rows ? rows[turn] : static_cast<int>(turn);
      const bool stored = next.row >= 0 && next.row < static_cast<int>(params.rows);
      next.place = state + (stored ? next.row : 0) * params.state[0];
#pragma unroll
      for (uint r = 0; r < LANES; ++r) {
        // Others write what a lane without states would read.
        next.states[r].words = uint4(0u);
        if (stored && r < channels)
          next.states[r] = *reinterpret_cast<device const Pack<T>*>(next.place + r * distance);
      }
#pragma unroll
      for (uint i = 0; i < kQuads; ++i) {
        next.B[i] = reinterpret_cast<device const Quad<T>*>(B)[i];
        next.C[i] = reinterpret_cast<device const Quad<T>*>(C)[i];
      }
      next.input = Number<T>(x, false);
      next.step = Number<T>(steps, params.wide_steps);
      if (params.has_gate) next.opening = Number<T>(gate, false);
      B += params.B[0], C += params.C[0], x += params.x[0], gate += params.gate[0], steps += next_step;
    }
    if (turn == first_entry) continue;
    const bool stored = entry.row >= 0 && entry.row < static_cast<int>(params.rows);
    const float input = entry.input.value(false), given = entry.step.value(params.wide_steps);
    const float step = params.softplus ? softplus(given + shift) : given + shift, added = step * input;
    float4 row_B[kQuads], row_C[kQuads];
#pragma unroll
    for (uint i = 0; i < kQuads; ++i) row_B[i] = entry.B[i].numbers(), row_C[i] = entry.C[i].numbers();
    float sums[LANES];
#pragma unroll
    for (uint r = 0; r < LANES; ++r) {
      const ushort source = r + lane / LANES * LANES;
      const float row_step = simd_shuffle(step, source), row_added = simd_shuffle(added, source);
      float4 h[kPackVectors<T>];
      unpack(entry.states[r], h);
      float sum = 0.0f;
#pragma unroll
      for (uint i = 0; i < kQuads; ++i) {
        h[i] = row_added * row_B[i] + fast::exp2(row_step * rates[r][i]) * h[i];
#pragma unroll
        for (uint n = 0; n < 4; ++n) sum = fma(h[i][n], row_C[i][n], sum);
      }
      sums[r] = holds ? sum : 0.0f;
      if (stored && r < channels) *reinterpret_cast<device Pack<T>*>(entry.place + r * distance) = packed<T>(h);
    }
    lanes_sums<LANES, LANES>(sums, lane);
    float y = sums[0];
    if (params.has_skip) y += input * factor;
    if (params.has_gate) y *= Silu<T>::forward(entry.opening.value(false));
    // An entry with a negative row is padding, and one beyond the state has no result.
    if (!stored) y = entry.row < 0 ? 0.0f : NAN;
    if (own < dim) *out = static_cast<T>(y);
    out += ulong(params.heads) * dim;
  }
}

INSTANTIATE("selective_state_walk", "_half_half", selective_state_walk<UPDATE_LANES(16, 2), half>)
INSTANTIATE("selective_state_walk", "_bfloat_bfloat", selective_state_walk<UPDATE_LANES(16, 2), bfloat>)
