// What sample.metal and csrc/ops/sampling/sample.cpp share.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

struct SampleParams {
  uint32_t length;    // of a row
  uint32_t top_k;     // 0: all
  float temperature;  // 0: the first of the largest logits
  float top_p;        // 1: all
  float min_p;        // 0: all
  int64_t x_stride;   // from row to row
};
