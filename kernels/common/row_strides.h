// Where rows lie: the last dimensions are a row, and those before it are at most three strides.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

// Innermost first, in elements. Rows lie strides[0] apart where sizes[0] is 0.
struct RowStrides {
  uint32_t sizes[2];
  int64_t strides[3];
};
