// Sums over lanes at fewer exchanges than one after the other.
#pragma once

#include <metal_stdlib>

// Sums the first COUNT values, a power of two, over each group of LANES lanes: half of the lanes go on with half of the
// values. Lane i of a group gets the sums of the values from i * COUNT / LANES on, COUNT / LANES of them or one.
template <uint LANES, uint COUNT, uint N>
inline void lanes_sums(thread float (&values)[N], uint lane) {
  if constexpr (LANES > 1) {
    constexpr ushort across = LANES / 2;
    constexpr uint kept = COUNT > 1 ? COUNT / 2 : 1;
    const bool upper = lane & across;
#pragma unroll
    for (uint i = 0; i < kept; ++i) {
      const float low = values[i], high = COUNT > 1 ? values[(i + kept) % N] : low;
      values[i] = (upper ? high : low) + metal::simd_shuffle_xor(upper ? low : high, across);
    }
    lanes_sums<LANES / 2, kept>(values, lane);
  }
}
