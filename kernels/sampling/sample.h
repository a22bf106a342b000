// What sample.metal and csrc/ops/sampling/sampling.cpp share.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

// Which classes of a row are drawn from, as float32 numbers. A row may have options of its own.
struct SampleOptions {
  float temperature;  // 0: the first of the largest logits
  float top_k;        // 0: all
  float top_p;        // 1: all
  float min_p;        // 0: all
};

struct SampleParams {
  uint32_t length;   // of a row
  uint32_t per_row;  // rows have options of their own
  SampleOptions options;
  int64_t x_stride;  // from row to row
};
