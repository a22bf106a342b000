// From complex tridiagonal matrices to real ones, Dᴴ T D with a diagonal D of phases, and the eigenvectors' way back.
#include <metal_stdlib>
using namespace metal;

#include "scalars.h"
#include "tridiagonalize.h"

inline float2 phase_of(float2 value, float size) { return size > 0.0f ? value / size : float2(1.0f, 0.0f); }

// Writes the magnitudes of the entries beside the diagonal, and D, whose entries are the products of the phases of the
// entries before them. A simdgroup takes a matrix, and a lane some entries in a row.
[[kernel]] [[max_total_threads_per_threadgroup(32)]] void tridiagonal_phases(
    device const float2* complex_beside [[buffer(0)]], device float* beside [[buffer(1)]],
    device float2* phases [[buffer(2)]], constant TridiagonalPhasesParams& p [[buffer(3)]],
    uint matrix [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]]) {
  const uint n = p.size, count = (n + 31) / 32, first = min(lane * count, n - 1), end = min(first + count, n - 1);
  complex_beside += ulong(matrix) * (n - 1);
  beside += ulong(matrix) * (n - 1);
  phases += ulong(matrix) * n;
  float2 product = float2(1.0f, 0.0f);
  for (uint i = first; i < end; ++i) {
    const float2 value = complex_beside[i];
    const float size = hypotenuse(value.x, value.y);
    beside[i] = size;
    product = times(product, phase_of(value, size));
  }
  float2 before = float2(1.0f, 0.0f);
  for (uint i = 0; i < 31; ++i) {
    const float2 of_lane = simd_shuffle(product, ushort(i));
    if (i < lane) before = times(before, of_lane);
  }
  before = phase_of(before, hypotenuse(before.x, before.y));
  if (lane == 0) phases[0] = before;
  for (uint i = first; i < end; ++i) {
    before = times(before, phase_of(complex_beside[i], beside[i]));
    phases[i + 1] = before;
  }
}

// Writes D Z of real eigenvectors Z: rows of real parts, each followed by the imaginary parts.
[[kernel]] [[max_total_threads_per_threadgroup(TRIDIAGONAL_PHASES_THREADS)]] void tridiagonal_turn(
    device const float* z [[buffer(0)]], device const float2* phases [[buffer(1)]], device float* out [[buffer(2)]],
    constant TridiagonalPhasesParams& p [[buffer(3)]], uint row [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  const float2 phase = phases[row];
  for (uint i = thread_index; i < p.size; i += TRIDIAGONAL_PHASES_THREADS) {
    const float value = z[ulong(row) * p.size + i];
    out[(2 * ulong(row)) * p.size + i] = phase.x * value;
    out[(2 * ulong(row) + 1) * p.size + i] = phase.y * value;
  }
}

// Joins such rows to complex ones.
[[kernel]] [[max_total_threads_per_threadgroup(TRIDIAGONAL_PHASES_THREADS)]] void tridiagonal_join(
    device const float* parts [[buffer(0)]], device float2* out [[buffer(1)]],
    constant TridiagonalPhasesParams& p [[buffer(2)]], uint row [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  for (uint i = thread_index; i < p.size; i += TRIDIAGONAL_PHASES_THREADS)
    out[ulong(row) * p.size + i] =
        float2(parts[(2 * ulong(row)) * p.size + i], parts[(2 * ulong(row) + 1) * p.size + i]);
}
