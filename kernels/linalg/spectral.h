// Arguments of the kernels of eigh and svd, shared with the host. Strides are in elements.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

// eigh_jacobi.metal and eigh_ql.metal. Results are contiguous.
#define EIGH_QL_SIMDGROUPS 2  // of a threadgroup, each with a matrix
struct EighParams {
  int64_t batch_stride, row_stride, column_stride;  // A's, whose lower triangle is read
  uint32_t matrices, size;
  uint32_t conjugate;  // 1: of complex matrices, the transpose of the upper triangle is read in the lower one's place
};

// svd_jacobi.metal, svd_order.metal and svd_vectors.metal.
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

// Blocked one-sided Jacobi: jacobi_ends.metal and jacobi_rounds.metal.
// A working matrix is `padded` contiguous columns of `length` floats: the entries of the matrix, zeros up to gram_rows,
// and, if V is wanted, the entries of V. Columns beyond the matrix's own are zero and stay zero.
#define JACOBI_BLOCK 16   // columns of a block
#define JACOBI_PAIR 32    // columns that a threadgroup makes orthogonal: two blocks
#define JACOBI_CHUNK 128  // rows of them that are in threadgroup memory at once
#define JACOBI_THREADS 256

// The entries of matrices are scaled to be below 2^(JACOBI_SCALE + 1).
#define JACOBI_SCALE 50

struct JacobiParams {
  uint32_t matrices;
  uint32_t columns, rows;
  uint32_t padded;     // columns: an even number of blocks
  uint32_t gram_rows;  // rows, rounded up to a multiple of 4
  uint32_t length;     // a multiple of 4 too
  uint32_t sweeps;     // the most sweeps
  uint32_t splits;     // threadgroups that share the rows of a pair
  float tolerance;     // columns whose |xᵀy| / (‖x‖ ‖y‖) is below are left as they are
};

// A round of a sweep: all blocks are paired, and all pairs are handled at once.
struct JacobiRoundParams {
  JacobiParams jacobi;
  uint32_t sweep, round;
};

// Matrices of many columns have wide blocks, and a round is several dispatches. The Gram matrix of two wide blocks is
// made diagonal in a sweep of its own, whose round `inner` pairs their narrow blocks.
#define JACOBI_WIDE 64
#define JACOBI_WIDE_PAIR (2 * JACOBI_WIDE)
#define JACOBI_WIDE_SLOTS (JACOBI_WIDE / JACOBI_BLOCK)  // pairs of narrow blocks
#define JACOBI_WIDE_ROUNDS (2 * JACOBI_WIDE_SLOTS - 1)
#define JACOBI_WIDE_TILE 128  // rows of a threadgroup that applies the rotation
struct JacobiWideParams {
  JacobiRoundParams outer;
  uint32_t inner;
  uint32_t tiles;  // threadgroups per pair in the last step
};

struct JacobiResultParams {
  JacobiParams jacobi;
  uint32_t accumulated;  // whether U and V are wanted
};

// svd_polar.metal, the SVD by the polar decomposition: matrices of `size` rows and columns.
#define POLAR_THREADS 256
#define POLAR_PARTS 64  // threadgroups that share a matrix's norm
struct PolarParams {
  int64_t row_stride, column_stride;  // of the result, whose matrices have size * size elements
  uint32_t matrices, size;
  float of_x, of_y;  // a step's weights
};
