// What rms_norm.metal and csrc/ops/rms_norm.cpp share.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

struct RmsNormParams {
  uint32_t length;  // of a row
  uint32_t rows;
  float eps;
  uint32_t aligned;  // rows begin and end at multiples of 16 bytes in every tensor
  uint32_t has_weight;
  uint32_t has_residual;  // forward: add `residual` to x first; backward: add `residual`'s gradient at the end
  uint32_t streams;       // backward, simd and block: how many simdgroups or threadgroups share the rows
  uint32_t partial;       // … and whether they sum up their rows' parts of the weight's gradient
  uint32_t splits;        // split: threadgroups that share a row
  uint32_t share;         // … and the elements that each of them has
  int64_t x_stride;       // from row to row; outputs are contiguous
  int64_t residual_stride;
  int64_t grad_stride;
};

// Rows that a threadgroup of rms_norm_backward_block1 has at work at once.
#define RMS_NORM_BLOCK1_ROWS 2

// The weight's gradient sums over rows in two stages: `chunks` partial sums of `chunk_rows` rows each, then over them.
struct RmsNormWeightParams {
  uint32_t length;
  uint32_t rows;
  uint32_t chunk_rows;
  uint32_t chunks;
  uint32_t aligned;  // as above
  int64_t x_stride;
  int64_t grad_stride;
};
