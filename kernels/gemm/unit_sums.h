// Activations of the sums that units made.
#pragma once

#include "gemm/epilogue.h"

// In unrolled loops the sums stay in registers. Long activations take a copy of some sums at a time, which may be in
// memory and then stays in caches, so that the compiler has few of them and not as many as there are sums.
template <typename T, typename Sums>
inline void activate(thread Sums& sums, uint activation) {
  if (activation == 0) return;
  if (activation == GEMM_RELU) {
#pragma unroll
    for (ushort i = 0; i < sums.get_capacity(); ++i) sums[i] = activated<T>(sums[i], GEMM_RELU);
  } else if (activation == GEMM_SILU) {
#pragma unroll
    for (ushort i = 0; i < sums.get_capacity(); ++i) sums[i] = activated<T>(sums[i], GEMM_SILU);
  } else {
    constexpr ushort kHeld = 32;
    float held[kHeld];
#pragma unroll
    for (ushort first = 0; first < sums.get_capacity(); first += kHeld) {
#pragma unroll
      for (ushort i = 0; i < kHeld; ++i) held[i] = first + i < sums.get_capacity() ? sums[first + i] : 0.0f;
#pragma unroll 4
      for (ushort i = 0; i < kHeld; ++i) held[i] = activated<T>(held[i], activation);
#pragma unroll
      for (ushort i = 0; i < kHeld; ++i)
        if (first + i < sums.get_capacity()) sums[first + i] = held[i];
    }
  }
}
