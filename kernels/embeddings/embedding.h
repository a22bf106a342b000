// What the kernels of embeddings and csrc/ops/embeddings/ share.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

#define EMBEDDING_SUM 0u
#define EMBEDDING_MEAN 1u
#define EMBEDDING_MAX 2u
#define EMBEDDING_POSITIONS 8u  // of few indices that a threadgroup has, one for each of its simdgroups

struct EmbeddingParams {
  int64_t rows;    // of the table
  uint32_t depth;  // of a row, in units of what a thread copies
  uint32_t wide;   // indices are int64, otherwise int32
};

struct EmbeddingBagParams {
  int64_t rows;
  int64_t padding;  // this index is left out
  uint32_t depth;   // elements of a row
  uint32_t aligned;
  uint32_t count;  // indices
  uint32_t bags;
  uint32_t offsets;  // as many as bags, or one more
  uint32_t mode;
  uint32_t weighted;  // each index has a factor
};

struct EmbeddingGradientParams {
  int64_t rows;
  int64_t padding;
  uint32_t depth;
  uint32_t aligned;
  uint32_t count;    // indices
  uint32_t results;  // rows of the gradient that is given
  uint32_t block;    // positions of the sorted indices that a thread walks
  uint32_t mode;
  uint32_t in_bags;  // indices belong to bags, whose gradients are given
  uint32_t weighted;
  uint32_t by_count;  // the gradient of a row is divided by how often its index occurs
};
