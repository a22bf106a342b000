// A pair of blocks of 32 columns: products of 32 columns by 32 columns, the rotation that makes their 32 x 32 Gram
// matrix diagonal, and the end of the sweeps.
//
// Rows pass through threadgroup memory chunk by chunk. Each simdgroup takes its share of a chunk's rows, and a lane
// holds an 8 x 4 part of the product in registers. At the end the simdgroups' parts are added, always in the same
// order.
#pragma once

#include <metal_stdlib>

#include "spectral.h"

// A chunk of ROWS rows of 32 columns. A column is ROWS / 4 float4, and one more that spreads columns over memory's
// banks.
template <uint ROWS>
struct Chunk {
  static constexpr constant uint kQuads = ROWS / 4;
  static constexpr constant uint kStride = kQuads + 1;
  static constexpr constant uint kSize = JACOBI_PAIR * kStride;            // float4
  static constexpr constant uint kShare = kQuads / (JACOBI_THREADS / 32);  // quads of a simdgroup
};

constant constexpr uint kProductStride = JACOBI_PAIR + 1;  // the stride of a 32 x 32 product in threadgroup memory
constant constexpr uint kProductSize = JACOBI_PAIR * kProductStride;

struct ProductPart {
  float sums[32];  // rows lane / 8 + 4 r, columns lane % 8 + 8 c, at 4 r + c
};

inline void clear(thread ProductPart& part) {
#pragma unroll
  for (uint i = 0; i < 32; ++i) part.sums[i] = 0.0f;
}

// Adds Aᵀ B for the rows in this simdgroup's share.
template <uint ROWS>
inline void multiply(thread ProductPart& part, threadgroup const float4* a, threadgroup const float4* b, uint lane,
                     uint simdgroup) {
  typedef Chunk<ROWS> C;
#pragma unroll 1
  for (uint i = 0; i < C::kShare; ++i) {
    const uint quad = simdgroup * C::kShare + i;
    float4 right[4];
#pragma unroll
    for (uint c = 0; c < 4; ++c) right[c] = b[(lane % 8 + 8 * c) * C::kStride + quad];
#pragma unroll
    for (uint r = 0; r < 8; ++r) {
      const float4 left = a[(lane / 8 + 4 * r) * C::kStride + quad];
#pragma unroll
      for (uint c = 0; c < 4; ++c) {
        float sum = metal::fma(left.x, right[c].x, part.sums[4 * r + c]);
        sum = metal::fma(left.y, right[c].y, sum);
        sum = metal::fma(left.z, right[c].z, sum);
        part.sums[4 * r + c] = metal::fma(left.w, right[c].w, sum);
      }
    }
  }
}

// The place in a 32 x 32 product of entry i of a lane's part.
inline uint product_place(uint i, uint lane) {
  return (lane / 8 + 4 * (i / 4)) * kProductStride + lane % 8 + 8 * (i % 4);
}

// Sums all parts in `product`; a and b have 2 * 1024 floats. It begins and ends with a barrier.
inline void add_parts(thread const ProductPart& part, threadgroup float* a, threadgroup float* b,
                      threadgroup float* product, uint thread_index) {
  const uint lane = thread_index % 32, simdgroup = thread_index / 32;
  threadgroup float* const own_part = (simdgroup % 4 < 2 ? a : b) + simdgroup % 2 * 1024 + lane;
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  if (simdgroup >= 4) {
#pragma unroll
    for (uint i = 0; i < 32; ++i) own_part[32 * i] = part.sums[i];
  }
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  if (simdgroup < 4) {
#pragma unroll
    for (uint i = 0; i < 32; ++i) own_part[32 * i] += part.sums[i];
  }
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
#pragma unroll
  for (uint i = 0; i < 1024 / JACOBI_THREADS; ++i) {
    const uint at = i * JACOBI_THREADS + thread_index;
    product[product_place(at / 32, lane)] = (a[at] + a[1024 + at]) + (b[at] + b[1024 + at]);
  }
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
}

// One sweep of two-sided Jacobi on the 32 x 32 Gram matrix of a pair of blocks. Each of its 31 rounds makes 16
// rotations at once, of the columns p and p ^ round. Entries are compared with the diagonal (Demmel and Veselić 1992),
// so that columns of very different lengths become orthogonal too. The longer of two columns becomes the first (de Rijk
// 1989).
constant constexpr uint kRotationStride = 36;  // the rotation's stride: its rows are aligned to float4
// A column whose square is below this counts as zero and keeps its values and its place. Products of other columns are
// far from subnormal numbers, which fast::divide may treat as zero.
constant constexpr float kZeroSquare = 0x1p-60f;

// A cosine above one shows that cancellation has left too few correct digits of a column. Then the rotation ends: the
// next Gram matrix has these digits again.
constant constexpr float kMostCosine = 1.001f;

