// Arguments of the Cholesky kernels, shared with the host. Strides are in elements.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

// The rows and columns of the tile that a thread holds.
#define CHOLESKY_TILE 4

// How a tile is read and written: by elements, or, in aligned memory, as vectors along contiguous rows or columns.
#define CHOLESKY_ELEMENTS 0u
#define CHOLESKY_ROWS 1u
#define CHOLESKY_COLUMNS 2u

// n x n matrices that are factored as a whole, `matrices` of them. A and L may have any strides.
struct CholeskyParams {
  int64_t a_batch, a_row, a_column;
  int64_t l_batch, l_row, l_column;
  uint32_t matrices;
  uint32_t n;
  uint32_t a_vectors, l_vectors;
};

// The blocked variant. L, n x n, begins as the triangle of A. For each panel of CHOLESKY_PANEL columns a threadgroup
// factors the diagonal block and solves for CHOLESKY_SLICE rows below it, with `slices` threadgroups per matrix. The
// blocks' factors go to a separate n x CHOLESKY_PANEL matrix, because other threadgroups still read the blocks in L.
#define CHOLESKY_PANEL 64
#define CHOLESKY_SLICE 64
struct CholeskyPanelParams {
  int64_t l_row, l_column;
  uint32_t l_vectors;
  uint32_t n;
  uint32_t first, width;
  uint32_t slices;
};

// Copies rows of n x n matrices, a threadgroup for each: the triangle of A that is read, and zeros in the other one.
#define CHOLESKY_ROW_THREADS 128
struct CholeskyTriangleParams {
  int64_t a_batch, a_row, a_column;
  uint32_t n;
  uint32_t upper;
};
