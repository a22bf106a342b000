// What a convolution becomes, by sizes and strides alone: which kernel, how its operands are read, and the grid.
#pragma once

#include "../../../kernels/conv/conv2d.h"

#include <cstdint>
#include <string>

namespace metalcore {

// The sizes, distances and flags of `params` are set; of those of the weight, `weight_term` is not.
struct ConvProblem {
  ConvParams params;
  int64_t images;
  bool x_aligned, weight_aligned;  // whether memory begins at a multiple of 16 bytes
};

struct ConvPlan {
  const char* variant;  // as in the kernels' names: "packs", "elements", "rows" or "channels"
  ConvParams params;
  int64_t items;    // tiles of pixels, or threads
  uint32_t across;  // threadgroups side by side, for each tile of pixels
  bool tiled;
  double item_flops;
};

// Whether the weight's terms have one distance, in an order that kernels take. Otherwise it has to be contiguous.
bool conv_weight_has_order(const ConvParams& params);

ConvPlan plan_conv(const ConvProblem& problem, int64_t element_size);
std::string why_conv(const ConvPlan& plan);

}  // namespace metalcore
