// What group_norm.metal and csrc/ops/normalization/group_norm.cpp share.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

// A group is a row: `channels` channels of `area` elements each, all of them contiguous.
struct GroupNormParams {
  uint32_t groups;  // of a batch entry
  uint32_t channels;
  uint32_t area;
  float eps;
  uint32_t has_weight;
  uint32_t has_bias;
  uint32_t segments;  // backward: the parts of a channel, each the work of a simdgroup
  uint32_t segment;   // … and the elements of each
};

// The parameters' gradients: sums over the batch and over segments.
struct GroupNormWeightParams {
  uint32_t batch;
  uint32_t channels;  // of all groups
  uint32_t segments;
};
