// The gradient of a table's rows from few indices, which are not sorted. A simdgroup has a position of the indices and
// 128 columns, and looks for its index among all of them, 32 at once. Only the first use of an index goes on: it adds
// the gradients of all uses in order, so that the result has the same bits every time. The table has zeros before.
// Where rows are long, many simdgroups would search for the same: then embedding_uses has counted the uses before.
#include "embeddings/gradient_terms.h"

// Gradients that are on their way at once.
constexpr constant uint kAtOnce = 8;

template <bool aligned, typename T>
inline void sum_uses(device const T* grad, device const long* indices, device const long* bags,
                     device const long* sizes, device const T* factors, device const long* maxima, device T* table,
                     device const uint* counted, constant EmbeddingGradientParams& params, uint own, uint column,
                     uint lane) {
  const uint count = params.count;
  const uint known = params.counted ? counted[own] : count;
  const long index = indices[own];
  if (known == 0 || index < 0 || index >= params.rows || index == params.padding) return;
  float4 sum = float4(0.0f);
  uint uses = 0;
  long last_bag = -1;
  for (uint start = params.counted ? own / 32 * 32 : 0; start < count && uses < known; start += 32) {
    const uint position = start + lane;
    const bool same = position < count && indices[min(position, count - 1)] == index;
    const uint found = static_cast<uint>(static_cast<simd_vote::vote_t>(simd_ballot(same)));
    if (found == 0) continue;
    if (uses == 0 && start + ctz(found) < own) return;  // another simdgroup has this index
    uses += popcount(found);
    for (uint first = 0; first < 32; first += kAtOnce) {
      const uint here = found >> first & ((1u << kAtOnce) - 1);
      if (here == 0) continue;
      Term terms[kAtOnce];
#pragma unroll
      for (uint k = 0; k < kAtOnce; ++k) {
        const bool used = here >> k & 1;
        terms[k] = term_at(start + first + (used ? k : ctz(here)), index, false, bags, params);
        terms[k].exists = terms[k].exists && used;
      }
      if (params.mode == EMBEDDING_MAX) {
#pragma unroll
        for (uint k = 0; k < kAtOnce; ++k) {
          if ((here >> k & 1) == 0) continue;
          terms[k].again = terms[k].result == last_bag;
          last_bag = terms[k].result;
        }
      }
      float4 v[kAtOnce];
      load_terms<aligned, kAtOnce>(v, terms, grad, sizes, factors, maxima, params, column);
#pragma unroll
      for (uint k = 0; k < kAtOnce; ++k) sum += v[k];
    }
  }
  if (params.by_count) sum /= float(uses);
  store4<aligned>(table + index * params.depth, column, params.depth, sum);
}

// How often the first use of an index is followed by others, itself included; 0 for the others. A simdgroup has a
// position.
kernel void embedding_uses(device const long* indices [[buffer(0)]], device uint* counted [[buffer(1)]],
                           constant EmbeddingGradientParams& params [[buffer(2)]], uint2 at [[thread_position_in_grid]],
                           uint lane [[thread_index_in_simdgroup]]) {
  const uint own = at.y, count = params.count;
  if (own >= count) return;
  const long index = indices[own];
  uint uses = 0;
  bool first = true;
  for (uint position = lane; position < count; position += 32) {
    const bool same = indices[position] == index;
    uses += same;
    first = first && (!same || position >= own);
  }
  uses = simd_sum(uses);
  if (!simd_all(first)) uses = 0;
  if (lane == 0) counted[own] = uses;
}

template <typename T>
kernel void embedding_gradient_few(device const T* grad [[buffer(0)]], device const long* indices [[buffer(1)]],
                                   device const long* bags [[buffer(2)]], device const long* sizes [[buffer(3)]],
                                   device const T* factors [[buffer(4)]], device const long* maxima [[buffer(5)]],
                                   device T* table [[buffer(6)]],
                                   constant EmbeddingGradientParams& params [[buffer(7)]],
                                   device const uint* counted [[buffer(8)]], uint2 at [[thread_position_in_grid]],
                                   uint lane [[thread_index_in_simdgroup]]) {
  if (at.y >= params.count) return;
  if (params.aligned)
    sum_uses<true>(grad, indices, bags, sizes, factors, maxima, table, counted, params, at.y, at.x * 4, lane);
  else
    sum_uses<false>(grad, indices, bags, sizes, factors, maxima, table, counted, params, at.y, at.x * 4, lane);
}

#define INSTANTIATE(name, ...) template [[host_name(name)]] [[kernel]] decltype(__VA_ARGS__) __VA_ARGS__;

INSTANTIATE("embedding_gradient_few_float", embedding_gradient_few<float>)
INSTANTIATE("embedding_gradient_few_half", embedding_gradient_few<half>)
INSTANTIATE("embedding_gradient_few_bfloat", embedding_gradient_few<bfloat>)
