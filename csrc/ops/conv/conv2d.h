// Convolutions: their plans, by sizes and strides alone.
#pragma once

#include "../../../kernels/conv/conv2d.h"
#include "../gemm/gemm.h"

#include <cstdint>
#include <optional>
#include <string>

namespace metalcore {

// What a plan is made of.
// The sizes, distances and flags of `params` are set; of those of the weight, `weight_term` is not.
struct ConvProblem {
  ConvParams params;
  int64_t images;
  bool x_aligned, weight_aligned;  // whether memory begins at a multiple of 16 bytes
};

struct ConvPlan {
  const char* variant;  // as in the kernels' names: "packs", "elements", "unit_64" …, "rows" or "channels"
  ConvParams params;
  int64_t items;     // tiles of pixels, or threads
  uint32_t across;   // threadgroups side by side, for each tile of pixels
  uint32_t threads;  // of a threadgroup that has a tile; 0 where there are no tiles
  double item_flops;
  uint32_t splits = 1;  // threadgroups that share the terms of a tile
};

// The distance of terms, if the weight has a single one in this order.
std::optional<int64_t> term_distance(const ConvParams& params, bool channels_last);

// Whether the weight's terms have one distance, in an order that kernels take. Otherwise it has to be contiguous.
bool conv_weight_has_order(const ConvParams& params);

// Whether each channel is a group, and `pack` of them are read and written at a time.
bool goes_by_channels(const ConvProblem& problem, int64_t pack);

// Whether units that multiply tensors of 16-bit elements take a convolution, once the weight is in channels_last order.
bool units_take_channels(const ConvParams& params);
bool units_take_images(const ConvProblem& problem);

// Whether units take a convolution whose x and weight have zeros behind their channels, so that these fill packs.
bool units_take_packed(const ConvParams& params);
// How many groups units take as one, so that these fill the columns of a narrow tile: the weight has zeros between
// them.
int64_t joined_groups(const ConvParams& params);

// `cores` is a number of threadgroups that keep the GPU of `like` busy.
ConvPlan unit_plan(const ConvProblem& problem, int64_t cores, const Tensor& like);
ConvPlan plan_conv(const ConvProblem& problem, int64_t element_size);
std::string why_conv(const ConvPlan& plan);

// A window of one pixel at each of an image's pixels: a product of matrices for each image, of which one has the
// result's channels. Nothing else is one.
std::optional<GemmProblem> product_of(const ConvProblem& problem);

}  // namespace metalcore
