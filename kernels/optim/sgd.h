// Arguments of the kernel in sgd.metal, shared with csrc/ops/optim/momentum.cpp.
#pragma once

#include "tensors.h"

struct SgdParams {
  OptimGrid grid;
  float lr;         // if it is not in device memory
  float grad_sign;  // -1: maximize
  float weight_decay;
  float momentum;
  float gradient_weight;  // of the gradient in the momentum: 1 - dampening, or 1 in the first step
  uint32_t first;         // 1: the buffers hold nothing yet
  uint32_t nesterov;
  uint32_t unscale;  // 1: divide the gradients by their scale in place
};
