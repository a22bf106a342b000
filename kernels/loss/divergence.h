// What divergence.metal and csrc/ops/loss/divergence.cpp share.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

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
