// How threadgroups of attention that run together merge their results.
#pragma once

#include "attention/decode_walk_matrices.h"
#include "common/together.h"

// What a threadgroup's results are in, for those that run together with it: floats, and each row's largest score
// with the sum of its weights.
template <uint D>
struct SharedResults {
  static constexpr constant uint kPitch = D + 8;

  threadgroup float* sums;
  threadgroup float2* softmax;
};

// Merges the results of threadgroups that run together, of which each writes some elements of all rows.
template <uint D, uint R>
METAL_FUNC void write_merged(SharedResults<D> shared, thread const TileRows& rows,
                             threadgroup const MatrixRows<R>& places, device const uchar* sinks, device uchar* out,
                             device float* lse, uint number, constant AttentionDecodeParams& params, uint thread_index,
                             uint threads) {
  constexpr uint kAtOnce = 8, kPairs = D / 2;
  const bool sinking = params.sink_type != NUMBER_NONE;
  metalcore_synchronize_together(0);
  for (uint i = number * threads + thread_index; i < rows.count * kPairs; i += params.splits * threads) {
    const uint row = i / kPairs, column = i % kPairs * 2, head = head_of(rows, rows.first + row, params);
    threadgroup const float2* const sums =
        reinterpret_cast<threadgroup const float2*>(shared.sums + row * shared.kPitch + column);
    float top = sinking ? number_at(sinks, head, params.sink_type) * M_LOG2E_F : -INFINITY;
    float total = sinking ? 1.0f : 0.0f;
    float2 value = float2(0.0f);
    for (uint first = 0; first < params.splits; first += kAtOnce) {
      float2 softmax[kAtOnce], others[kAtOnce];
#pragma unroll
      for (uint j = 0; j < kAtOnce; ++j) {
        softmax[j] = float2(-INFINITY, 0.0f);
        others[j] = float2(0.0f);
        if (first + j >= params.splits) continue;
        softmax[j] = metalcore_load_together(shared.softmax + row, first + j, 0);
        others[j] = metalcore_load_together(sums, first + j, 0);
      }
      float raised = top;
#pragma unroll
      for (uint j = 0; j < kAtOnce; ++j) raised = max(raised, softmax[j].x);
      const float base = base_of(raised), factor = fast::exp2(top - base);
      top = raised;
      total *= factor;
      value *= factor;
#pragma unroll
      for (uint j = 0; j < kAtOnce; ++j) {
        const float weight = fast::exp2(softmax[j].x - base);
        total = fma(weight, softmax[j].y, total);
        value = fma(float2(weight), others[j], value);
      }
    }
    if (column == 0)
      write_logarithm(reinterpret_cast<device Number<float>*>(lse) + logarithm_of(rows, rows.first + row, 0, params),
                      base_of(top), total, params);
    if (column >= params.value_size) continue;
    value *= total == 0.0f ? 0.0f : 1.0f / total;  // a NaN stays
    const ulong to = places.results[row] + column;
    store_number(out, to, params.out_type, value.x);
    store_number(out, to + 1, params.out_type, value.y);
  }
  metalcore_synchronize_together(0);  // nobody reads this threadgroup's memory any more
}
