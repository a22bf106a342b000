// Arguments of the kernels over packed weights, shared with the host.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

// A simdgroup's lane takes a slice of a packed row at a time: 32 weights, in two runs of 16.
#define QUANT_SLICE 32
#define QUANT_CHUNK (QUANT_SLICE * 32)  // weights of a simdgroup

// Products with 1 row of x, or with 2 or 4: at most so many simdgroups share a row, and load so many rows of weights at
// once. A lane holds 32 elements of each row of x: four rows take more registers than a thread of an Apple GPU has.
#define QUANT_MV1_SIMDGROUPS 16
#define QUANT_MV1_STEP 4
#define QUANT_MV2_SIMDGROUPS 8
#define QUANT_MV2_STEP 2
#define QUANT_MV4_SIMDGROUPS 8
#define QUANT_MV4_STEP 2
#define QUANT_MV_RESULTS 64  // of a threadgroup, at most

// Products by the matrix units: rows of weights of a threadgroup, and the most simdgroups that share them, with 8 and
// with 16 rows of x.
#define QUANT_TILE_ROWS 16
#define QUANT_TILE8_SIMDGROUPS 8
#define QUANT_TILE16_SIMDGROUPS 4

// The dtypes of x and of the results.
#define QUANT_FLOAT 0u
#define QUANT_HALF 1u
#define QUANT_BFLOAT 2u

// Row r of `rows` rows (or of all, one after the other), as numbers.
#define QUANT_ROWS_THREADS 128
struct QuantRowsParams {
  uint64_t row_bytes;
  uint64_t from;      // the first row of a dispatch
  uint32_t count;     // slices of a dispatch
  uint32_t weights;   // rows of packed weights
  uint32_t slices;    // of a row
  uint32_t gathered;  // whether `rows` says which rows, as int64
  uint32_t dtype;     // of the results
};

// y[i] = W x[i], or with `experts` y[i] = W[expert of i] x[i / shared].
struct QuantMvParams {
  uint64_t row_bytes;
  uint64_t expert_bytes;
  uint32_t weights;     // rows of packed weights, which are a result's length
  uint32_t slices;      // of a row
  uint32_t x_rows;      // results
  uint32_t shared;      // results that share a row of x, with experts
  uint32_t experts;     // 0 where there is one matrix
  uint32_t group_rows;  // rows of weights of a threadgroup, a multiple of the step
  uint32_t dtype;       // of x and y
};

// y = x Wᵀ, or with `transposed` y = x W, in tiles of y. With experts there is a matrix for each of them, and the rows
// of y are in an order in which each expert's are together.
#define QUANT_MM_THREADS 128
#define QUANT_MM_ROWS 32     // of a tile
#define QUANT_MM_COLUMNS 64  // of a tile
#define QUANT_MM_DEPTH 32    // terms at a time
struct QuantMmParams {
  uint64_t row_bytes;
  uint64_t expert_bytes;
  uint32_t type;
  uint32_t weights;  // rows of packed weights
  uint32_t slices;   // of a row
  uint32_t x_rows;   // rows of y
  uint32_t shared;   // rows of y that share a row of x, with experts
  uint32_t experts;  // 0 where there is one matrix
  uint32_t transposed;
  uint32_t aligned;  // whether rows of x begin at multiples of 16 bytes
};

// The same without experts on GPUs whose units multiply tensors.
#define QUANT_UNIT_THREADS 256
#define QUANT_UNIT_ROWS 128     // of x, of a tile
#define QUANT_UNIT_COLUMNS 128  // of a tile
#define QUANT_UNIT_STEP 64      // terms at a time
struct QuantUnitParams {
  uint64_t row_bytes;
  uint32_t weights;  // rows of packed weights
  uint32_t slices;   // of a row
  uint32_t x_rows;   // rows of y
};

// The rows of a product by their experts.
struct QuantGroupsParams {
  uint32_t rows;
  uint32_t experts;
};

// Numbers as packed weights. A thread has a block of 32, an eighth of a block of 256, or a group of numbers whose scale
// it searches. The last are so many numbers at once that their scales take little memory.
#define QUANTIZE_THREADS 128
#define QUANTIZE_AT_ONCE (1 << 24)
#define QUANTIZE_OPERATIONS 16.0          // for a number
#define QUANTIZE_FIT_OPERATIONS 100.0     // the same, of integers
#define QUANTIZE_SEARCH_OPERATIONS 800.0  // the same, of a search
struct QuantizeParams {
  uint32_t count;  // threads
  uint32_t dtype;  // of the numbers
  float most;      // the largest number that blocks hold
};
