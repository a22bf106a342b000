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
// pass, with B's columns in tiles of up to `tile`; each tile repeats the factorization.
struct LuParams {
  int64_t a_batch, a_row, a_column;  // strides
  int64_t b_batch, b_row, b_column;
  int64_t lu_batch, lu_row;
  int64_t x_row, x_column;  // strides of X, whose matrices are `rows` times `right` apart
  uint32_t matrices;
  uint32_t rows, columns;       // A's, or the panel's
  uint32_t right, tile, tiles;  // columns of B (0: nothing to solve), columns of a tile, number of tiles
  uint32_t given;               // LU_MATRIX, or for simdgroups LU_FACTORED, LU_ADJOINT
  uint32_t identity;            // B is the identity, and is not read
  uint32_t pivoting;            // 0: without exchanges of rows
  uint32_t factors;             // 0: LU and pivots are not wanted
  uint32_t sources;             // 0: the order of the rows is not wanted
  uint32_t pivots_batch;
  uint32_t row_threads;  // threads that hold a column: a multiple of 32, at least `rows`
  uint32_t as_float4;    // LU_VECTORS_*: four neighbours of a row may be moved as a float4
};
#define LU_VECTORS_A 1
#define LU_VECTORS_B 2
#define LU_VECTORS_LU 4
#define LU_VECTORS_X 8

// The blocked variant takes a panel of LU_PANEL columns at a time, and several panels are a block. A panel's corner is
// (first, first) of contiguous rows x columns matrices. Its columns are in scratch memory, `pitch` entries apart.
#define LU_PANEL 32
#define LU_PANEL_THREADS 512
struct LuPanelParams {
  uint32_t rows, width;  // from the corner on
  uint32_t first, pitch;
  uint32_t pivots;  // of a matrix
  uint32_t pivoting;
};

// What follows a panel: exchanges of rows in all other columns, of which those before `end` become rows of U, and the
// panel's place in the matrix.
#define LU_ROWS_THREADS 64
struct LuRowsParams {
  uint32_t rows, columns;
  uint32_t first, width, end, pitch;
  uint32_t tiles, column_tiles;  // threadgroups per matrix, and how many of them take columns
  uint32_t pivots;
  uint32_t permutation;  // 0: not wanted
};

// The columns on the right of a block of `width` columns become rows of U.
struct LuTopParams {
  uint32_t rows, columns;
  uint32_t first, width;
  uint32_t tiles;
};

// C -= L U for the rows from `corner` on and the columns from `corner` to `end`, with `width` columns of L from `first`
// on. The columns before `panel_end`, which are the next panel, go to scratch memory.
#define LU_UPDATE_TILE 64
#define LU_UPDATE_THREADS 128
struct LuUpdateParams {
  uint32_t rows, columns;
  uint32_t first, width, corner, end, panel_end;
  uint32_t pitch;
  uint32_t tiles, column_tiles;
  uint32_t as_float4;
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
