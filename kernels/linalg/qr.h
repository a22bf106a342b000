// Arguments of the QR kernels, shared with the host. Strides and offsets are in elements; matrices that the kernels
// write are contiguous and row-major.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

// Columns of a panel of the blocked variant, and of its block reflectors.
#define QR_PANEL 16

// Matrices that fit a simdgroup or a threadgroup. A tall matrix is given as `blocks` blocks of block_rows rows (the
// last may have fewer), each factored by itself: the R of the blocks lie one behind the other, their Q where the rows
// lie.
struct QrParams {
  int64_t batch_stride, row_stride, column_stride;  // of A
  uint32_t matrices;                                // blocks included
  uint32_t rows, columns;                           // of A
  uint32_t blocks, block_rows;
  uint32_t q_columns;                               // 0: no Q
  uint32_t r_rows;
};

// One step of the blocked variant on a batch of row-major matrices: the panel with `width` columns whose corner is
// (first, first) of the rows x columns matrix holding the reflectors.
struct QrPanelParams {
  uint32_t rows, columns;
  uint32_t first, width;
  uint32_t panel, panels;                           // index into T, which holds `panels` factors a matrix
};

// Applies a panel's block reflector, or its transpose, to rows [first, rows) of the target's columns [target_first,
// target_columns), QR_UPDATE_COLUMNS of them a threadgroup: `tiles` threadgroups a matrix.
#define QR_UPDATE_COLUMNS 32
#define QR_UPDATE_THREADS (QR_UPDATE_COLUMNS * QR_PANEL)
struct QrUpdateParams {
  QrPanelParams of;
  uint32_t target_first, target_columns;
  uint32_t tiles;
  uint32_t transpose;
};

// A batch of rows x columns results; R is taken from matrices of source_rows rows.
struct QrResultParams {
  uint32_t rows, columns;
  uint32_t source_rows;
};

// One level of a tall factorization: blocks of block_rows rows of Q (rows x columns), each times its own columns x
// columns factor, whose columns take the signs if these are the matrix's own blocks. A threadgroup multiplies
// QR_TALL_ROWS rows: `tiles` threadgroups a block.
#define QR_TALL_ROWS 128
struct QrTallParams {
  uint32_t rows, columns;
  uint32_t blocks, block_rows;
  uint32_t tiles;
  uint32_t with_signs;
};
