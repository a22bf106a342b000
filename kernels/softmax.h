// What softmax.metal and csrc/ops/softmax.cpp share.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

struct SoftmaxParams {
  uint32_t length;    // of a row
  uint32_t rows;
  uint32_t inner;     // distance of a row's elements; 1 except in the columns variant
  uint32_t aligned;   // rows (columns: their neighbours) begin and end at multiples of 16 bytes
  int64_t x_stride;   // from row to row (columns: from one block of `inner` rows to the next) in the forward kernels'
                      // input; everything else is contiguous
};
