// The gradient of a table's rows, from the gradients of what was looked up, in the order of sorted indices. Equal
// indices are a run, whose gradients one thread adds in order, so that the result has the same bits every time.
//
// A thread has four columns and `block` positions. The sum of a run that lies in the block goes to the table. One that
// began before leaves its sum as the block's head, and one that begins here and goes on leaves its tail. A second
// dispatch adds a tail and the heads that follow.
#include "embeddings/gradient_terms.h"

// Gradients that are on their way at once.
constexpr constant uint kAtOnce = 4;

// The first position with an index that is larger, or at least as large if `equal`.
inline uint bound(device const long* sorted, uint count, long index, bool equal) {
  uint low = 0, high = count;
  while (low < high) {
    const uint middle = (low + high) / 2;
    if (sorted[middle] < index || (!equal && sorted[middle] == index))
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

// How often an index occurs.
inline uint occurrences(device const long* sorted, uint count, long index) {
  return bound(sorted, count, index, false) - bound(sorted, count, index, true);
}

template <bool aligned, typename T>
inline void write_row(device T* table, float4 sum, long index, device const long* sorted,
                      constant EmbeddingGradientParams& params, uint column) {
  if (index < 0 || index >= params.rows || index == params.padding) return;
  if (params.by_count) sum /= float(occurrences(sorted, params.count, index));
  store4<aligned>(table + index * params.depth, column, params.depth, sum);
}

template <bool aligned, typename T>
inline void sum_runs(device const T* grad, device const long* sorted, device const long* order, device const long* bags,
                     device const long* sizes, device const T* factors, device const long* maxima, device T* table,
                     device float* parts, constant EmbeddingGradientParams& params, uint2 at) {
  const uint depth = params.depth, column = at.x * 4, count = params.count;
  const uint first = at.y * params.block, last = min(first + params.block, count);
  device float* const head = parts + ulong(2 * at.y) * depth;
  bool before = first > 0 && sorted[first - 1] == sorted[first];  // the run began before this block
  float4 sum = float4(0.0f);
  for (uint start = first; start < last; start += kAtOnce) {
    float4 v[kAtOnce];
    Term terms[kAtOnce];
#pragma unroll
    for (uint k = 0; k < kAtOnce; ++k) {
      const uint position = min(start + k, last - 1);
      const long place = order[position], index = sorted[position];
      const bool again = params.mode == EMBEDDING_MAX && position > 0 && sorted[position - 1] == index &&
                         bags[order[position - 1]] == bags[place];
      terms[k] = term_at(static_cast<uint>(place), index, again, bags, params);
    }
    load_terms<aligned, kAtOnce>(v, terms, grad, sizes, factors, maxima, params, column);
#pragma unroll
    for (uint k = 0; k < kAtOnce; ++k) {
      const uint position = start + k;
      if (position >= last) continue;
      sum += v[k];
      const bool goes_on = position + 1 < count && sorted[position + 1] == terms[k].index;
      if (goes_on && position + 1 < last) continue;
      if (before || goes_on)
        store4<false>(head + (before ? 0 : depth), column, depth, sum);
      else
        write_row<aligned>(table, sum, terms[k].index, sorted, params, column);
      before = false;
      sum = float4(0.0f);
    }
  }
}

template <typename T>
kernel void embedding_gradient(device const T* grad [[buffer(0)]], device const long* sorted [[buffer(1)]],
                               device const long* order [[buffer(2)]], device const long* bags [[buffer(3)]],
                               device const long* sizes [[buffer(4)]], device const T* factors [[buffer(5)]],
                               device const long* maxima [[buffer(6)]], device T* table [[buffer(7)]],
                               device float* parts [[buffer(8)]],
                               constant EmbeddingGradientParams& params [[buffer(9)]],
                               uint2 at [[thread_position_in_grid]]) {
  if (params.aligned)
    sum_runs<true>(grad, sorted, order, bags, sizes, factors, maxima, table, parts, params, at);
  else
    sum_runs<false>(grad, sorted, order, bags, sizes, factors, maxima, table, parts, params, at);
}

// The runs that go on beyond the block in which they begin.
template <typename T>
kernel void embedding_gradient_long(device const float* parts [[buffer(0)]], device const long* sorted [[buffer(1)]],
                                    device T* table [[buffer(2)]],
                                    constant EmbeddingGradientParams& params [[buffer(3)]],
                                    uint2 at [[thread_position_in_grid]]) {
  const uint depth = params.depth, column = at.x * 4, count = params.count;
  const uint first = at.y * params.block;
  const uint next = first + params.block;  // the first position of the block that follows
  if (next >= count || sorted[next] != sorted[next - 1]) return;
  const long index = sorted[next];
  if (sorted[first] == index && first > 0 && sorted[first - 1] == index) return;  // the run began before
  const uint heads = (bound(sorted, count, index, false) - next + params.block - 1) / params.block;
  parts += ulong(2 * at.y + 1) * depth;
  float4 sum = load4<false>(parts, column, depth, 0.0f);
  parts += depth;
#pragma unroll 8
  for (uint k = 0; k < heads; ++k) sum += load4<false>(parts + ulong(2 * k) * depth, column, depth, 0.0f);
  write_row<false>(table, sum, index, sorted, params, column);
}

#define INSTANTIATE(name, ...) template [[host_name(name)]] [[kernel]] decltype(__VA_ARGS__) __VA_ARGS__;

#define INSTANTIATE_TYPE(suffix, T)                                \
  INSTANTIATE("embedding_gradient_" suffix, embedding_gradient<T>) \
  INSTANTIATE("embedding_gradient_long_" suffix, embedding_gradient_long<T>)

INSTANTIATE_TYPE("float", float)
INSTANTIATE_TYPE("half", half)
INSTANTIATE_TYPE("bfloat", bfloat)
