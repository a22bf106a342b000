// Definitions that clip.metal and csrc/ops/optim/clip.cpp share.
#pragma once

#include "tensors.h"

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
