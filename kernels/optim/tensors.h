// What the kernels over many tensors at once share with csrc/ops/optim/.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

// A threadgroup works on one chunk of one tensor. Chunks are multiples of OPTIM_STRIP elements per simdgroup.
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
