// What column_sums.metal and csrc/ops/normalization/norm_rows.cpp share.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

struct ColumnSumsParams {
  uint32_t columns;  // of all results
  uint32_t first;    // those of the first result
  uint32_t chunks;   // rows
};
