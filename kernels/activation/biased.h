// What biased.metal and csrc/ops/activation/biased.cpp share.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

// Strides are in elements, from row to row. The elements of a row are neighbours, and results are contiguous.
struct BiasedParams {
  uint32_t length;
  uint32_t rows;
  uint32_t chunk_rows;  // backward: the rows of a thread
  int64_t x_stride;
  int64_t grad_stride;
};
