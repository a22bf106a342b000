// Arguments of the symmetric rank-k update, shared with the host. Strides are in elements.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

// A threadgroup computes a square of the result, SYRK_TILE on a side.
#define SYRK_TILE 64
#define SYRK_THREADS 128

// What the kernel does with a triangle of the result.
#define SYRK_LEAVE 0u
#define SYRK_WRITE 1u
#define SYRK_ZERO 2u

// result = alpha A Aᵀ + beta C for n x k matrices A. Columns of the result are one element apart. C is not read if beta
// is 0, and may be the result's memory.
struct SyrkParams {
  int64_t a_batch, a_row, a_column;
  int64_t c_batch, c_row, c_column;
  int64_t result_batch, result_row;
  uint32_t n, k;
  uint32_t as_float4;     // A's rows, or its columns where a_row is 1, can be read as float4
  uint32_t tiles;         // tiles of one triangle of the result
  uint32_t lower, upper;  // the diagonal belongs to both
  float alpha, beta;
};
