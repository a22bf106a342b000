// What gated.metal and csrc/ops/activation/gated.cpp share.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

// Strides are in elements, from row to row. The elements of a row are neighbours.
struct GatedParams {
  uint32_t length;
  int64_t gate_stride;
  int64_t up_stride;
  int64_t y_stride;          // forward: of the result; backward: of its gradient
  int64_t gate_grad_stride;  // backward
  int64_t up_grad_stride;
};
