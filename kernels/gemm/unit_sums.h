// Activations of the sums that units made.
#pragma once

#include "gemm/epilogue.h"

// In unrolled loops the sums stay in registers. Long activations take a copy, which may be in memory, so that the
// compiler has one of them and not as many as there are sums.
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
    Sums held;
#pragma unroll
    for (ushort i = 0; i < sums.get_capacity(); ++i) held[i] = sums[i];
#pragma unroll 16
    for (ushort i = 0; i < sums.get_capacity(); ++i) held[i] = activated<T>(held[i], activation);
#pragma unroll
    for (ushort i = 0; i < sums.get_capacity(); ++i) sums[i] = held[i];
  }
}
