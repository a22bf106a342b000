// Arguments of the kernels of matrix_exp, shared with the host. Strides are in elements, and results are contiguous.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

// The columns of the largest matrices, and the simdgroups of a threadgroup for 8, 16 or 32 columns.
#define MATRIX_EXP_COLUMNS 32
#define MATRIX_EXP_COMPLEX_COLUMNS 16
#define MATRIX_EXP_SIMDGROUPS_8 4
#define MATRIX_EXP_SIMDGROUPS_16 2
#define MATRIX_EXP_SIMDGROUPS_32 1
// The columns of the largest real matrices of a threadgroup. Complex ones have half as many.
#define MATRIX_EXP_BLOCK_COLUMNS 64
#define MATRIX_EXP_COMPLEX_SIMDGROUPS 1

struct MatrixExpParams {
  int64_t batch_stride, row_stride, column_stride;  // A's
  uint32_t matrices, size;
};
