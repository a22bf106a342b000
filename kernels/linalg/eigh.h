// Arguments of the kernels of eigh, shared with the host. Strides are in elements; results are contiguous.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

struct EighParams {
  int64_t batch_stride, row_stride, column_stride;  // A's, whose lower triangle is read
  uint32_t matrices, size;
};
