// The part of the elementwise kernels (elementwise_kernels.h) that their host side (csrc/ops/common/elementwise.cpp)
// shares.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

#define STRIDED_MAX_DIMS 8

// The output is walked in its own memory order. Dimensions are innermost first, and neighbours that are contiguous in
// all tensors are merged. strides[0] is for the first input, strides[1] for the second, in elements.
struct StridedParams {
  uint32_t dims;
  uint32_t sizes[STRIDED_MAX_DIMS];
  int64_t strides[2][STRIDED_MAX_DIMS];
};
