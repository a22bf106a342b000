// What lstsq.metal, qr_pivoted.metal and csrc/ops/linalg/lstsq.cpp share. Strides are in elements.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

// One level of least squares by a tree of QR decompositions. Level 0 has the rows of A and B. Each other level has the
// stacked results of `parts` blocks of the level before, with n rows each. A block has block_rows rows, the last one of
// a matrix what remains.
//
// The results of a block: n rows of n + sides elements, which are R and then Qᵀ B; the scale of each of these columns;
// and for each column of B the sum of squares of what is left of it.
struct LstsqParams {
  int64_t a_batch, a_row, a_column;
  int64_t b_batch, b_row, b_column;
  uint32_t columns, sides;  // of A, of B
  uint32_t rows;            // of each matrix on this level
  uint32_t blocks, block_rows;
  uint32_t parts;  // 0 on level 0
  uint32_t last;   // its one block of each matrix gives the solution
};

// QR with column pivoting of matrices that are stored by columns: `columns` columns, among which pivots are chosen,
// and `others`, which the reflectors are applied to. The rank is the number of steps until the estimated condition
// number exceeds 1 / rcond.
#define QR_PIVOTED_THREADS 256
struct QrPivotedParams {
  uint32_t rows, columns, others;
  uint32_t step;  // of the kernels that do one step
  float rcond;
};
// The state of a matrix: its length is 3 columns + QR_PIVOTED_STATE floats. First the squares of the columns' norms
// below the finished rows, then the vectors of the estimates of the smallest and of the largest singular value.
#define QR_PIVOTED_STATE 4
