// Products of 32 columns by 32 columns. Their rows pass through threadgroup memory chunk by chunk. Each simdgroup takes
// its share of a chunk's rows, and a lane holds an 8 x 4 part of the product in registers. At the end the simdgroups'
// parts are added, always in the same order.
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
