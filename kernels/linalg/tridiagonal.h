// Arguments of the kernels for symmetric tridiagonal matrices, shared with the host.
//
// Divide and conquer (Cuppen 1981; Gu and Eisenstat 1995) splits a matrix, which is padded to leaf * 2^levels rows,
// into leaves. A merge joins the eigenvectors of two neighbours of `part` rows: it makes `size` = 2 part of them. The
// eigenvectors of a block of `size` rows are a row-major matrix of that size, and the blocks lie one after the other.
// Each entry (or row, or column) of a block has one place in arrays of matrices * padded elements.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

#define TRIDIAGONAL_LEAF 32  // rows of a leaf, at most
#define TRIDIAGONAL_LEAF_SIMDGROUPS 2
#define TRIDIAGONAL_THREADS 256
#define TRIDIAGONAL_DEFLATE_THREADS 512
#define TRIDIAGONAL_FILL_ROWS 16
#define TRIDIAGONAL_MOST 65536  // rows that a merge makes

// A scaled matrix has entries of at most 1/4 and eigenvalues of at most 3/4. The padding has this eigenvalue, which is
// larger than those of all parts.
#define TRIDIAGONAL_PADDING 4.0f

struct TridiagonalParams {
  uint32_t matrices, size;
  uint32_t padded, leaf;  // leaf 0: the matrix is not split
  uint32_t copies;        // whether the results are copied out of padded matrices
};

struct TridiagonalMergeParams {
  uint32_t merges, part, size;
};
