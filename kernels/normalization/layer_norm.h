// What layer_norm.metal, layer_norm_backward.metal and csrc/ops/normalization/layer_norm.cpp share.
#pragma once

#include "../common/row_strides.h"

struct LayerNormParams {
  uint32_t length;  // of a row
  uint32_t rows;
  float eps;
  float inverse_length;  // backward: 1 / length
  uint32_t has_weight;
  uint32_t has_bias;
  uint32_t has_residual;  // forward: add `residual` to x first; backward: add `residual`'s gradient at the end
  uint32_t statistics;    // forward: write means and scales
  uint32_t streams;       // backward, simd and block: how many simdgroups or threadgroups share the rows
  uint32_t partial;       // … and whether they sum up their rows' parts of the parameters' gradients
  uint32_t chunk_rows;    // backward, other variants: the rows of a part of these gradients
  uint32_t aligned;       // … whether rows begin and end at multiples of 16 bytes
  RowStrides x;           // outputs are contiguous
  RowStrides residual;
  RowStrides grad;
};
