// Arguments of the kernels for triangular systems, shared with the host. All of them solve L X = B with L lower
// triangular: upper triangles are those read from the last row and column to the first, and X A = B is Aᵀ Xᵀ = Bᵀ, both
// by the strides that the host gives.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

// Element (i, j) of matrix k of a batch is first + k batch + i row + j column elements from the beginning.
struct StridedMatrices {
  int64_t first, batch, row, column;
  uint32_t by_rows;  // neighbours in a row are as close in memory as those in a column, or closer
};

// Rows and columns of L that the kernels for more than that take at once.
#define TRIANGULAR_TILE 32

// X and B have `columns` columns; a simdgroup's slot or a threadgroup takes some, `column_tiles` of them a matrix. X
// and B may be the same memory.
struct TriangularParams {
  StridedMatrices a, b, x;
  uint32_t matrices, order, columns;
  uint32_t column_tiles;
  uint32_t unit;  // the diagonal counts as ones
};

// The largest order that triangular_panel.metal takes.
#define TRIANGULAR_PANEL 128

// Right-hand sides that the kernels for few of them take, and the largest orders of those that keep X in threadgroup
// memory: of one right-hand side, of several, and of those with few threads.
#define TRIANGULAR_FEW 4
#define TRIANGULAR_VECTOR_ORDER 1024
#define TRIANGULAR_VECTORS_ORDER 512
#define TRIANGULAR_VECTOR_SMALL 64

// X = B - A S with A rows x depth: what rows that are solved, S, take from those that are not. Strides are those of Sᵀ.
// A threadgroup makes TRIANGULAR_UPDATE rows and columns of X, or TRIANGULAR_TILE rows of few columns.
#define TRIANGULAR_UPDATE 64
struct TriangularUpdateParams {
  StridedMatrices a, solved, b, x;
  uint32_t rows, depth, columns;
  uint32_t row_tiles, column_tiles;
};
