// Arguments of the kernel in lion.metal, shared with csrc/ops/optim/momentum.cpp.
#pragma once

#include "tensors.h"

struct LionParams {
  OptimGrid grid;
  float lr;  // if it is not in device memory
  float weight_decay;
  float beta1, beta2;
  float one_minus_beta1, one_minus_beta2;
  float grad_sign;   // -1: maximize
  uint32_t unscale;  // 1: divide the gradients by their scale in place
};
