// What the gradient of a result adds to the row of an index.
#pragma once

#include "common/rows.h"
#include "embedding/embedding.h"

// Columns `column` to `column` + 3 of what the index at `place` gets. `again` tells that its bag has had the index
// before: of a maximum it gets its gradient once.
template <bool aligned, typename T>
inline float4 term(device const T* grad, device const long* bags, device const long* sizes, device const T* factors,
                   device const long* maxima, constant EmbeddingGradientParams& params, long place, long index,
                   bool again, uint column) {
  const uint depth = params.depth;
  const long result = params.in_bags ? bags[place] : place;
  const bool exists = result >= 0 && result < params.results;
  const long from = exists ? result : 0;
  float4 value = load4<aligned>(grad + from * depth, column, depth, 0.0f);
  if (params.weighted) value *= static_cast<float>(factors[place]);
  if (params.mode == EMBEDDING_MEAN) value /= float(max(sizes[from], 1l));
  if (params.mode == EMBEDDING_MAX) {
    for (uint c = 0; c < 4; ++c) {
      if (column + c < depth && (again || maxima[from * depth + column + c] != index)) value[c] = 0.0f;
    }
  }
  return exists ? value : float4(0.0f);
}
