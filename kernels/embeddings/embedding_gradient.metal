// The gradient of a table's rows, from the gradients of what was looked up, in the order of sorted indices. Equal
// indices are a run, whose gradients one thread adds in order, so that the result has the same bits every time.
//
// A thread has four columns and `block` positions. The sum of a run that lies in the block goes to the table. One that
// began before leaves its sum as the block's head, and one that begins here and goes on leaves its tail. A second
// dispatch adds a tail and the heads that follow.
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

// Gradients that are on their way at once: where indices are sorted, and where they are few.
constexpr constant uint kAtOnce = 4, kUsesAtOnce = 4;
// The simdgroups of a threadgroup share the positions of an index that has more uses than these.
constexpr constant uint kManyUses = 32;

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

// Few indices are not sorted. embedding_uses counts how often each occurs. A simdgroup of embedding_gradient_few has a
// position of the indices and 128 columns. Only the first use of an index goes on: its simdgroup looks for the others,
// 32 positions at once, and adds their gradients in order. Where there are many, all simdgroups of the threadgroup
// share the positions. So the result has the same bits every time. The table has zeros before.

// The gradients of an index's uses at positions [begin, end), of which there are `most` at most.
template <bool aligned, typename T>
inline float4 sum_uses(device const T* grad, device const long* indices, device const long* bags,
                       device const long* sizes, device const T* factors, device const long* maxima,
                       constant EmbeddingGradientParams& params, long index, uint begin, uint end, uint most,
                       uint column, uint lane) {
  float4 sum = float4(0.0f);
  uint uses = 0;
  long last_bag = -1;
  for (uint start = begin; start < end && uses < most; start += 32) {
    const uint position = start + lane;
    const bool same = position < end && indices[min(position, end - 1)] == index;
    const uint found = static_cast<uint>(static_cast<simd_vote::vote_t>(simd_ballot(same)));
    if (found == 0) continue;
    uses += popcount(found);
    for (uint first = 0; first < 32; first += kUsesAtOnce) {
      const uint here = found >> first & ((1u << kUsesAtOnce) - 1);
      if (here == 0) continue;
      Term terms[kUsesAtOnce];
#pragma unroll
      for (uint k = 0; k < kUsesAtOnce; ++k) {
        const bool used = here >> k & 1;
        terms[k] = term_at(start + first + (used ? k : ctz(here)), index, false, bags, params);
        terms[k].exists = terms[k].exists && used;
      }
      if (params.mode == EMBEDDING_MAX) {
#pragma unroll
        for (uint k = 0; k < kUsesAtOnce; ++k) {
          if ((here >> k & 1) == 0) continue;
          terms[k].again = terms[k].result == last_bag;
          last_bag = terms[k].result;
        }
      }
      float4 v[kUsesAtOnce];
      load_terms<aligned, kUsesAtOnce>(v, terms, grad, sizes, factors, maxima, params, column);
#pragma unroll
      for (uint k = 0; k < kUsesAtOnce; ++k) sum += v[k];
    }
  }
  return sum;
}

// Writes the sum of the uses of the index whose first one is at a position.
template <bool aligned, typename T>
inline void write_first(device T* table, float4 sum, uint position, device const long* indices,
                        device const uint* counted, constant EmbeddingGradientParams& params, uint column) {
  if (params.by_count) sum /= float(counted[position]);
  store4<aligned>(table + indices[position] * params.depth, column, params.depth, sum);
}

