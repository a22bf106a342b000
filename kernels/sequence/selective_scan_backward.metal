// The derivative of selective_scan, where G is the gradient of the state. selective_scan_chunks and _carry have found
// the state before each chunk and G behind it. A threadgroup walks along a chunk and keeps some states, from which it
// then computes those between them, walking back with G. So states are never divided by a factor that may be 0.
#include "sequence/scan_tile.h"

template <uint LANES, uint M, bool SHARED, typename T>
[[kernel]] [[max_total_threads_per_threadgroup(SCAN_THREADS)]] void selective_scan_back(
    device const T* x [[buffer(0)]], device const T* steps [[buffer(1)]], device const float* A [[buffer(2)]],
    device const T* B [[buffer(3)]], device const T* C [[buffer(4)]], device const float* skip [[buffer(5)]],
    device const T* gate [[buffer(6)]], device const float* bias [[buffer(7)]], device const int* numbers [[buffer(8)]],
    device const T* grad [[buffer(9)]], device const float* before [[buffer(10)]],
    device const float* behind [[buffer(11)]], device T* gx [[buffer(12)]], device T* gsteps [[buffer(13)]],
    device T* ggate [[buffer(14)]], device float* rate_parts [[buffer(15)]], device float* row_parts [[buffer(16)]],
    device float* channel_parts [[buffer(17)]], constant SelectiveScanParams& params [[buffer(18)]],
    uint index [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  constexpr uint kChannels = SCAN_THREADS / LANES, kRow = LANES * 4;
  constexpr uint kPositions = 8;  // between kept states
  constexpr uint kKept = SCAN_POSITIONS / kPositions;
  // So many positions' rows of gradients of B and C are in threadgroup memory at once.
  constexpr uint kRows = kRow <= 16 ? 4 : 128 / kRow;
  constexpr uint kNeighbours = 32 / LANES;  // channels of a simdgroup
  constexpr uint kOwn = kNeighbours < 4 ? 4 / kNeighbours : 1, kCopies = kNeighbours < 4 ? 1 : kNeighbours / 4;
  using Elements = Tile<kChannels, kPositions>;
  threadgroup float4 kept[kKept * SCAN_THREADS];
  threadgroup float4 tile_B[kPositions * LANES];
  threadgroup float4 tile_C[kPositions * LANES];
  threadgroup float step_tile[kPositions][kChannels];
  threadgroup float decay_tile[SHARED ? kPositions : 1][kChannels];  // of shared rates
  threadgroup float input_tile[kPositions][kChannels];
  threadgroup float grad_tile[kPositions][kChannels];
  threadgroup float results[4][kPositions][kChannels];  // by input, by rate, of the states, and what channels sum up
  threadgroup float sums[2][kSimdgroups][kRows][kRow];
  const Place place(params, index);
  const uint per_group = params.channels / params.groups;
  const uint part = thread_index % LANES, own = thread_index / LANES, simdgroup = thread_index / 32;
  const uint channels_end = (place.group + 1) * per_group;
  const ulong entry = ulong(place.batch) * params.chunks + place.chunk;
  const ulong positions = ulong(params.batch) * params.length, row_size = ulong(params.groups) * params.states;
  for (uint t = 0; t < params.tiles; ++t) {
    const uint first = place.group * per_group + (place.block * params.tiles + t) * kChannels, channel = first + own;
    const bool holds = channel < channels_end;
    const float4 rates = load_rates(A, params, channel, holds, part);
    const ulong at = state_at(params, place.chunk, place.batch, channel);
    float4 state = load_states(before + at, holds, params.states, part);
    float4 gradient = load_states(behind + at, holds, params.states, part);
    float channel_sum = 0.0f;  // of a channel's D, or behind these of its bias
    for (uint b = 0; b < kKept; ++b) {
      const uint begin = place.begin + b * kPositions;
      const Elements tile{params.x[1] == 1, place.batch, first, begin, channels_end, place.end, thread_index};
      kept[b * SCAN_THREADS + thread_index] = state;
      threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
      for (uint n = 0; n < Elements::kElements; ++n) {
        const float step = tile.step(n, tile.raw_step(n, steps, bias, params), params);
        const float input = step * tile.read(n, x, params.x, params.dim);
        if (tile.holds(n)) step_tile[tile.position(n)][tile.channel(n)] = step;
        if (SHARED && tile.holds(n))
          decay_tile[tile.position(n)][tile.channel(n)] = tile.shared_decay(n, step, A, params);
        if (tile.holds(n)) input_tile[tile.position(n)][tile.channel(n)] = input;
      }
      fetch_rows<kRow, kPositions>(reinterpret_cast<threadgroup float*>(tile_B), B, params.B, params, place, begin,
                                   thread_index);
      threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll 1
      for (uint i = 0; i < kPositions; ++i) {
        const float step = step_tile[i][own], input = input_tile[i][own];
        const bool fresh = begins(numbers, params, place.batch, begin + i);
        state = (fresh ? float4(0.0f)
                       : (SHARED ? float4(decay_tile[SHARED ? i : 0][own]) : decay_of<T>(step, rates)) * state) +
                input * tile_B[i * LANES + part];
      }
    }
    float4 rate_sums = float4(0.0f);
    for (uint b = kKept; b-- > 0;) {
      const uint begin = place.begin + b * kPositions;
      const Elements tile{params.x[1] == 1, place.batch, first, begin, channels_end, place.end, thread_index};
      threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
      for (uint n = 0; n < Elements::kElements; ++n) {
        const float step = tile.step(n, tile.raw_step(n, steps, bias, params), params);
        const float input = step * tile.read(n, x, params.x, params.dim);
        float upper = tile.read(n, grad, params.grad, params.dim);
        if (params.has_gate) upper *= Silu<T>::forward(tile.read(n, gate, params.gate, params.dim));
        if (tile.holds(n)) step_tile[tile.position(n)][tile.channel(n)] = step;
        if (SHARED && tile.holds(n))
          decay_tile[tile.position(n)][tile.channel(n)] = tile.shared_decay(n, step, A, params);
        if (tile.holds(n)) input_tile[tile.position(n)][tile.channel(n)] = input;
        if (tile.holds(n)) grad_tile[tile.position(n)][tile.channel(n)] = upper;
      }
      fetch_rows<kRow, kPositions>(reinterpret_cast<threadgroup float*>(tile_B), B, params.B, params, place, begin,
                                   thread_index);
      fetch_rows<kRow, kPositions>(reinterpret_cast<threadgroup float*>(tile_C), C, params.C, params, place, begin,
                                   thread_index);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      float4 states[kPositions];  // before the positions
      // Rows of the gradients of B behind these positions. Those of C follow all of B's.
      device float* row_sums =
          row_parts +
          (place.block * 2 * positions + ulong(place.batch) * params.length + begin + kPositions) * row_size +
          place.group * params.states;
      state = kept[b * SCAN_THREADS + thread_index];
#pragma unroll
      for (uint i = 0; i < kPositions; ++i) {
        const float step = step_tile[i][own], input = input_tile[i][own];
        const bool fresh = begins(numbers, params, place.batch, begin + i);
        if (fresh) state = float4(0.0f);
        states[i] = state;
        state = (SHARED ? float4(decay_tile[SHARED ? i : 0][own]) : decay_of<T>(step, rates)) * state +
                input * tile_B[i * LANES + part];
      }
#pragma unroll
      for (uint r = kPositions / kRows; r-- > 0;) {
        row_sums -= kRows * row_size;
#pragma unroll
        for (uint s = kRows; s-- > 0;) {
          const uint i = r * kRows + s;
          const float step = step_tile[i][own], input = input_tile[i][own], upper = grad_tile[i][own];
          const bool fresh = begins(numbers, params, place.batch, begin + i);
          const float4 row_B = tile_B[i * LANES + part], row_C = tile_C[i * LANES + part];
          const float4 a = (SHARED ? float4(decay_tile[SHARED ? i : 0][own]) : decay_of<T>(step, rates)),
                       decayed = a * states[i];
          const float4 now = decayed + input * row_B;
          const float4 of_state = gradient + upper * row_C;
          const float4 of_decay = of_state * decayed;
          rate_sums += of_decay * step;
          gradient = fresh ? float4(0.0f) : a * of_state;
          const float4 of_B = of_state * input, of_C = now * upper;
          float values_B[4] = {of_B.x, of_B.y, of_B.z, of_B.w}, values_C[4] = {of_C.x, of_C.y, of_C.z, of_C.w};
          strided_sums<LANES, kNeighbours, 4>(values_B, thread_index);
          strided_sums<LANES, kNeighbours, 4>(values_C, thread_index);
          const uint neighbour = own % kNeighbours;
          const uint n = part * 4 + neighbour / kCopies * kOwn;
#pragma unroll
          for (uint v = 0; v < kOwn; ++v) {
            if (neighbour % kCopies == 0) sums[0][simdgroup][s][n + v] = values_B[v];
            if (neighbour % kCopies == 0) sums[1][simdgroup][s][n + v] = values_C[v];
          }
          float values[4] = {sum(of_state * row_B), sum(of_decay * rates), sum(now * row_C), 0.0f};
          strided_sums<1, LANES, 4>(values, thread_index);
          if (part % (LANES / 4) == 0) results[part / (LANES / 4)][i][own] = values[0];
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        // Rows of the gradients of B, and behind those of all positions of C. The first of a threadgroup's tiles
        // writes.
        for (uint n = thread_index; n < 2 * kRows * kRow; n += SCAN_THREADS) {
          const uint which = n / (kRows * kRow), s = n / kRow % kRows, state_index = n % kRow;
          float total = 0.0f;
#pragma unroll
          for (uint g = 0; g < kSimdgroups; ++g) total += sums[which][g][s][state_index];
          if (begin + r * kRows + s >= place.end || state_index >= params.states) continue;
          device float* const to = row_sums + (which * positions + s) * row_size + state_index;
          *to = t == 0 ? total : *to + total;
        }
        if (r > 0) threadgroup_barrier(mem_flags::mem_threadgroup);
      }
      float of_skip[Elements::kElements], of_step[Elements::kElements];
#pragma unroll
      for (uint n = 0; n < Elements::kElements; ++n) {
        of_skip[n] = of_step[n] = 0.0f;
        if (!tile.inside(n)) continue;
        const uint p = tile.position(n), c = tile.channel(n);
        const float raw = tile.raw_step(n, steps, bias, params), input = tile.read(n, x, params.x, params.dim);
        const float upper = grad_tile[p][c], addend = params.has_skip ? skip[first + c] : 0.0f;
        of_skip[n] = upper * input;
        of_step[n] = (results[0][p][c] * input + results[1][p][c]) * step_slope(raw, params);
        const ulong to = tile.at(n, params.out, params.dim);
        gx[to] = static_cast<T>(step_tile[p][c] * results[0][p][c] + addend * upper);
        if (params.wide_steps)
          reinterpret_cast<device float*>(gsteps)[to] = of_step[n];
        else
          gsteps[to] = static_cast<T>(of_step[n]);
        if (params.has_gate)
          ggate[to] = static_cast<T>(SiluGradient<T>::forward(
              tile.read(n, gate, params.gate, params.dim),
              tile.read(n, grad, params.grad, params.dim) * (results[2][p][c] + addend * input)));
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
      for (uint n = 0; n < Elements::kElements; ++n) {
        if (tile.holds(n)) results[0][tile.position(n)][tile.channel(n)] = of_skip[n];
        if (tile.holds(n)) results[1][tile.position(n)][tile.channel(n)] = of_step[n];
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      if (thread_index < 2 * kChannels)
        for (uint i = 0; i < kPositions; ++i)
          channel_sum += results[thread_index / kChannels][i][thread_index % kChannels];
    }
    store_states(rate_sums, rate_parts + (entry * params.channels + channel) * params.states, holds, params.states,
                 part);
    const uint summed = first + thread_index % kChannels;
    if (thread_index < 2 * kChannels && summed < channels_end)
      channel_parts[(entry * 2 + thread_index / kChannels) * params.channels + summed] = channel_sum;
  }
}
INSTANTIATE_TYPES("selective_scan_back", selective_scan_back)
