// The beginning and the end of divide and conquer: scaled and split matrices, the eigenvectors of leaves, and the
// results in the matrices' own scale.
#include <metal_stdlib>
using namespace metal;

#include "tridiagonal.h"
#include "tridiagonal_scale.h"

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
constant constexpr uint kMostSteps = 60;          // for an eigenvalue; 2 are usual
constant constexpr float kNegligible = 0x1p-40f;  // an off-diagonal entry that is small beside the matrix's norm
constant constexpr float kSmall = 0x1p-50f, kLift = 0x1p60f;

// A rotation that makes (f, g) into (0, length).
struct Turn {
  float sine, cosine, length;
};
inline Turn turn_of(float f, float g) {
  const float lift = max(abs(f), abs(g)) < kSmall ? kLift : 1.0f;  // squares would be subnormal
  f *= lift, g *= lift;
  const float length = precise::sqrt(fma(f, f, g * g));
  if (length == 0.0f) return {0.0f, 1.0f, 0.0f};
  return {f / length, g / length, length / lift};
}

// Implicit QL (Dubrulle 1970) by a simdgroup, for leaves of up to 32 rows. A lane holds an entry of the diagonal and
// the entry below it, and owns a row of the eigenvectors.
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
  float e = lane + 1 < n ? beside[at + lane] : 0.0f;

  for (uint l = 0; l + 1 < n; ++l) {
    for (uint step = 0; step < kMostSteps; ++step) {
      const float scale = abs(d) + abs(simd_shuffle_down(d, 1));
      const bool ends = lane >= l && (lane + 1 >= n || abs(e) <= max(0.5f * FLT_EPSILON * scale, kNegligible));
      const uint m = ctz(static_cast<uint>(static_cast<simd_vote::vote_t>(simd_ballot(ends))));
      if (m == l) break;
      const float d_l = simd_shuffle(d, ushort(l)), e_l = simd_shuffle(e, ushort(l));
      float g = (simd_shuffle(d, ushort(l + 1)) - d_l) / (2.0f * e_l);
      const float root = hypotenuse(g, 1.0f);
      g = simd_shuffle(d, ushort(m)) - d_l + e_l / (g + copysign(root, g));
      float sine = 1.0f, cosine = 1.0f, shift = 0.0f;
      float carried = z[m];
      for (uint i = m; i-- > l;) {
        const float e_i = simd_shuffle(e, ushort(i)), d_i = simd_shuffle(d, ushort(i));
        const float above = simd_shuffle(d, ushort(i + 1));
        const float b = cosine * e_i;
        const Turn turn = turn_of(sine * e_i, g);
        if (lane == i + 1) e = turn.length;
        sine = turn.sine, cosine = turn.cosine;
        g = above - shift;
        const float r = (d_i - g) * sine + 2.0f * cosine * b;
        shift = sine * r;
        if (lane == i + 1) d = g + shift;
        g = cosine * r - b;
        const float other = z[i];
        z[i + 1] = fma(sine, other, cosine * carried);
        carried = fma(cosine, other, -sine * carried);
      }
      z[l] = carried;
      if (lane == l) d -= shift, e = g;
      if (lane == m) e = 0.0f;
    }
  }

  uint rank = 0;
  for (uint i = 0; i < n; ++i) {
    const float other = simd_shuffle(d, ushort(i));
    rank += other < d || (other == d && i < lane) ? 1 : 0;
  }
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
