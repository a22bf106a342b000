// Arguments of the Cholesky kernels, shared with the host. Strides are in elements.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

// A threadgroup's threads hold tiles of so many rows and columns.
#define CHOLESKY_TILE 4

// How rows of a tile can be read and written: by elements, or as vectors in memory that is aligned to them, where its
// rows or its columns are contiguous.
#define CHOLESKY_ELEMENTS 0u
#define CHOLESKY_ROWS 1u
#define CHOLESKY_COLUMNS 2u

// Matrices that are factored whole: `matrices` of them, n x n, A anywhere and L anywhere.
struct CholeskyParams {
  int64_t a_batch, a_row, a_column;
  int64_t l_batch, l_row, l_column;
  uint32_t matrices;
  uint32_t n;
  uint32_t a_vectors, l_vectors;
};

// The blocked variant: L, n x n, begins as the triangle of A. Of each panel of CHOLESKY_PANEL columns a threadgroup
// factors the diagonal block and solves for CHOLESKY_SLICE of the rows below, `slices` threadgroups a matrix. The
// factors of the blocks go to a matrix of their own, n x CHOLESKY_PANEL, for L has the blocks that others still read.
#define CHOLESKY_PANEL 64
#define CHOLESKY_SLICE 64
struct CholeskyPanelParams {
  int64_t l_row, l_column;
  uint32_t l_vectors;
  uint32_t n;
  uint32_t first, width;
  uint32_t slices;
};

// Rows of n x n matrices with a threadgroup for each: the triangle of A that is read, zeros in the other one.
#define CHOLESKY_ROW_THREADS 128
struct CholeskyTriangleParams {
  int64_t a_batch, a_row, a_column;
  uint32_t n;
  uint32_t upper;
};
