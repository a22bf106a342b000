// Arguments of the kernels over many tensors at once, shared with the host.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

// A threadgroup works on one chunk of one tensor. Chunks are multiples of OPTIM_BLOCK elements per simdgroup.
#define OPTIM_MAX_THREADS 256
#define OPTIM_STRIP 512

// One tensor of a dispatch. The threadgroups from first_threadgroup to the next one's are its own.
struct OptimTensor {
  uint64_t numel;
  uint32_t first_threadgroup;
  uint32_t as_vectors;  // 1: all of its arrays may be moved as vectors of 16 bytes
};

// How a dispatch shares out its tensors.
struct OptimGrid {
  uint32_t tensors;
  uint32_t first_tensor;  // the number of the dispatch's first tensor among all of the call's
  uint32_t chunk;         // elements
};

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

// How a norm is summed up.
#define NORM_SQUARES 0
#define NORM_ABSOLUTE 1
#define NORM_LARGEST 2
#define NORM_POWERS 3

#define NORM_TOTAL_THREADS 1024

struct NormParams {
  OptimGrid grid;
  uint32_t kind;           // NORM_*
  float power;             // of NORM_POWERS
  uint32_t first_partial;  // where the dispatch's threadgroups write their sums
};

struct NormTotalParams {
  uint32_t kind;
  float power;
  uint32_t partials;
};

struct ClipParams {
  OptimGrid grid;
  float limit;  // of the norm, or of each element's size
};

struct LionParams {
  OptimGrid grid;
  float lr;  // if it is not in device memory
  float weight_decay;
  float beta1, beta2;
  float one_minus_beta1, one_minus_beta2;
  float grad_sign;   // -1: maximize
  uint32_t unscale;  // 1: divide the gradients by their scale in place
};

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

#define OPTIM_BLOCK 256  // elements of a state that share a scale; it divides OPTIM_STRIP

// Optimizers whose states have 8 bits.
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
