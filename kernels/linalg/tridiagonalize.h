// Arguments of tridiagonalize.metal, shared with the host.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

#define TRIDIAGONALIZE_TILE 32      // of the kernel that copies one triangle to both
#define TRIDIAGONALIZE_THREADS 256  // of that kernel

// The matrices and their reflectors have rows of `pitch` numbers: `size`, rounded up to a multiple of 4.
struct TridiagonalLoadParams {
  int64_t batch_stride, row_stride, column_stride;  // A's, whose lower triangle is read
  uint32_t size, pitch, tiles;                      // tiles side by side
  uint32_t in_place;                                // whether the lower triangle is there already
  uint32_t conjugate;  // 1: of complex matrices, the transpose of the upper triangle is read in the lower one's place
};

// Reflector j has its leading 1 in row j + 1, and lies in row j + 1 of `reflectors`; its tau is tau[j + 1]. A complex
// reflector v takes two rows, v and i v. Taken as rows of floats, these are two reflectors of real columns, in which
// the real and the imaginary part of each entry follow one another.
struct TridiagonalColumnParams {
  uint32_t size, pitch;
  uint32_t reflectors;  // rows of a matrix's reflectors
  uint32_t start;       // the first column that these dispatches handle
  uint32_t column;      // the column that becomes tridiagonal
  uint32_t parts;       // threadgroups of a matrix
  uint32_t rows;        // of a part, at most TRIDIAGONALIZE_ROWS
};

#define TRIDIAGONALIZE_ROWS 64

// tridiagonalize_panel.metal: large matrices, of which only the lower triangle is read, in panels of columns.
#define TRIDIAGONALIZE_SQUARE 128  // of the matrix, that a threadgroup multiplies
#define TRIDIAGONALIZE_SQUARE_THREADS 256
#define TRIDIAGONALIZE_SLICES 4      // threads that share a row of the next column
#define TRIDIAGONALIZE_NEXT_ROWS 64  // of a threadgroup, with the row of the diagonal
#define TRIDIAGONALIZE_PANEL 64      // columns of a panel, at most
#define TRIDIAGONALIZE_UPDATE_TILE 64
#define TRIDIAGONALIZE_UPDATE_THREADS 128

struct TridiagonalPanelParams {
  uint32_t size, pitch, reflectors;
  uint32_t panel, column;  // the first column of the panel, and the current one
  uint32_t squares;        // of a row of squares, from the row after the column on
  uint32_t slots;          // rows of products in memory
  uint32_t parts;          // threadgroups of a matrix
  uint32_t norms;          // sums of squares of the column, a pair each
};

struct TridiagonalUpdateParams {
  uint32_t size, pitch, reflectors;
  uint32_t panel, end;   // the panel's columns
  uint32_t first, side;  // the trailing matrix, which begins at `first`, has `side` tiles in each direction
};

// tridiagonal_phases.metal: complex matrices, whose eigenvectors are those of real matrices with phases.
#define TRIDIAGONAL_PHASES_THREADS 256
struct TridiagonalPhasesParams {
  uint32_t size;
};
