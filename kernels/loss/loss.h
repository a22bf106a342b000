// Arguments of the kernels of losses, shared with the host.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

// Rows have one logit for each of `length` classes.
struct CrossEntropyParams {
  uint32_t length;
  uint32_t rows;
  uint32_t inner;          // distance of a row's elements, and the number of rows that lie between each other
  uint32_t aligned;        // logits and gradients: rows begin and end at multiples of 16 bytes
  uint32_t start;          // elements by which the logits' first row begins past a multiple of 16 bytes
  uint32_t together;       // each row of the gradient begins as far past one, in elements, as the logits'
  uint32_t has_weight;     // of the classes
  uint32_t probabilities;  // of the classes are the targets, in the layout of contiguous logits
  uint32_t general;        // there are weights, probabilities, or label smoothing
  uint32_t vectors;        // rows are read in whole vectors: there are neither weights nor probabilities
  uint32_t scale_of_row;   // each row has a scale of its own
  float smoothing;         // what of a target's probability all classes share
  float softcap;           // logits are softcap * tanh(logit / softcap), unless this is 0
  float z_loss;            // the factor of lse^2 in the loss
  int64_t ignore_index;    // rows with this target have no loss
  int64_t x_stride;        // from one row (with `inner` > 1: from one block of rows) to the next in the logits
};

// The sums of `count` pairs of floats; a threadgroup has `share` of them.
struct CrossEntropySumParams {
  uint32_t count;
  uint32_t share;
  uint32_t mean;  // the result is divided by the sum of weights
};

// What a row has for each class.
#define DIVERGENCE_LOGITS 0u
#define DIVERGENCE_LOG_PROBABILITIES 1u
#define DIVERGENCE_PROBABILITIES 2u

// Numbers that are kept of a row: two logarithms, each as the sum of two, and a sum.
#define DIVERGENCE_SAVED 5

struct DivergenceParams {
  uint32_t length;        // of a row
  uint32_t aligned;       // all rows begin and end at multiples of 16 bytes
  uint32_t input;         // what the input has
  uint32_t target;        // what the target has
  uint32_t scale_of_row;  // each row has a scale of its own
  float beta;             // 0: KL(target, input), 1: KL(input, target), else the Jensen-Shannon divergence
  float scale;            // logits are multiplied by it
};

// scale.metal.
struct ScaleParams {
  uint64_t count;
};
