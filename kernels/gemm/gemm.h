// Arguments of the kernels for products of matrices, shared with the host.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

// A threadgroup makes a tile of the result, and walks along the terms in steps of 64 bytes.
#define GEMM_ROWS 64
#define GEMM_COLUMNS 64
#define GEMM_STEP_BYTES 64
#define GEMM_THREADS 128
// Short steps for 16-bit elements, where one tile of each operand lies in threadgroup memory: 5 KB instead of 19, so
// that more threadgroups share a core. Floats keep long steps, whose rows fill half of a line of memory.
#define GEMM_SHORT_STEP_BYTES 32
// The rows, and the columns, of a large tile, for 16-bit elements.
#define GEMM_LARGE 128
#define GEMM_LARGE_THREADS 256
// Tiles for GPUs whose units multiply tensors, of 16-bit elements: of so many rows, and by how many columns there are.
// Products of few tiles have small ones. Threadgroups that share a tile have a part of its terms each.
#define GEMM_UNIT_ROWS 128
#define GEMM_UNIT_COLUMNS 128
#define GEMM_UNIT_THREADS 128
#define GEMM_UNIT_WIDE 256
#define GEMM_UNIT_FEW 16
#define GEMM_UNIT_SEVERAL 32
#define GEMM_UNIT_MANY 64
#define GEMM_UNIT_WIDE_THREADS 256  // of these four, and of broad tiles
#define GEMM_UNIT_SMALL 64          // rows and columns; broad tiles have as many rows, and GEMM_UNIT_COLUMNS
// Tiles for few terms, which are all copied at once, so that more threadgroups share a core: GEMM_UNIT_SMALL rows
// by GEMM_UNIT_COLUMNS columns, and small ones.
#define GEMM_UNIT_SHORT_TERMS 128
#define GEMM_UNIT_SHORT_THREADS 256
#define GEMM_UNIT_BAND 8  // tiles below each other that are made at about the same time
// Where threadgroups share a tile, a thread adds so many neighbouring elements of what they left.
#define GEMM_UNIT_SUMS 4
#define GEMM_UNIT_SUMS_THREADS 128

// Products with few rows: so many of them, or one, share what is read of b. A threadgroup has so many columns.
#define GEMV_ROWS 4
#define GEMV_SIMDGROUPS 8
#define GEMV_LINES 4     // where terms are next to each other in b
#define GEMV_COLUMNS 32  // where columns are

#define GEMM_BATCH_DIMS 4

#define GEMM_RELU 1u
#define GEMM_GELU 2u
#define GEMM_GELU_TANH 3u
#define GEMM_SILU 4u

// Groups share the rows of a and of the result, and have a matrix b each; or they share the terms, and have a result
// each.
#define GEMM_GROUPED_ROWS 1u
#define GEMM_GROUPED_TERMS 2u

// Distances in elements. A distance of 0 repeats the operand.
struct GemmOperand {
  int64_t row, column;
  int64_t batch[GEMM_BATCH_DIMS];  // innermost first
};

// result = activation(alpha a b + bias + beta residual), for a of rows by terms and b of terms by columns.
struct GemmParams {
  GemmOperand a, b, residual, result;
  int64_t bias_row, bias_column;
  uint32_t batch[GEMM_BATCH_DIMS];  // sizes, innermost first
  uint32_t rows, columns, terms;
  uint32_t row_tiles;  // of a member of the batch
  uint32_t first;      // the dispatch's first tile of rows, of all in the batch
  uint32_t groups;
  uint32_t grouped;
  uint32_t a_packs, b_packs;  // whether 16 bytes can be read at a time, along the dimension whose distance is 1
  uint32_t activation;
  uint32_t has_bias, has_residual;
  float alpha, beta;
  uint32_t split_terms;  // where units multiply tensors: a threadgroup's terms, or more
  uint32_t together;     // threadgroups that share a tile and run together, or 1
  // Where threadgroups walk along tiles: how many, from one to the next of its tiles, and the number of tiles.
  uint32_t walkers, walk_tiles;
};

// One row and several matrices: joined.metal.
#define JOINED_MATRICES 3
#define JOINED_LINES 2       // columns of a simdgroup
#define JOINED_SIMDGROUPS 8  // of a threadgroup, at most

// result = norm(x) [a b c] + bias + residual, or activation(norm(x) a + bias) (norm(x) b + bias) with a gate.
struct JoinedParams {
  int64_t strides[JOINED_MATRICES];  // of the matrices, from one column to the next
  uint32_t columns[JOINED_MATRICES];
  uint32_t has_bias[JOINED_MATRICES];
  uint32_t terms;
  uint32_t share;  // simdgroups that have the same columns, a power of two
  uint32_t packs;  // whether 16 bytes of x, of the norm's weight and of columns can be read at a time
  uint32_t gate;   // 0, or one of gemm.h's activations
  uint32_t has_residual;
  float eps, offset;
};
