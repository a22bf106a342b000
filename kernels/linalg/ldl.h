// Arguments of the kernels of ldl_factor and ldl_solve, shared with the host. Strides are in elements, and results are
// contiguous.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

// The largest matrices of a simdgroup, of a threadgroup in its memory, and in device memory. The last two have threads.
#define LDL_SIMD 32
#define LDL_BLOCK 64
#define LDL_COMPLEX_BLOCK 60
#define LDL_BLOCK_THREADS 128
#define LDL_DEVICE 1024
#define LDL_DEVICE_THREADS 256
// Matrices in a threadgroup of the kernels that give a simdgroup to each.
#define LDL_SIMDGROUPS 4
#define LDL_COMPLEX_SIMDGROUPS 2

struct LdlParams {
  int64_t batch_stride, row_stride, column_stride;  // A's
  uint32_t matrices, size;
  uint32_t hermitian;
};

// Columns of B that a simdgroup or a threadgroup solves for.
#define LDL_TILE 4

struct LdlSolveParams {
  int64_t ld_batch, ld_row, ld_column;
  int64_t b_batch, b_row, b_column;
  uint32_t matrices, size;
  uint32_t columns, tiles;  // of B
  uint32_t hermitian;
};
