// Arguments of the kernels for triangular systems, shared with the host. All of them solve L X = B with L lower
// triangular. The host's strides give the other cases: an upper triangle is read from the last row and column to the
// first, and X A = B is solved as Aᵀ Xᵀ = Bᵀ.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

// Element (i, j) of matrix k of a batch is at first + k batch + i row + j column.
struct StridedMatrices {
  int64_t first, batch, row, column;
  uint32_t by_rows;  // neighbours in a row are not further apart in memory than those in a column
};

// Kernels for more rows take this many rows and columns of L at once.
#define TRIANGULAR_TILE 32
#define TRIANGULAR_COMPLEX_TILE 16

// X and B have `columns` columns. A simdgroup's slot or a threadgroup takes some of them; a matrix has `column_tiles`
// such parts. X and B may be the same memory.
struct TriangularParams {
  StridedMatrices a, b, x;
  uint32_t matrices, order, columns;
  uint32_t column_tiles;
  uint32_t unit;  // the diagonal counts as ones
};

// The largest order that trsm_panel takes.
#define TRIANGULAR_PANEL 128

// The most right-hand sides of the kernels for few of them, and the largest orders of kernels that keep X in
// threadgroup memory: for one right-hand side, for several, and with few threads.
#define TRIANGULAR_FEW 4
#define TRIANGULAR_VECTOR_ORDER 1024
#define TRIANGULAR_VECTORS_ORDER 512
#define TRIANGULAR_VECTOR_SMALL 64

// X = B - A S with A rows x depth: subtracts the product with the solved rows S from the rows that are not solved yet.
// S has the strides of Sᵀ. A threadgroup makes TRIANGULAR_UPDATE rows and columns of X, or TRIANGULAR_TILE rows of few
// columns.
#define TRIANGULAR_UPDATE 64
struct TriangularUpdateParams {
  StridedMatrices a, solved, b, x;
  uint32_t rows, depth, columns;
  uint32_t row_tiles, column_tiles;
};