// A threadgroup's positions lie `step` apart from `first` on: those of first uses lie together where indices are few.
template <bool aligned, typename T>
inline void sum_few(device const T* grad, device const long* indices, device const long* bags, device const long* sizes,
                    device const T* factors, device const long* maxima, device T* table, device const uint* counted,
                    constant EmbeddingGradientParams& params, threadgroup float4 (&parts)[EMBEDDING_POSITIONS][32],
                    uint first, uint step, uint simdgroup, uint column, uint lane) {
  const uint count = params.count;
  // Lanes look at the threadgroup's positions. A maximum asks for an index's last bag, and so for its uses in order.
  const uint looked = first + lane * step;
  const bool many = lane < EMBEDDING_POSITIONS && looked < count && counted[min(looked, count - 1)] > kManyUses &&
                    params.mode != EMBEDDING_MAX;
  uint shared = static_cast<uint>(static_cast<simd_vote::vote_t>(simd_ballot(many)));
  const uint own = first + simdgroup * step, known = own < count && (shared >> simdgroup & 1) == 0 ? counted[own] : 0;
  if (known == 1) {
    float4 sum;
    const Term term[1] = {term_at(own, indices[own], false, bags, params)};
    load_terms<aligned, 1>(&sum, term, grad, sizes, factors, maxima, params, column);
    write_first<aligned>(table, sum, own, indices, counted, params, column);
  }
  // First the simdgroup's own position, and then those that all share.
  uint position = own, begin = own / 32 * 32, end = known > 1 ? count : begin;
  for (bool alone = true;; alone = false) {
    float4 sum = float4(0.0f);
    if (begin < end)
      sum = sum_uses<aligned>(grad, indices, bags, sizes, factors, maxima, params, indices[position], begin, end,
                              alone ? known : count, column, lane);
    if (alone) {
      if (begin < end) write_first<aligned>(table, sum, position, indices, counted, params, column);
    } else {
      parts[simdgroup][lane] = sum;
      threadgroup_barrier(mem_flags::mem_threadgroup);
      if (simdgroup == 0) {
        for (uint k = 1; k < EMBEDDING_POSITIONS; ++k) sum += parts[k][lane];
        write_first<aligned>(table, sum, position, indices, counted, params, column);
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    if (shared == 0) break;
    position = first + ctz(shared) * step;
    shared &= shared - 1;
    const uint from = position / 32 * 32, blocks = (count - from + 31) / 32;
    const uint share = (blocks + EMBEDDING_POSITIONS - 1) / EMBEDDING_POSITIONS * 32;
    begin = min(from + simdgroup * share, count);
    end = min(begin + share, count);
  }
}

// How often the first use of an index is followed by others, itself included; 0 for the others, and for indices that
// the table does not have. A simdgroup has a position.
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
  if (!simd_all(first) || index < 0 || index >= params.rows || index == params.padding) uses = 0;
  if (lane == 0) counted[own] = uses;
}

template <typename T>
[[kernel]] [[max_total_threads_per_threadgroup(32 * EMBEDDING_POSITIONS)]] void embedding_gradient_few(
    device const T* grad [[buffer(0)]], device const long* indices [[buffer(1)]], device const long* bags [[buffer(2)]],
    device const long* sizes [[buffer(3)]], device const T* factors [[buffer(4)]],
    device const long* maxima [[buffer(5)]], device T* table [[buffer(6)]],
    constant EmbeddingGradientParams& params [[buffer(7)]], device const uint* counted [[buffer(8)]],
    uint2 group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup float4 parts[EMBEDDING_POSITIONS][32];
  const uint first = group.y, column = (group.x * 32 + lane) * 4;
  const uint step = (params.count + EMBEDDING_POSITIONS - 1) / EMBEDDING_POSITIONS;
  if (params.aligned)
    sum_few<true>(grad, indices, bags, sizes, factors, maxima, table, counted, params, parts, first, step, simdgroup,
                  column, lane);
  else
    sum_few<false>(grad, indices, bags, sizes, factors, maxima, table, counted, params, parts, first, step, simdgroup,
                   column, lane);
}

#define INSTANTIATE(name, ...) template [[host_name(name)]] [[kernel]] decltype(__VA_ARGS__) __VA_ARGS__;

#define INSTANTIATE_TYPE(suffix, T)                                \
  INSTANTIATE("embedding_gradient_" suffix, embedding_gradient<T>) \
  INSTANTIATE("embedding_gradient_long_" suffix, embedding_gradient_long<T>)

INSTANTIATE_TYPE("float", float)
INSTANTIATE_TYPE("half", half)
INSTANTIATE_TYPE("bfloat", bfloat)

INSTANTIATE("embedding_gradient_few_float", embedding_gradient_few<float>)
INSTANTIATE("embedding_gradient_few_half", embedding_gradient_few<half>)
INSTANTIATE("embedding_gradient_few_bfloat", embedding_gradient_few<bfloat>)
