// Symmetric tridiagonal matrices: the beginning and the end of divide and conquer (scaled and split matrices, the
// eigenvectors of leaves, results in the matrices' own scale), and eigenvalues alone.
#include <metal_stdlib>
using namespace metal;

#include "scalars.h"
#include "tridiagonal.h"
#include "tridiagonal_ql.h"

constant constexpr float kLargestEntry = 0.125f;  // of entries that a scale brings to about one

// An eigenvalue, which is NaN for a matrix that is not finite: its scale is 0.
inline float in_own_scale(float value, float scale) {
  return scale > 0.0f ? value * (1.0f / kLargestEntry) * inverse_of_scale(scale) : NAN;
}

constant constexpr uint kSimdgroups = TRIDIAGONAL_THREADS / 32;

// Writes each matrix times a power of two, padded. Where it is split it loses the off-diagonal entry, whose magnitude
// is subtracted from the two diagonal entries beside it. A matrix with NaN or infinities becomes zero, with a scale of
// 0.
[[kernel]] [[max_total_threads_per_threadgroup(TRIDIAGONAL_THREADS)]] void tridiagonal_split(
    device const float* d [[buffer(0)]], device const float* e [[buffer(1)]], device float* diagonal [[buffer(2)]],
    device float* beside [[buffer(3)]], device float* scales [[buffer(4)]], constant TridiagonalParams& p [[buffer(5)]],
    uint matrix [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup uint found[kSimdgroups];
  const uint n = p.size;
  d += ulong(matrix) * n;
  e += ulong(matrix) * (n - 1);
  diagonal += ulong(matrix) * p.padded;
  beside += ulong(matrix) * p.padded;
  uint most = 0;
  for (uint i = thread_index; i < n; i += TRIDIAGONAL_THREADS)
    most = max(most, max(bits_of(d[i]), i + 1 < n ? bits_of(e[i]) : 0u));
  most = simd_max(most);
  if (thread_index % 32 == 0) found[thread_index / 32] = most;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = 0; i < kSimdgroups; ++i) most = max(most, found[i]);
  const bool is_finite = most < 0x7f800000;
  const float scale = is_finite ? scale_to_one(as_type<float>(most)) : 0.0f;
  for (uint i = thread_index; i < p.padded; i += TRIDIAGONAL_THREADS) {
    const float above = is_finite && i > 0 && i < n ? e[i - 1] * scale * kLargestEntry : 0.0f;
    const float below = is_finite && i + 1 < n ? e[i] * scale * kLargestEntry : 0.0f;
    float value = i >= n ? TRIDIAGONAL_PADDING : is_finite ? d[i] * scale * kLargestEntry : 0.0f;
    if (p.leaf > 0 && i % p.leaf == 0) value -= abs(above);
    if (p.leaf > 0 && i % p.leaf == p.leaf - 1) value -= abs(below);
    diagonal[i] = value;
    beside[i] = below;
  }
  if (thread_index == 0) scales[matrix] = scale;
}

constant constexpr uint kStride = TRIDIAGONAL_LEAF + 1;
// The eigenvectors of leaves. A simdgroup takes a leaf.
[[kernel]] [[max_total_threads_per_threadgroup(32 * TRIDIAGONAL_LEAF_SIMDGROUPS)]] void tridiagonal_leaves(
    device const float* diagonal [[buffer(0)]], device const float* beside [[buffer(1)]],
    device float* values [[buffer(2)]], device float* eigenvectors [[buffer(3)]],
    constant TridiagonalParams& p [[buffer(4)]], uint group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float memory[TRIDIAGONAL_LEAF_SIMDGROUPS * TRIDIAGONAL_LEAF * kStride];
  const uint leaf = group * TRIDIAGONAL_LEAF_SIMDGROUPS + simdgroup;
  if (leaf >= p.matrices * (p.padded / p.leaf)) return;
  const uint n = p.leaf;
  threadgroup float* const z = memory + (simdgroup * TRIDIAGONAL_LEAF + lane) * kStride;
  for (uint i = 0; i < n; ++i) z[i] = i == lane ? 1.0f : 0.0f;
  const ulong at = ulong(leaf) * n;
  float d = lane < n ? diagonal[at + lane] : 0.0f;
  const float e = lane + 1 < n ? beside[at + lane] : 0.0f;

  tridiagonal_ql<true>(d, e, n, lane, z);
  const uint rank = rank_among(d, n, lane);
  simdgroup_barrier(mem_flags::mem_threadgroup);
  if (lane >= n) return;
  values[at + rank] = d;
  for (uint i = 0; i < n; ++i)
    eigenvectors[(at + i) * n + rank] = memory[(simdgroup * TRIDIAGONAL_LEAF + i) * kStride + lane];
}

// Writes the eigenvalues in the matrix's own scale, and the eigenvectors where they are padded or the matrix was not
// finite. A threadgroup takes a row of each of the matrices.
[[kernel]] [[max_total_threads_per_threadgroup(TRIDIAGONAL_THREADS)]] void tridiagonal_results(
    device const float* values [[buffer(0)]], device const float* scales [[buffer(1)]],
    device const float* eigenvectors [[buffer(2)]], device float* w [[buffer(3)]], device float* q [[buffer(4)]],
    constant TridiagonalParams& p [[buffer(5)]], uint2 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  const uint matrix = group.y, n = p.size;
  const float scale = scales[matrix];
  if (group.x == 0)
    for (uint i = thread_index; i < n; i += TRIDIAGONAL_THREADS)
      w[ulong(matrix) * n + i] = in_own_scale(values[ulong(matrix) * p.padded + i], scale);
  if (p.copies == 0 && scale > 0.0f) return;
  device const float* const from = eigenvectors + (ulong(matrix) * p.padded + group.x) * p.padded;
  device float* const to = q + (ulong(matrix) * n + group.x) * n;
  for (uint i = thread_index; i < n; i += TRIDIAGONAL_THREADS) to[i] = scale > 0.0f ? from[i] : NAN;
}

// Eigenvalues alone, by bisection with Sturm's counts (Givens 1954; Kahan 1966).
//
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
