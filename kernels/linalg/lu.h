// Arguments of the LU kernels, shared with the host. Strides and offsets are in elements; results are contiguous.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

// LU_MATRIX: A is a matrix to factor. LU_FACTORED: A holds a matrix's L and U, and its pivots are given. LU_ADJOINT:
// these are transposed, to solve with the transpose of that matrix.
#define LU_MATRIX 0
#define LU_FACTORED 1
#define LU_ADJOINT 2

// Matrices that a thread, a simdgroup or a threadgroup factors. A thread and a simdgroup can solve A X = B in the same
// pass, with B's columns in tiles of up to `tile`; each tile repeats the factorization. The blocked variant's panels
// use it too: their corner is (first, first) of matrices that are factored in place.
struct LuParams {
  int64_t a_batch, a_row, a_column;  // strides
  int64_t b_batch, b_row, b_column;
  int64_t lu_batch, lu_row;
  int64_t x_row, x_column;  // strides of X, whose matrices are `rows` times `right` apart
  uint32_t matrices;
  uint32_t rows, columns;        // A's, or the panel's
  uint32_t right, tile, tiles;   // columns of B (0: nothing to solve), columns of a tile, number of tiles
  uint32_t given;                // LU_MATRIX, or for simdgroups LU_FACTORED, LU_ADJOINT
  uint32_t identity;             // B is the identity, and is not read
  uint32_t pivoting;             // 0: without exchanges of rows
  uint32_t factors;              // 0: LU and pivots are not wanted
  uint32_t sources;              // 0: the order of the rows is not wanted
  uint32_t first, pivots_batch;  // a panel's first column, and the pivots of a whole matrix
  uint32_t row_threads;          // threads that hold a column: a multiple of 32, at least `rows`
  uint32_t as_float4;            // LU_VECTORS_*: four neighbours of a row may be moved as a float4
};
#define LU_VECTORS_A 1
#define LU_VECTORS_B 2
#define LU_VECTORS_LU 4
#define LU_VECTORS_X 8

// Columns of a panel of the blocked variant. A panel has fewer if a threadgroup lacks registers for its rows.
#define LU_PANEL 32
#define LU_LOOPED_PANEL 16

// The steps after a panel of `width` columns whose corner is (first, first) of contiguous rows x columns matrices.
#define LU_ROWS_THREADS 64
#define LU_UPDATE_TILE 64
struct LuStepParams {
  uint32_t rows, columns;
  uint32_t first, width;
  uint32_t tiles, column_tiles;  // threadgroups per matrix, and how many of them are side by side
  uint32_t pivots;               // pivots of a matrix
  uint32_t permutation;          // 0: not wanted
};

// The results of a batch of rows x columns matrices whose factors have `pivots` pivots.
struct LuResultParams {
  uint32_t rows, columns, pivots;
  uint32_t matrices;
  uint32_t part;       // LU_PART_*
  uint32_t logarithm;  // 1: the determinant's sign and logarithm
};
#define LU_PART_P 0
#define LU_PART_L 1
#define LU_PART_U 2

// X = P B or Pᵀ B for contiguous rows x columns matrices X.
struct LuPermuteParams {
  int64_t b_batch, b_row, b_column;
  uint32_t rows, columns;
  uint32_t transpose;
  uint32_t identity;  // B is the identity, and is not read
};
