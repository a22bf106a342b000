// Two-sided Jacobi of the 32 x 32 Gram matrix of a pair of blocks, one sweep: in each of 31 rounds 16 rotations at once, of
// the columns p and p ^ round. Small relative to the diagonal is what counts (Demmel and Veselić 1992), so that columns of
// very different length become orthogonal too. The longer of two columns goes first (de Rijk 1989).
#pragma once

#include <metal_stdlib>

#include "jacobi_tile.h"

constant constexpr uint kRotationStride = 36;  // of the rotation in threadgroup memory: rows begin at a float4
constant constexpr float kZeroSquare = 0x1p-60f;  // a column with less than this is taken as zero, and filled anew

// A rotation of columns p and q, by an angle of at most 45 degrees, after which they may change places:
// p' = c p + s q, q' = c q - s p, or p' = c q - s p, q' = -(c p + s q).
struct Rotation {
  float s, versine;  // 1 - c, which c in float would round
  bool swap;

  // As p' = a p + b q, q' = a q - b p.
  float2 factors() const {
    const float c = 1.0f - versine;
    return swap ? float2(-s, c) : float2(c, s);
  }
};

inline Rotation rotation_of(float pp, float qq, float pq, float tolerance) {
  float s = 0.0f, versine = 0.0f, change = 0.0f;  // of pp, and of qq with the other sign
  if (metal::abs(pq) > tolerance * (metal::precise::sqrt(pp) * metal::precise::sqrt(qq))) {
    const float zeta = (pp - qq) / (2.0f * pq);
    const float size = metal::abs(zeta);
    const float tangent = size > 1e9f ? 0.5f / size : 1.0f / (size + metal::precise::sqrt(metal::fma(size, size, 1.0f)));
    const float t = metal::copysign(tangent, zeta);
    const float secant = metal::precise::sqrt(metal::fma(t, t, 1.0f));
    s = t / secant;
    versine = t * s / (secant + 1.0f);
    change = t * pq;
  }
  return {s, versine, pp >= kZeroSquare && pp + change < qq - change};
}

// What a Gram matrix says of its columns.
struct PairState {
  float off;    // the largest |xᵀy| / (‖x‖ ‖y‖); 1 where a column is zero
  bool active;  // whether there is anything to do: rotate, sort, or fill a column
  uint zero;    // bit i: column i is zero; it is not moved
};

inline PairState state_of(threadgroup const float* gram, threadgroup float* work, float tolerance, uint thread_index) {
  const uint lane = thread_index % 32, simdgroup = thread_index / 32;
  const float qq = gram[lane * kProductStride + lane];
  const uint zero = metal::simd_or(qq < kZeroSquare ? 1u << lane : 0u);
  float off = zero != 0 ? 1.0f : 0.0f;
  bool unsorted = false;
#pragma unroll
  for (uint i = 0; i < 1024 / JACOBI_THREADS; ++i) {
    const uint p = i * (JACOBI_THREADS / 32) + simdgroup;
    const float pp = gram[p * kProductStride + p];
    const float cosine = metal::abs(gram[p * kProductStride + lane]) / (metal::precise::sqrt(pp) * metal::precise::sqrt(qq));
    off = p < lane && pp >= kZeroSquare && qq >= kZeroSquare && cosine > off ? cosine : off;
    unsorted = unsorted || (p < lane && pp < qq);
  }
  off = metal::simd_max(off);
  const uint some = metal::simd_max(unsorted ? 1u : 0u);
  if (lane == 0) work[simdgroup] = off, work[8 + simdgroup] = some ? 1.0f : 0.0f;
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  float most = work[0], anywhere = work[8];
#pragma unroll
  for (uint i = 1; i < JACOBI_THREADS / 32; ++i) most = metal::max(most, work[i]), anywhere += work[8 + i];
  return {most, anywhere > 0.0f || most > tolerance, zero};
}

// Leaves in `rotation` the product of all rotations; `other` is of the size of `gram`, and both are used up. A thread has
// 2 x 2 entries of the Gram matrix, rows of rotation pair `left`, columns of `right`.
inline void diagonalize(threadgroup float* gram, threadgroup float* other, threadgroup float* rotation, uint rounds,
                        float tolerance, uint thread_index) {
  const uint lane = thread_index % 32;
  const uint left = thread_index / 16, right = thread_index % 16;
#pragma unroll
  for (uint i = 0; i < 1024 / JACOBI_THREADS; ++i) {
    const uint at = i * JACOBI_THREADS + thread_index;
    rotation[at / 32 * kRotationStride + lane] = at / 32 == lane ? 1.0f : 0.0f;
  }
  for (uint round = 1; round <= rounds; ++round) {
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    threadgroup const float* const from = round % 2 ? gram : other;
    threadgroup float* const to = round % 2 ? other : gram;
    const uint bit = 1u << (31 - metal::clz(round));  // of p and q = p ^ round only q has it
    const uint low = bit - 1;
    const uint p = (right & low) | (right & ~low) << 1, q = p ^ round;
    const uint row_p = (left & low) | (left & ~low) << 1, row_q = row_p ^ round;

    const float pq = from[p * kProductStride + q];
    const Rotation own = rotation_of(from[p * kProductStride + p], from[q * kProductStride + q], pq, tolerance);
    const float2 r = own.factors();
    const float2 l = float2(metal::simd_shuffle(r.x, left), metal::simd_shuffle(r.y, left));

    const float pp = from[row_p * kProductStride + p], ppq = from[row_p * kProductStride + q];
    const float qp = from[row_q * kProductStride + p], qq = from[row_q * kProductStride + q];
    const float a = metal::fma(r.x, pp, r.y * ppq), b = metal::fma(r.x, ppq, -r.y * pp);
    const float c = metal::fma(r.x, qp, r.y * qq), d = metal::fma(r.x, qq, -r.y * qp);
    to[row_p * kProductStride + p] = metal::fma(l.x, a, l.y * c);
    to[row_p * kProductStride + q] = metal::fma(l.x, b, l.y * d);
    to[row_q * kProductStride + p] = metal::fma(l.x, c, -l.y * a);
    to[row_q * kProductStride + q] = metal::fma(l.x, d, -l.y * b);

    // Small changes are added as such: c rounded to one would let the rotation's columns grow, time after time.
#pragma unroll
    for (uint i = 0; i < 2; ++i) {
      threadgroup float* const row = rotation + (left + 16 * i) * kRotationStride;
      const float x = row[p], y = row[q];
      const float x_to = x + metal::fma(own.s, y, -own.versine * x), y_to = y - metal::fma(own.s, x, own.versine * y);
      row[p] = own.swap ? y_to : x_to;
      row[q] = own.swap ? -x_to : y_to;
    }
  }
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
}
