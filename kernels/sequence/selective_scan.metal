// selective_scan: threadgroups walk along chunks of positions (scan_tile.h). Where there are several chunks, a first
// kernel finds what each adds to the state, a second one carries states from chunk to chunk, and the third one starts
// from them.
#include "sequence/scan_tile.h"

// From a state of zeros: the states behind each chunk, and the factors of the states before it. A factor of -1 says
// that a sequence begins in the chunk. For the derivative also the gradients of the states before it.
template <uint LANES, uint M, bool SHARED, typename T>
[[kernel]] [[max_total_threads_per_threadgroup(SCAN_THREADS)]] void selective_scan_chunks(
    device const T* x [[buffer(0)]], device const T* steps [[buffer(1)]], device const float* A [[buffer(2)]],
    device const T* B [[buffer(3)]], device const T* C [[buffer(4)]], device const T* gate [[buffer(5)]],
    device const float* bias [[buffer(6)]], device const int* numbers [[buffer(7)]], device const T* grad [[buffer(8)]],
    device float* behind [[buffer(9)]], device float* factors [[buffer(10)]], device float* gradients [[buffer(11)]],
    constant SelectiveScanParams& params [[buffer(12)]], uint index [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  constexpr uint kOwners = SCAN_THREADS / LANES, kChannels = kOwners * M, kRow = LANES * 4, kPositions = 16;
  using Elements = Tile<kChannels, kPositions>;
  threadgroup float4 tile_B[kPositions * LANES];
  threadgroup float4 tile_C[kPositions * LANES];
  threadgroup float step_tile[kPositions][kChannels];  // or the decays of shared rates
  threadgroup float input_tile[kPositions][kChannels];
  threadgroup float grad_tile[kPositions][kChannels];
  const Place place(params, index);
  const uint per_group = params.channels / params.groups;
  const uint part = thread_index % LANES, own = thread_index / LANES;
  const uint first = place.group * per_group + place.block * kChannels;
  const uint channels_end = (place.group + 1) * per_group;
  float4 rates[SHARED ? 1 : M];
  for (uint m = 0; m < M && !SHARED; ++m)
    rates[m] = load_rates(A, params, first + own + m * kOwners, first + own + m * kOwners < channels_end, part);
  float4 state[M], gradient[M], factor[M];
#pragma unroll
  for (uint m = 0; m < M; ++m) {
    state[m] = gradient[m] = float4(0.0f);
    factor[m] = float4(1.0f);
  }
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
      if (tile.holds(n))
        step_tile[tile.position(n)][tile.channel(n)] = SHARED ? tile.shared_decay(n, step, A, params) : step;
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
      const bool fresh = begins(numbers, params, place.batch, begin + i);
      const float4 row_B = tile_B[i * LANES + part], row_C = tile_C[i * LANES + part];
      whole = whole && !fresh;
#pragma unroll
      for (uint m = 0; m < M; ++m) {
        const uint c = own + m * kOwners;
        const float4 a = SHARED ? float4(step_tile[i][c]) : decay_of<T>(step_tile[i][c], rates[SHARED ? 0 : m]);
        state[m] = (fresh ? float4(0.0f) : a * state[m]) + input_tile[i][c] * row_B;
        if (!whole) continue;
        factor[m] *= a;
        if (params.for_derivative) gradient[m] += factor[m] * (grad_tile[i][c] * row_C);
      }
    }
  }
#pragma unroll
  for (uint m = 0; m < M; ++m) {
    const uint channel = first + own + m * kOwners;
    const bool holds = channel < channels_end;
    const ulong at = state_at(params, place.chunk, place.batch, channel);
    store_states(state[m], behind + at, holds, params.states, part);
    store_states(whole ? factor[m] : float4(-1.0f), factors + at, holds, params.states, part);
    store_states(gradient[m], gradients + at, holds && params.for_derivative, params.states, part);
  }
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

