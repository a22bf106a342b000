// The results of dkv.metal on GPUs whose units multiply tensors, for calls without masks, soft caps and dropout.
#include <metal_tensor>

#include "scores.h"
#include "unit_masks.h"
#include "unit_gradients.h"

// The numbers of a query: its softmax's sum, and what softmax's derivative subtracts.
struct QueryNumbers {
  float largest, rest, subtracted;
};
METAL_FUNC QueryNumbers query_numbers(constant AttentionParams& p, device const float* softmax_sums,
                                      device const float* delta, int64_t number, bool exists) {
  const Sum softmax = sum_of(softmax_sums, p.numbers, number, exists);
  return {softmax.largest, softmax.rest, exists ? delta[number] : 0.0f};
}

template <typename T, uint kSize, bool kGeneral>
[[kernel]] [[max_total_threads_per_threadgroup(ATTENTION_UNIT_THREADS(kSize))]] void attention_dkv_unit(
    device T* q [[buffer(0)]], device T* k [[buffer(1)]], device T* v [[buffer(2)]],
    device const uchar* mask [[buffer(3)]], device const int* cu_seq_q [[buffer(4)]],
    device const int* cu_seq_k [[buffer(5)]], device const float* softmax_sums [[buffer(7)]],
    device const float* delta [[buffer(8)]], device T* d_out [[buffer(9)]], device T* dk [[buffer(10)]],
    device T* dv [[buffer(11)]], constant AttentionParams& p [[buffer(12)]],
    uint group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]],
    uint simd [[simdgroup_index_in_threadgroup]]) {
  constexpr uint kSimds = ATTENTION_UNIT_THREADS(kSize) / 32, kKeys = ATTENTION_UNIT_ROWS(kSize);

  const HeadBlock given = block_of(p, p.first + group, p.heads / p.group);
  const uint k_head = given.head, batch = given.batch,
             block = given.number * kKeys;  // blocks with many queries come first
  const Sequence sequence = sequence_of(p, batch, cu_seq_q, cu_seq_k);
  if (block >= sequence.k_length) return;
  const uint rows = metal::min(kKeys, sequence.k_length - block), first = sequence.k_first + block;
  const auto keys = head_rows(first_row(k, p.k, batch, k_head, first), p.head_size, rows, p.k.row);
  const auto values = head_rows(first_row(v, p.v, batch, k_head, first), p.value_size, rows, p.v.row);
  auto products = metalcore_unit_gradients<T, kSize, true, kSimds>(pair_of_rows(keys, values), simd, 0);
  constexpr uint kQueries = decltype(products)::kColumns;
  threadgroup QueryNumbers tile[2][kQueries];  // of this tile's queries, and of the next one's

  for (uint head = k_head * p.group; head < (k_head + 1) * p.group; ++head) {
    const Visibility visibility = visibility_of(p, mask, nullptr, sequence, batch, head, sizeof(T));
    const auto queries =
        head_rows(first_row(q, p.q, batch, head, sequence.q_first), p.head_size, sequence.q_length, p.q.row);
    const auto gradients = head_rows(first_row(d_out, p.d_out, batch, head, sequence.q_first), p.value_size,
                                     sequence.q_length, p.d_out.row);
    const int64_t numbers = first_number(p, sequence, batch, head);
    const Range range = queries_of(p, visibility.shift, block, block + rows - 1, sequence.q_length);
    const uint begin = range.begin / kQueries * kQueries;
    if (begin >= range.end) continue;
    products.start({queries, gradients}, begin, range.end);
    const uint column = begin + thread_index;
    if (thread_index < kQueries)
      tile[begin / kQueries % 2][thread_index] =
          query_numbers(p, softmax_sums, delta, numbers + column, column < sequence.q_length);
    for (uint query = begin; query < range.end; query += kQueries) {
      metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
      threadgroup const QueryNumbers* const known = tile[query / kQueries % 2];
      QueryNumbers next = {0.0f, 0.0f, 0.0f};
      const uint column = query + kQueries + thread_index;
      if (thread_index < kQueries)
        next = query_numbers(p, softmax_sums, delta, numbers + column, column < sequence.q_length);
      products.multiply(query);
      const bool edge = has_edge<false>(p, visibility, query, kQueries, block + simd * 16, 16);
      const float scale = scale_and_mask<T, kGeneral, true>(p, visibility, products, edge, query, block);
#pragma unroll
      for (ushort i = 0; i < products.scores.get_capacity(); ++i) {
        threadgroup const QueryNumbers& of_query = known[products.place(i).x];
        const float score = metal::min(metal::fma(products.scores[i], scale, -of_query.largest), 0.0f);
        products.scores[i] = metal::fast::exp2(score - of_query.rest);
      }
      products.wait();
#pragma unroll
      for (ushort i = 0; i < products.scores.get_capacity(); ++i)
        products.derivatives[i] =
            products.scores[i] * (products.derivatives[i] - known[products.place(i).x].subtracted);
      products.add(query);
      if (thread_index < kQueries) tile[query / kQueries % 2 ^ 1][thread_index] = next;
    }
    products.finish();
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  }
  products.store(head_rows(first_row(dk, p.dk, batch, k_head, first), p.head_size, rows, p.dk.row), p.scale);
  products.store_values(head_rows(first_row(dv, p.dv, batch, k_head, first), p.value_size, rows, p.dv.row));
}

// Names have the largest head size that a kernel takes.
#define INSTANTIATE(name, T, size, general)                                  \
  template [[host_name("attention_dkv_unit_" name #size "_" #T)]] [[kernel]] \
  decltype(attention_dkv_unit<T, size, general>) attention_dkv_unit<T, size, general>;
#define INSTANTIATE_KINDS(T, size) \
  INSTANTIATE("", T, size, false)  \
  INSTANTIATE("general_", T, size, true)
INSTANTIATE_KINDS(half, 64)
INSTANTIATE_KINDS(half, 128)
INSTANTIATE_KINDS(bfloat, 64)
INSTANTIATE_KINDS(bfloat, 128)
