// Arguments of the kernels of optimizers whose states have 8 bits, shared with the host.
#pragma once

#include "optim.h"

#define OPTIM_BLOCK 256  // elements of a state that share a scale; it divides OPTIM_STRIP

struct EightBitParams {
  OptimGrid grid;
  float beta1, beta2;
  float one_minus_beta1, one_minus_beta2;
  float step_size;   // the learning rate, of Adam over 1 - beta1^step
  float correction;  // 1 / sqrt(1 - beta2^step)
  float eps;
  float decay;  // 1 - lr * weight_decay
  float weight_decay;
  float grad_scale;  // what gradients are multiplied by
};
