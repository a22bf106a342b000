// Sums of many terms, and sums over lanes at fewer exchanges than one after the other.
#pragma once

#include <metal_stdlib>

using namespace metal;

// A running sum that carries what an addition rounds off into the next one, so that its error does not grow with the
// number of terms. Source: Kahan, "Further remarks on reducing truncation errors", 1965; Knuth's exact error of a sum
// (The Art of Computer Programming 2, 4.2.2). Threads add blocks of terms, where what it costs does not count. Each
// number of V is summed by itself.
template <typename V>
struct LongSum {
  V sum = V(0.0f);
  V lost = V(0.0f);

  void add(V term) {
    const V all = term + lost;
    const V next = sum + all;
    const V part = next - sum;
    const V rest = (sum - (next - part)) + (all - part);
    lost = select(V(0.0f), rest, rest == rest);  // an infinite sum has lost NaN
    sum = next;
  }
  void scale(V factor) {
    sum *= factor;
    lost *= factor;
  }
  V total() const { return sum + lost; }
};

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
