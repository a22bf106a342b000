// Arguments of the steps that several decompositions have in common, shared with the host. Strides are in elements.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

// A batch whose matrices are each multiplied by a power of two that brings the largest entry to about one, so that the
// norms of a QR decomposition neither overflow nor lose digits. (LAPACK's gesvd and gels scale matrices that leave a
// narrower range.) `parts` threadgroups share a matrix, part_rows rows each.
#define SCALE_THREADS 256
struct ScaleParams {
  int64_t batch_stride, row_stride, column_stride;
  uint32_t matrices;
  uint32_t rows, columns;
  uint32_t parts, part_rows;
};

// syrk.metal, the symmetric rank-k update.
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
  uint32_t tiles;         // tiles of one triangle of the result, in its first `across` columns of tiles
  uint32_t across;        // 0 for the host's function: all of them
  uint32_t lower, upper;  // the diagonal belongs to both
  float alpha, beta;
};

// info.metal, the search for failures in the infos of a batch.
// The number of infos that a threadgroup reads.
#define INFO_BLOCK 4096
#define INFO_THREADS 1024  // at most
