// Arguments of the QR kernels, shared with the host. Strides and offsets are in elements; matrices that the kernels
// write are contiguous and row-major.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

// Columns of a panel of the blocked variant, and of a panel's block reflector.
#define QR_PANEL 16

// The task of a kernel for whole matrices or blocks of rows: Q and R; reflectors and their tau, packed as LAPACK's
// geqrf does; Q from such reflectors.
#define QR_FACTORS 0
#define QR_REFLECTORS 1
#define QR_FORM 2

// Matrices that fit a simdgroup or a threadgroup. A tall matrix is given as `blocks` blocks of block_rows rows (the
// last may have fewer), and each block is factored by itself. The blocks' R are contiguous; their Q are in the places
// of their rows.
struct QrParams {
  int64_t batch_stride, row_stride, column_stride;  // A's
  uint32_t matrices;                                // each block counts as a matrix
  uint32_t rows, columns;                           // A's
  uint32_t blocks, block_rows;
  uint32_t reflectors;  // the most reflectors of a block
  uint32_t q_columns;   // 0: no Q
  uint32_t r_rows;
  uint32_t task;
};

// A panel with `width` columns whose corner is (first, first) of each rows x columns matrix of a row-major batch. The T
// of all matrices are contiguous. Each matrix has `count` tau, and the panel fills its part of them.
#define QR_PANEL_THREADS 512  // at most
#define QR_PANEL_ROWS 4       // rows that a thread holds
#define QR_SLAB_THREADS 256   // for the kernels that spread a panel's rows over threadgroups
#define QR_SLAB_ROWS 512
#define QR_SLAB_STATE (QR_PANEL + QR_PANEL * QR_PANEL)  // floats a matrix
struct QrPanelParams {
  uint32_t rows, columns;
  uint32_t first, width;
  uint32_t count;
  uint32_t slabs;
  uint32_t step;
};

// A batch of rows x columns results; R is taken from matrices of source_rows rows.
struct QrResultParams {
  uint32_t rows, columns;
  uint32_t source_rows;
};

// One level of a tall factorization: each block of block_rows rows of Q (rows x columns) is multiplied by its columns x
// columns factor. If these are the matrix's own blocks, the factor's columns get the signs. A threadgroup multiplies
// QR_TALL_ROWS rows; a block has `tiles` threadgroups.
#define QR_TALL_ROWS 128
struct QrTallParams {
  uint32_t rows, columns;
  uint32_t blocks, block_rows;
  uint32_t tiles;
  uint32_t with_signs;
};

// Block reflectors I - V T Vᵀ. V is unit lower trapezoidal and lies below the diagonal of a row-major matrix, as
// LAPACK's geqrf leaves it.

// The most columns of V in a block reflector: of one QR panel, and of several.
#define REFLECTORS_NARROW 16
#define REFLECTORS_WIDE 64

#define REFLECTORS_THREADS 256
#define REFLECTORS_COLUMNS 64  // columns of the target that a threadgroup takes
#define REFLECTORS_ROWS 64     // slabs and spans have a multiple of this many rows

// Block reflectors with up to `width` columns, whose corners are (first, first), (first + width, first + width) … of
// each rows x columns matrix; all together have `count` columns. They are applied to the columns [target_first,
// target_end) of the target, a rows x target_columns matrix. Rows are split into parts of part_rows, columns into
// `tiles`. Products have product_columns columns, of which `skip` precede target_first: V's own columns, if the target
// is the matrix with V.
struct ReflectorsParams {
  uint32_t rows, columns;
  uint32_t first, width, blocks, count;
  uint32_t target_columns, target_first, target_end;
  uint32_t product_columns, skip;
  uint32_t slabs;  // slabs over which products are summed
  uint32_t tiles, parts, part_rows;
  uint32_t transpose;
};

// T of such blocks, from the first columns of Vᵀ V's product_columns. tau has `count` numbers per matrix. The T of one
// block for all matrices are contiguous.
struct ReflectorsFactorParams {
  uint32_t matrices;
  uint32_t first, width, blocks, count;
  uint32_t slabs, product_columns;
};

// Least squares: lstsq.metal and qr_pivoted.metal.

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
