// Arguments of the blocked one-sided Jacobi kernels, shared with the host.
//
// A working matrix is `padded` contiguous columns of `length` floats: the entries of the matrix, zeros up to gram_rows,
// and, if V is wanted, the entries of V. Columns beyond the matrix's own are zero and stay zero.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

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
  uint32_t symmetric;  // 0: rows of A are columns of the matrix; 1, 2: A is symmetric, by its lower, upper part
};

// A round of a sweep: all blocks are paired, and all pairs are handled at once.
struct JacobiRoundParams {
  JacobiParams jacobi;
  uint32_t sweep, round;
};

struct JacobiResultParams {
  JacobiParams jacobi;
  uint32_t tiles;        // tiles of rows that share a Rayleigh quotient
  uint32_t first_tile;   // of all matrices' tiles, the first of a dispatch
  uint32_t vectors;      // 0: only values
  uint32_t accumulated;  // whether V is wanted
  uint32_t scaled;       // whether A is multiplied by a scale, by which the values must be divided
};
