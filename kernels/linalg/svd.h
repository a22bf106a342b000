// Arguments of the kernels of svd, shared with the host. Strides are in elements.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

// Where a batch of matrices lies.
struct SvdMatrices {
  int64_t batch_stride, row_stride, column_stride;
};

// A batch of rows x columns matrices, rows >= columns: wide ones are given transposed, with the results exchanged.
// Left are the singular vectors of length `rows`, one a column; right those of length `columns`, one a row. Singular
// values are contiguous.
struct SvdParams {
  SvdMatrices a, left, right;
  uint32_t matrices;
  uint32_t rows, columns;
  uint32_t scaled;  // whether A comes multiplied by a scale, which is to be taken out of the values
};

// A batch whose columns are put in order.
#define SVD_ORDER_THREADS 256  // in a threadgroup
struct SvdOrderParams {
  SvdMatrices a;
  uint32_t matrices;
  uint32_t rows, columns;
};

// out = a b of rows x inner and inner x inner matrices; further columns of a, where it has any, are copied.
#define SVD_MULTIPLY_TILE 32
struct SvdMultiplyParams {
  SvdMatrices a, b, out;
  uint32_t rows, inner, columns;
  uint32_t row_tiles, column_tiles;
};
