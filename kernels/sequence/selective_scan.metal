// selective_scan: threadgroups walk along chunks of positions (scan_tile.h). Where there are several chunks, a first
// kernel finds what each adds to the state, a second one carries states from chunk to chunk, and the third one starts
// from them.
#include "sequence/scan_tile.h"

// From a state of zeros: the states behind each chunk, and the factors of the states before it. A factor of -1 says
// that a sequence begins in the chunk. For the derivative also the gradients of the states before it.
template <uint LANES, typename T>
[[kernel]] [[max_total_threads_per_threadgroup(SCAN_THREADS)]] void selective_scan_chunks(
    device const T* x [[buffer(0)]], device const T* steps [[buffer(1)]], device const float* A [[buffer(2)]],
    device const T* B [[buffer(3)]], device const T* C [[buffer(4)]], device const T* gate [[buffer(5)]],
    device const float* bias [[buffer(6)]], device const int* numbers [[buffer(7)]], device const T* grad [[buffer(8)]],
    device float* behind [[buffer(9)]], device float* factors [[buffer(10)]], device float* gradients [[buffer(11)]],
    constant SelectiveScanParams& params [[buffer(12)]], uint index [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  constexpr uint kChannels = SCAN_THREADS / LANES, kRow = LANES * 4, kPositions = 16;
  using Elements = Tile<kChannels, kPositions>;
  threadgroup float4 tile_B[kPositions * LANES];
  threadgroup float4 tile_C[kPositions * LANES];
  threadgroup float step_tile[kPositions][kChannels];
  threadgroup float input_tile[kPositions][kChannels];
  threadgroup float grad_tile[kPositions][kChannels];
  const Place place(params, index);
  const uint per_group = params.channels / params.groups;
  const uint part = thread_index % LANES, own = thread_index / LANES;
  const uint first = place.group * per_group + place.block * kChannels, channel = first + own;
  const uint channels_end = (place.group + 1) * per_group;
  const bool holds = channel < channels_end;
  const float4 rates = load_rates(A, params, channel, holds, part);
  float4 state = float4(0.0f), gradient = float4(0.0f), factor = float4(1.0f);
  bool whole = true;  // no sequence has begun
  for (uint begin = place.begin; begin < place.end; begin += kPositions) {
    const Elements tile{params.x[1] == 1, place.batch, first, begin, channels_end, place.end, thread_index};
    threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
    for (uint n = 0; n < Elements::kElements; ++n) {
      const float step = tile.step(n, tile.raw_step(n, steps, bias, params), params);
      const float input = step * tile.read(n, x, params.x, params.dim);
      float upper = params.for_derivative ? tile.read(n, grad, params.grad, params.dim) : 0.0f;
      if (params.for_derivative && params.has_gate)
        upper *= Silu<T>::forward(tile.read(n, gate, params.gate, params.dim));
      if (tile.holds(n)) step_tile[tile.position(n)][tile.channel(n)] = step;
      if (tile.holds(n)) input_tile[tile.position(n)][tile.channel(n)] = input;
      if (tile.holds(n)) grad_tile[tile.position(n)][tile.channel(n)] = upper;
    }
    fetch_rows<kRow, kPositions>(reinterpret_cast<threadgroup float*>(tile_B), B, params.B, params, place, begin,
                                 thread_index);
    if (params.for_derivative)
      fetch_rows<kRow, kPositions>(reinterpret_cast<threadgroup float*>(tile_C), C, params.C, params, place, begin,
                                   thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll 1
    for (uint i = 0; i < kPositions; ++i) {
      const float step = step_tile[i][own], input = input_tile[i][own], upper = grad_tile[i][own];
      const bool fresh = begins(numbers, params, place.batch, begin + i);
      whole = whole && !fresh;
      const float4 a = decay_of<T>(step, rates);
      state = (fresh ? float4(0.0f) : a * state) + input * tile_B[i * LANES + part];
      if (whole) {
        factor *= a;
        if (params.for_derivative) gradient += factor * (upper * tile_C[i * LANES + part]);
      }
    }
  }
  factor = whole ? factor : float4(-1.0f);
  const ulong at = state_at(params, place.chunk, place.batch, channel);
  store_states(state, behind + at, holds, params.states, part);
  store_states(factor, factors + at, holds, params.states, part);
  store_states(gradient, gradients + at, holds && params.for_derivative, params.states, part);
}
INSTANTIATE_TYPES("selective_scan_chunks", selective_scan_chunks)

// Carries a state along the chunks, or its gradient back: what comes into a chunk takes the place of what the chunk
// itself has added. `given` is before all of them, and `left` behind them. A thread has a state.
template <bool BACK>
[[kernel]] void selective_scan_carry(device const float* given [[buffer(0)]], device const float* factors [[buffer(1)]],
                                     device float* parts [[buffer(2)]], device float* left [[buffer(3)]],
                                     constant SelectiveScanParams& params [[buffer(4)]],
                                     uint at [[thread_position_in_grid]]) {
  const ulong count = ulong(params.batch) * params.channels * params.states;
  float state = (BACK ? params.has_after : params.has_before) ? given[at] : 0.0f;
  for (uint begin = 0; begin < params.chunks; begin += SCAN_CARRY_CHUNKS) {
    float added[SCAN_CARRY_CHUNKS], factor[SCAN_CARRY_CHUNKS];
#pragma unroll
    for (uint n = 0; n < SCAN_CARRY_CHUNKS; ++n) {
      const uint step = min(begin + n, params.chunks - 1), chunk = BACK ? params.chunks - 1 - step : step;
      added[n] = parts[chunk * count + at];
      factor[n] = factors[chunk * count + at];
    }
#pragma unroll
    for (uint n = 0; n < SCAN_CARRY_CHUNKS; ++n) {
      const uint step = begin + n, chunk = BACK ? params.chunks - 1 - step : step;
      if (step < params.chunks) {
        parts[chunk * count + at] = state;
        state = factor[n] < 0.0f ? added[n] : factor[n] * state + added[n];
      }
    }
  }
  if (BACK ? params.has_before : params.has_after) left[at] = state;
}
INSTANTIATE("selective_scan_carry", "", selective_scan_carry<false>)
INSTANTIATE("selective_scan_carry", "_back", selective_scan_carry<true>)

template <uint LANES, typename T>
[[kernel]] [[max_total_threads_per_threadgroup(SCAN_THREADS)]] void selective_scan(
    device const T* x [[buffer(0)]], device const T* steps [[buffer(1)]], device const float* A [[buffer(2)]],
    device const T* B [[buffer(3)]], device const T* C [[buffer(4)]], device const float* skip [[buffer(5)]],
    device const T* gate [[buffer(6)]], device const float* bias [[buffer(7)]], device const int* numbers [[buffer(8)]],
    device const float* before [[buffer(9)]], device T* out [[buffer(10)]], device float* after [[buffer(11)]],
    constant SelectiveScanParams& params [[buffer(12)]], uint index [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  constexpr uint kChannels = SCAN_THREADS / LANES, kRow = LANES * 4, kPositions = 16;
  using Elements = Tile<kChannels, kPositions>;
  threadgroup float4 tile_B[kPositions * LANES];
  threadgroup float4 tile_C[kPositions * LANES];
  threadgroup float step_tile[kPositions][kChannels];
  threadgroup float input_tile[kPositions][kChannels];
  threadgroup float results[kPositions][kChannels];
  const Place place(params, index);
  const uint per_group = params.channels / params.groups;
  const uint part = thread_index % LANES, own = thread_index / LANES;
  const uint first = place.group * per_group + place.block * kChannels, channel = first + own;
  const uint channels_end = (place.group + 1) * per_group;
  const bool holds = channel < channels_end;
  const float4 rates = load_rates(A, params, channel, holds, part);
  float4 state = load_states(before + state_at(params, place.chunk, place.batch, channel), holds && params.has_before,
                             params.states, part);
  for (uint begin = place.begin; begin < place.end; begin += kPositions) {
    const Elements tile{params.x[1] == 1, place.batch, first, begin, channels_end, place.end, thread_index};
    float inputs[Elements::kElements];
    threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
    for (uint n = 0; n < Elements::kElements; ++n) {
      const float step = tile.step(n, tile.raw_step(n, steps, bias, params), params);
      inputs[n] = tile.read(n, x, params.x, params.dim);
      if (tile.holds(n)) step_tile[tile.position(n)][tile.channel(n)] = step;
      if (tile.holds(n)) input_tile[tile.position(n)][tile.channel(n)] = step * inputs[n];
    }
    fetch_rows<kRow, kPositions>(reinterpret_cast<threadgroup float*>(tile_B), B, params.B, params, place, begin,
                                 thread_index);
    fetch_rows<kRow, kPositions>(reinterpret_cast<threadgroup float*>(tile_C), C, params.C, params, place, begin,
                                 thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll 1
    for (uint i = 0; i < kPositions; i += 4) {
      float sums[4];
#pragma unroll
      for (uint s = 0; s < 4; ++s) {
        const float step = step_tile[i + s][own], input = input_tile[i + s][own];
        const bool fresh = begins(numbers, params, place.batch, begin + i + s);
        const uint at = (i + s) * LANES + part;
        state = (fresh ? float4(0.0f) : decay_of<T>(step, rates) * state) + input * tile_B[at];
        sums[s] = sum(state * tile_C[at]);
      }
      strided_sums<1, LANES, 4>(sums, thread_index);
      if (part % (LANES / 4) == 0) results[i + part / (LANES / 4)][own] = sums[0];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
    for (uint n = 0; n < Elements::kElements; ++n) {
      if (!tile.inside(n)) continue;
      float y = results[tile.position(n)][tile.channel(n)];
      if (params.has_skip) y += skip[first + tile.channel(n)] * inputs[n];
      if (params.has_gate) y *= Silu<T>::forward(tile.read(n, gate, params.gate, params.dim));
      out[tile.at(n, params.out, params.dim)] = static_cast<T>(y);
    }
  }
  store_states(state, after + state_at(params, 0, place.batch, channel), holds && params.has_after, params.states,
               part);
}
INSTANTIATE_TYPES("selective_scan", selective_scan)