template <uint LANES, uint M, bool SHARED, typename T>
[[kernel]] [[max_total_threads_per_threadgroup(SCAN_THREADS)]] void selective_scan(
    device const T* x [[buffer(0)]], device const T* steps [[buffer(1)]], device const float* A [[buffer(2)]],
    device const T* B [[buffer(3)]], device const T* C [[buffer(4)]], device const float* skip [[buffer(5)]],
    device const T* gate [[buffer(6)]], device const float* bias [[buffer(7)]], device const int* numbers [[buffer(8)]],
    device const float* before [[buffer(9)]], device T* out [[buffer(10)]], device float* after [[buffer(11)]],
    constant SelectiveScanParams& params [[buffer(12)]], uint index [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  constexpr uint kOwners = SCAN_THREADS / LANES, kChannels = kOwners * M, kRow = LANES * 4, kPositions = 16;
  using Elements = Tile<kChannels, kPositions>;
  threadgroup float4 tile_B[kPositions * LANES];
  threadgroup float4 tile_C[kPositions * LANES];
  threadgroup float step_tile[kPositions][kChannels];  // or the decays of shared rates
  threadgroup float input_tile[kPositions][kChannels];
  threadgroup float results[kPositions][kChannels];
  const Place place(params, index);
  const uint per_group = params.channels / params.groups;
  const uint part = thread_index % LANES, own = thread_index / LANES;
  const uint first = place.group * per_group + place.block * kChannels;
  const uint channels_end = (place.group + 1) * per_group;
  float4 rates[SHARED ? 1 : M];
  for (uint m = 0; m < M && !SHARED; ++m)
    rates[m] = load_rates(A, params, first + own + m * kOwners, first + own + m * kOwners < channels_end, part);
  float4 state[M];
#pragma unroll
  for (uint m = 0; m < M; ++m) {
    const uint channel = first + own + m * kOwners;
    state[m] = load_states(before + state_at(params, place.chunk, place.batch, channel),
                           params.has_before && channel < channels_end, params.states, part);
  }
  for (uint begin = place.begin; begin < place.end; begin += kPositions) {
    const Elements tile{params.x[1] == 1, place.batch, first, begin, channels_end, place.end, thread_index};
    float inputs[Elements::kElements];
    threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
    for (uint n = 0; n < Elements::kElements; ++n) {
      const float step = tile.step(n, tile.raw_step(n, steps, bias, params), params);
      inputs[n] = tile.read(n, x, params.x, params.dim);
      if (tile.holds(n))
        step_tile[tile.position(n)][tile.channel(n)] = SHARED ? tile.shared_decay(n, step, A, params) : step;
      if (tile.holds(n)) input_tile[tile.position(n)][tile.channel(n)] = step * inputs[n];
    }
    fetch_rows<kRow, kPositions>(reinterpret_cast<threadgroup float*>(tile_B), B, params.B, params, place, begin,
                                 thread_index);
    fetch_rows<kRow, kPositions>(reinterpret_cast<threadgroup float*>(tile_C), C, params.C, params, place, begin,
                                 thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll 1
    for (uint i = 0; i < kPositions; i += 4) {
      float sums[4 * M];
#pragma unroll
      for (uint s = 0; s < 4; ++s) {
        const bool fresh = begins(numbers, params, place.batch, begin + i + s);
        const float4 row_B = tile_B[(i + s) * LANES + part], row_C = tile_C[(i + s) * LANES + part];
#pragma unroll
        for (uint m = 0; m < M; ++m) {
          const uint c = own + m * kOwners;
          const float4 a =
              SHARED ? float4(step_tile[i + s][c]) : decay_of<T>(step_tile[i + s][c], rates[SHARED ? 0 : m]);
          state[m] = (fresh ? float4(0.0f) : a * state[m]) + input_tile[i + s][c] * row_B;
          sums[m * 4 + s] = sum(state[m] * row_C);
        }
      }
      constexpr uint kCopies = LANES / (4 * M);
      strided_sums<1, LANES, 4 * M>(sums, thread_index);
      const uint n = part / kCopies;
      if (part % kCopies == 0) results[i + n % 4][own + n / 4 * kOwners] = sums[0];
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
#pragma unroll
  for (uint m = 0; m < M; ++m) {
    const uint channel = first + own + m * kOwners;
    store_states(state[m], after + state_at(params, 0, place.batch, channel),
                 params.has_after && channel < channels_end, params.states, part);
  }
}
INSTANTIATE_TYPES("selective_scan", selective_scan)
