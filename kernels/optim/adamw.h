// Definitions that adamw.metal and csrc/ops/optim/adamw.cpp share.
#pragma once

#include "tensors.h"

// Values that depend on the parameter's step. They come from the host, or from adamw_scalars where the step is in
// device memory.
struct AdamWScalars {
  float decay;                  // 1 - lr * weight_decay
  float negative_step_size;     // -lr / (1 - beta1^step)
  float bias_correction2_sqrt;  // sqrt(1 - beta2^step)
  float inverse_scale;          // the inverse of the gradients' scale
  uint32_t skip;                // 1: the gradients overflow
  uint32_t step;
};

// Values that are the same for all parameters.
struct AdamWParams {
  OptimGrid grid;
  uint32_t seed_low, seed_high;  // of stochastic rounding
  float grad_sign;               // -1: maximize
  float beta2;
  float one_minus_beta1;
  float one_minus_beta2;
  float eps;
  uint32_t unscale;  // 1: multiply the gradients by inverse_scale in place
};

// Arguments of adamw_scalars. Each logarithm is the sum of two floats: with step * log(beta) in one float, 1 -
// beta^step would lose a digit.
struct AdamWStepParams {
  float lr;  // if it is not in device memory
  float weight_decay;
  float log_beta1, log_beta1_low;
  float log_beta2, log_beta2_low;
};
