// Arguments of the kernels of svd, shared with the host. Strides are in elements.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

// The strides of a batch of matrices.
struct SvdMatrices {
  int64_t batch_stride, row_stride, column_stride;
};

// A batch of rows x columns matrices, rows >= columns. Wide matrices are given transposed, with the results exchanged.
// `left` has the singular vectors of length `rows` as columns, `right` those of length `columns` as rows. Singular
// values are contiguous.
struct SvdParams {
  SvdMatrices a, left, right;
  uint32_t matrices;
  uint32_t rows, columns;
  uint32_t scaled;  // whether A is multiplied by a scale, by which the values must be divided
};

// A batch whose columns are sorted.
#define SVD_ORDER_THREADS 256  // in a threadgroup
struct SvdOrderParams {
  SvdMatrices a;
  uint32_t matrices;
  uint32_t rows, columns;
};

// out = a b for rows x inner and inner x inner matrices. Further columns of a, if it has any, are copied.
#define SVD_MULTIPLY_TILE 32
struct SvdMultiplyParams {
  SvdMatrices a, b, out;
  uint32_t rows, inner, columns;
  uint32_t row_tiles, column_tiles;
};