// A rotation of columns p and q by at most 45 degrees, after which they may change places: p' = a p + b q, q' = a q - b
// p. It is given as a, b, 1 - c for the cosine c, and 1 if they change places. The angle need not be exact to the last
// bit. The result must be a rotation, so 1 - c is computed from the sine.
inline float4 rotation_of(float pp, float qq, float pq, float tolerance) {
  float s = 0.0f, versine = 0.0f, change = 0.0f;  // the change of pp; qq's has the other sign
  const float cosine = metal::abs(pq) * metal::rsqrt(pp) * metal::rsqrt(qq);
  if (metal::min(pp, qq) >= kZeroSquare && cosine > tolerance && cosine < kMostCosine) {
    const float zeta = metal::fast::divide(0.5f * (pp - qq), pq), size = metal::abs(zeta);
    const float root = metal::fma(size, size, 1.0f);
    const float tangent =
        metal::fast::divide(1.0f, size > 1e9f ? 2.0f * size : metal::fma(root, metal::rsqrt(root), size));
    const float t = metal::copysign(tangent, zeta);
    s = t * metal::rsqrt(metal::fma(t, t, 1.0f));
    const float square = s * s, rest = 1.0f - square;
    versine = metal::fast::divide(square, 1.0f + rest * metal::rsqrt(rest));
    versine = metal::fma(0.5f, metal::fma(-versine, 2.0f - versine, square), versine);
    change = t * pq;
  }
  const bool swap = pp >= kZeroSquare && pp + change < qq - change;
  const float c = 1.0f - versine;
  return float4(swap ? -s : c, swap ? c : s, versine, swap ? 1.0f : 0.0f);
}

// Leaves the product of all rotations in `product`, and overwrites `gram` and the 16 `rotations`. A thread has 2 x 2
// entries of the Gram matrix, in the rows of rotation `left` and the columns of rotation `right`.
inline void diagonalize(threadgroup float* gram, threadgroup float* product, threadgroup float4* rotations, uint rounds,
                        float tolerance, uint thread_index) {
  const uint lane = thread_index % 32, left = thread_index / 16, right = thread_index % 16;
#pragma unroll
  for (uint i = 0; i < 1024 / JACOBI_THREADS; ++i) {
    const uint row = i * (JACOBI_THREADS / 32) + thread_index / 32;
    product[row * kRotationStride + lane] = row == lane ? 1.0f : 0.0f;
  }
  for (uint round = 1; round <= rounds; ++round) {
    const uint low = (1u << (31 - metal::clz(round))) - 1;  // only q = p ^ round has the bit above, p does not
    const uint p = (right & low) | (right & ~low) << 1, q = p ^ round;
    const uint row_p = ((left & low) | (left & ~low) << 1) * kProductStride;
    const uint row_q = (((left & low) | (left & ~low) << 1) ^ round) * kProductStride;
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    if (thread_index < 16) {
      const float4 found = rotation_of(gram[p * (kProductStride + 1)], gram[q * (kProductStride + 1)],
                                       gram[p * kProductStride + q], tolerance);
      rotations[right] = found;
    }
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    const float4 r = rotations[right];
    const float a = r.x, b = r.y, versine = r.z, s = r.w > 0.0f ? -a : b;
    const float2 l = rotations[left].xy;

    const float pp = gram[row_p + p], pq = gram[row_p + q], qp = gram[row_q + p], qq = gram[row_q + q];
    const float pp_to = metal::fma(a, pp, b * pq), pq_to = metal::fma(a, pq, -b * pp);
    const float qp_to = metal::fma(a, qp, b * qq), qq_to = metal::fma(a, qq, -b * qp);
    gram[row_p + p] = metal::fma(l.x, pp_to, l.y * qp_to);
    gram[row_p + q] = metal::fma(l.x, pq_to, l.y * qq_to);
    gram[row_q + p] = metal::fma(l.x, qp_to, -l.y * pp_to);
    gram[row_q + q] = metal::fma(l.x, qq_to, -l.y * pq_to);

    // Small changes are added separately: with a cosine rounded to one the columns would grow at every rotation.
#pragma unroll
    for (uint i = 0; i < 2; ++i) {
      threadgroup float* const row = product + (left + 16 * i) * kRotationStride;
      const float x = row[p], y = row[q];
      const float x_to = x + metal::fma(s, y, -versine * x), y_to = y - metal::fma(s, x, versine * y);
      row[p] = r.w > 0.0f ? y_to : x_to;
      row[q] = r.w > 0.0f ? -x_to : y_to;
    }
  }
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
}

// How far from orthogonal a matrix's columns were in a sweep, as the bits of a float that is not negative.
inline device metal::atomic_uint* off_of(device metal::atomic_uint* off, constant JacobiRoundParams& p, uint matrix) {
  return off + ulong(matrix) * p.jacobi.sweeps + p.sweep;
}

inline bool converged(device metal::atomic_uint* off, constant JacobiRoundParams& p, uint matrix) {
  if (p.sweep == 0) return false;
  const uint before = metal::atomic_load_explicit(off_of(off, p, matrix) - 1, metal::memory_order_relaxed);
  return as_type<float>(before) <= 2.0f * p.jacobi.tolerance;
}
