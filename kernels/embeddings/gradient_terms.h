// What the gradients of results add to the rows of indices.
#pragma once

#include "common/rows.h"
#include "embeddings/embedding.h"

// A result's gradient on its way to the row of an index.
struct Term {
  uint place;   // of the index
  uint result;  // whose gradient it is; 0 where there is none
  bool exists;
  bool again;  // its bag has had the index before: of a maximum it gets its gradient once
  long index;
};

inline Term term_at(uint place, long index, bool again, device const long* bags,
                    constant EmbeddingGradientParams& params) {
  const long result = params.in_bags ? bags[place] : long(place);
  const bool exists = result >= 0 && result < params.results;
  return {place, exists ? static_cast<uint>(result) : 0, exists, again, index};
}

// Columns `column` to `column` + 3 of the terms. All loads of a kind are on their way before one of them is used, which
// they are not where a load stands among branches.
template <bool aligned, uint N, typename T>
inline void load_terms(thread float4* v, thread const Term* terms, device const T* grad, device const long* sizes,
                       device const T* factors, device const long* maxima, constant EmbeddingGradientParams& params,
                       uint column) {
  const uint depth = params.depth;
#pragma unroll
  for (uint k = 0; k < N; ++k) v[k] = load4<aligned>(grad + ulong(terms[k].result) * depth, column, depth, 0.0f);
  if (params.weighted) {
#pragma unroll
    for (uint k = 0; k < N; ++k) v[k] *= static_cast<float>(factors[terms[k].place]);
  }
  if (params.mode == EMBEDDING_MEAN) {
#pragma unroll
    for (uint k = 0; k < N; ++k) v[k] /= float(max(sizes[terms[k].result], 1l));
  }
  if (params.mode == EMBEDDING_MAX) {
#pragma unroll
    for (uint k = 0; k < N; ++k) {
      device const long* const of_result = maxima + ulong(terms[k].result) * depth;
      for (uint c = 0; c < 4; ++c) {
        const bool chosen = of_result[min(column + c, depth - 1)] == terms[k].index;
        v[k][c] = chosen && !terms[k].again ? v[k][c] : 0.0f;
      }
    }
  }
#pragma unroll
  for (uint k = 0; k < N; ++k) v[k] = terms[k].exists ? v[k] : float4(0.0f);
}
