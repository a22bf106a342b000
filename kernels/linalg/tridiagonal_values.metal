// Eigenvalues alone, by bisection with Sturm's counts (Givens 1954; Kahan 1966).
#include <metal_stdlib>
using namespace metal;

#include "tridiagonal.h"
#include "tridiagonal_scale.h"

// LANES threads of a simdgroup have an eigenvalue, and divide the interval that holds it into LANES + 1 parts at a
// time. After the last step it is shorter than 2^-28 times the largest entry. All eigenvalues of a matrix have the same
// first interval, so that the results ascend.
template <uint LANES, uint STEPS>
[[kernel]] [[max_total_threads_per_threadgroup(TRIDIAGONAL_THREADS)]] void tridiagonal_bisect(
    device const float* diagonal [[buffer(0)]], device const float* beside [[buffer(1)]],
    device const float* scales [[buffer(2)]], device float* w [[buffer(3)]],
    constant TridiagonalParams& p [[buffer(4)]], uint2 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  constexpr float kLeast = 0x1p-100f;  // of a pivot's magnitude
  threadgroup float2 part[TRIDIAGONAL_THREADS];
  const uint matrix = group.y, n = p.size, lane = thread_index % LANES;
  const uint own = (group.x * TRIDIAGONAL_THREADS + thread_index) / LANES;
  diagonal += ulong(matrix) * p.padded;
  beside += ulong(matrix) * p.padded;
  float low = -1.0f, high = 1.0f;
  for (uint step = 0; step < STEPS; ++step) {
    const float share = (high - low) * (1.0f / float(LANES + 1));
    const float point = fma(share, float(lane + 1), low);
    float pivot = 1.0f;
    uint below = 0;
    for (uint first = 0; first < n; first += TRIDIAGONAL_THREADS) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
      const uint i = first + thread_index;
      const float coupling = i > 0 && i < n ? beside[i - 1] : 0.0f;
      part[thread_index] = i < n ? float2(diagonal[i], coupling * coupling) : float2(0.0f);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      const uint count = min(n - first, uint(TRIDIAGONAL_THREADS));
      for (uint k = 0; k < count; ++k) {
        pivot = part[k].x - point - part[k].y / pivot;
        if (abs(pivot) < kLeast) pivot = -kLeast;
        below += pivot < 0.0f ? 1 : 0;
      }
    }
    const uint all = static_cast<uint>(static_cast<simd_vote::vote_t>(simd_ballot(below > own)));
    const uint above = all >> (thread_index % 32 - lane) | 1u << LANES;
    const uint parts = ctz(above);  // that lie below the eigenvalue's
    const float start = low;
    low = parts > 0 ? fma(share, float(parts), start) : low;
    high = parts < LANES ? fma(share, float(parts + 1), start) : high;
  }
  if (lane == 0 && own < n) w[ulong(matrix) * n + own] = in_own_scale(0.5f * (low + high), scales[matrix]);
}

#define INSTANTIATE(lanes, steps)                                                                                \
  template [[host_name("tridiagonal_bisect_" #lanes)]] [[kernel]] void tridiagonal_bisect<lanes, steps>(         \
      device const float*, device const float*, device const float*, device float*, constant TridiagonalParams&, \
      uint2, uint);

INSTANTIATE(1, 32)
INSTANTIATE(16, 8)
