// selective_state_update for channels of up to 16 states that have a rate each. The rates have more bytes than 16-bit
// states, so a threadgroup keeps those of its channels and walks over batch entries, with the next one on its way.
#include "sequence/state_update.h"

// Inputs of 16 bits have powers of 2, which GPUs compute, without a product for each.
template <typename T>
constexpr constant bool kPowersOf2 = sizeof(T) < sizeof(float);
template <typename T>
inline float4 powers(float4 x) {
  return kPowersOf2<T> ? fast::exp2(x) : precise::exp(x);
}

// What a lane reads of a batch entry. Its row of the state is negative for padding.
template <uint LANES, typename T, typename S>
struct Entry {
  int row;
  device S* place;  // of the states, where the row exists
  Pack<S> states[LANES];
  Quad<T> B[kPackVectors<S>], C[kPackVectors<S>];
  Number<T> input, step, opening;
};

// LANES lanes share a channel, and each has a vector of the states of LANES channels: it adds up one of them.
template <uint LANES, typename T, typename S>
[[kernel]] [[max_total_threads_per_threadgroup(SCAN_THREADS)]] void selective_state_walk(
    device S* state [[buffer(0)]], device const T* x [[buffer(1)]], device const T* steps [[buffer(2)]],
    device const float* A [[buffer(3)]], device const T* B [[buffer(4)]], device const T* C [[buffer(5)]],
    device const T* skip [[buffer(6)]], device const T* gate [[buffer(7)]], device const T* bias [[buffer(8)]],
    device const int* rows [[buffer(9)]], device T* out [[buffer(10)]],
    constant SelectiveStateUpdateParams& params [[buffer(11)]], uint3 place [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  constexpr uint kAcross = 32 / LANES, kQuads = kPackVectors<S>;  // kAcross: channels of a simdgroup at once
  const uint lane = thread_index % 32, part = lane % LANES, dim = params.dim, head = place.y;
  const uint first = (place.x * (SCAN_THREADS / 32) + thread_index / 32) * 32;
  if (first >= dim) return;
  // The lane's own channel. Lane i of those that share channels has the channel that lanes_sums() gives it.
  const uint own = first + part * kAcross + lane / LANES, channel = min(own, dim - 1),
             group = head / params.group_heads;
  const uint mine = first + lane / LANES;  // the first of the channels whose states the lane has
  const bool holds = part * kPackElements<S> < params.states;
  const uint begin = holds ? part * kPackElements<S> : 0, distance = params.state[2] * kAcross;
  const uint channels = !holds || mine >= dim ? 0 : (dim - 1 - mine) / kAcross + 1;  // whose states there are
  const uint first_entry = place.z * params.entries, end = min(first_entry + params.entries, params.batch);
  state += head * params.state[1] + mine * params.state[2] + begin;
  A += head * params.A[0] + begin;
  B += first_entry * params.B[0] + group * params.B[1] + begin;
  C += first_entry * params.C[0] + group * params.C[1] + begin;
  const long step_at = first_entry * params.step[0] + head * params.step[1] + channel * params.step[2];
  steps = place_of(steps, params.wide_steps, step_at);
  const long next_step = params.step[0] * (sizeof(T) < sizeof(float) && params.wide_steps ? 2 : 1);
  x += first_entry * params.x[0] + head * params.x[1] + channel * params.x[2];
  if (params.has_gate) gate += first_entry * params.gate[0] + head * params.gate[1] + channel * params.gate[2];
  out += (ulong(first_entry) * params.heads + head) * dim + channel;
  float4 rates[LANES][kQuads];  // times the logarithm of 2 where powers of 2 take the place of powers of e
#pragma unroll
  for (uint r = 0; r < LANES; ++r)
#pragma unroll
    for (uint i = 0; i < kQuads; ++i)
      rates[r][i] = reinterpret_cast<device const float4*>(A + min(mine + r * kAcross, dim - 1) * params.A[1])[i] *
                    (kPowersOf2<T> ? M_LOG2E_F : 1.0f);
  const float shift =
      optional(params.has_bias, bias, params.wide_bias, head * params.bias[0] + channel * params.bias[1], x);
  const float factor =
      optional(params.has_skip, skip, params.wide_skip, head * params.skip[0] + channel * params.skip[1], x);

  Entry<LANES, T, S> next;
  // The first turn has no entry to compute, but fetches the first one.
#pragma unroll 2
  for (uint turn = first_entry; turn <= end; ++turn) {
    const Entry<LANES, T, S> entry = next;
    if (turn < end) {
      next.row = params.has_rows ? rows[turn] : static_cast<int>(turn);
      const bool stored = next.row >= 0 && next.row < static_cast<int>(params.rows);
      next.place = state + (stored ? next.row : 0) * params.state[0];
#pragma unroll
      for (uint r = 0; r < LANES; ++r) {
        // Others write what a lane without states would read.
        next.states[r].words = uint4(0u);
        if (stored && r < channels)
          next.states[r] = *reinterpret_cast<device const Pack<S>*>(next.place + r * distance);
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
      float4 h[kPackVectors<S>];
      unpack(entry.states[r], h);
      float sum = 0.0f;
#pragma unroll
      for (uint i = 0; i < kQuads; ++i) {
        h[i] = row_added * row_B[i] + powers<T>(row_step * rates[r][i]) * h[i];
#pragma unroll
        for (uint n = 0; n < 4; ++n) sum = fma(h[i][n], row_C[i][n], sum);
      }
      sums[r] = holds ? sum : 0.0f;
      if (stored && r < channels) *reinterpret_cast<device Pack<S>*>(entry.place + r * distance) = packed<S>(h);
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

#define INSTANTIATE_WALK(types, bytes, ...) \
  INSTANTIATE("selective_state_walk", types, selective_state_walk<UPDATE_LANES(16, bytes), __VA_ARGS__>)
INSTANTIATE_WALK("_float_float", 4, float, float)
INSTANTIATE_WALK("_half_half", 2, half, half)
INSTANTIATE_WALK("_half_float", 4, half, float)
INSTANTIATE_WALK("_bfloat_bfloat", 2, bfloat, bfloat)
INSTANTIATE_WALK("_bfloat_float", 4, bfloat, float)
