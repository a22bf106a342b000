// Arguments of the kernels of double, shared with the host. A pair is two floats: a number is their sum. Strides and
// lengths are in pairs.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

#define DOUBLE_THREADS 256         // of a threadgroup of sum.metal
#define DOUBLE_TILE 32             // matmul.metal: sides of a threadgroup's tile of the result
#define DOUBLE_DEPTH 16            // matmul.metal: the terms that threadgroup memory holds at once
#define DOUBLE_MATMUL_THREADS 128  // of a threadgroup of matmul.metal

// sum.metal. Threadgroup `part` of `parts` of a row takes the terms from part * share on.
struct DoubleSumParams {
  int64_t length;  // of a row
  int64_t share;
  uint32_t parts;
};

// matmul.metal, for results of rows x columns, which are contiguous, as sums of `terms` products.
struct DoubleMatmulParams {
  int64_t a_batch, a_row, a_column;
  int64_t b_batch, b_row, b_column;
  uint32_t rows, columns, terms;
  uint32_t down, across;  // tiles of a result
};
