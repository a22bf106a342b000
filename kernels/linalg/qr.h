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
