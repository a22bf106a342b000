// The results of dq.metal on GPUs whose units multiply tensors, for calls without masks, soft caps and dropout.
#include <metal_tensor>

#include "scores.h"
#include "unit_masks.h"
#include "unit_gradients.h"

template <typename T, uint kSize, bool kGeneral>
[[kernel]] [[max_total_threads_per_threadgroup(ATTENTION_UNIT_THREADS(kSize))]] void attention_dq_unit(
    device T* q [[buffer(0)]], device T* k [[buffer(1)]], device T* v [[buffer(2)]],
    device const uchar* mask [[buffer(3)]], device const int* cu_seq_q [[buffer(4)]],
    device const int* cu_seq_k [[buffer(5)]], device const T* out [[buffer(7)]],
    device const float* softmax_sums [[buffer(8)]], device T* d_out [[buffer(9)]],
    device const float* d_lse [[buffer(10)]], device T* dq [[buffer(11)]], device float* delta [[buffer(12)]],
    device const T* rests [[buffer(13)]], constant AttentionParams& p [[buffer(14)]],
    uint group [[threadgroup_position_in_grid]], uint simd [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  constexpr uint kSimds = ATTENTION_UNIT_THREADS(kSize) / 32, kQueries = ATTENTION_UNIT_ROWS(kSize);
  threadgroup float largest[kQueries], rest[kQueries], subtracted[kQueries];

  // Blocks with many keys come first.
  const HeadBlock given = block_of(p, p.first + group, p.heads);
  const uint head = given.head, batch = given.batch, block = (p.blocks - 1 - given.number) * kQueries;
  const Sequence sequence = sequence_of(p, batch, cu_seq_q, cu_seq_k);
  if (block >= sequence.q_length) return;
  const uint rows = metal::min(kQueries, sequence.q_length - block), first = sequence.q_first + block;
  const Visibility visibility = visibility_of(p, mask, nullptr, sequence, batch, head, sizeof(T));
  const auto queries = head_rows(first_row(q, p.q, batch, head, first), p.head_size, rows, p.q.row);
  const auto gradients = head_rows(first_row(d_out, p.d_out, batch, head, first), p.value_size, rows, p.d_out.row);
  const auto keys =
      head_rows(first_row(k, p.k, batch, head / p.group, sequence.k_first), p.head_size, sequence.k_length, p.k.row);
  const auto values =
      head_rows(first_row(v, p.v, batch, head / p.group, sequence.k_first), p.value_size, sequence.k_length, p.v.row);
  auto products = metalcore_unit_gradients<T, kSize, false, kSimds>(pair_of_rows(queries, gradients), simd, 0);
  constexpr uint kKeys = decltype(products)::kColumns;

  const StridedRows<T> out_rows = rows_of(out, p.out, batch, head, first);
  const StridedRows<T> rest_rows = rows_of(rests, p.rests, batch, head, first);
  const StridedRows<T> gradient_rows = rows_of<T>(d_out, p.d_out, batch, head, first);
  const int64_t numbers = first_number(p, sequence, batch, head) + block;
#pragma unroll 4
  for (uint row = 16 * simd; row < 16 * simd + 16; ++row) {
    const bool exists = row < rows;
    const uint at = exists ? row : 0;
    float sum = 0.0f;
#pragma unroll
    for (uint i = 0; i < kSize; i += 32)
      if (i + lane < p.value_size) {
        const float gradient = float(gradient_rows.row(at)[i + lane]);
        sum = metal::fma(float(out_rows.row(at)[i + lane]), gradient, sum);
        sum = metal::fma(float(rest_rows.row(at)[i + lane]), gradient, sum);
      }
    sum = metal::simd_sum(sum);
    if (exists && p.has_lse_gradient) sum -= d_lse[numbers + row];
    if (lane == 0) {
      const Sum softmax = sum_of(softmax_sums, p.numbers, numbers + row, exists);
      largest[row] = softmax.largest;
      rest[row] = softmax.rest;
      subtracted[row] = sum;
      if (exists) delta[numbers + row] = sum;
    }
  }
  metal::simdgroup_barrier(metal::mem_flags::mem_threadgroup);

  const Range range = keys_of(p, visibility.shift, block, block + rows - 1, sequence.k_length);
  const uint begin = range.begin / kKeys * kKeys;
  if (begin < range.end) products.start({keys, values}, begin, range.end);
  for (uint key = begin; key < range.end; key += kKeys) {
    products.multiply(key);
    const bool edge = has_edge<false>(p, visibility, block + simd * 16, 16, key, kKeys);
    const float scale = scale_and_mask<T, kGeneral, false>(p, visibility, products, edge, block, key);
#pragma unroll
    for (ushort i = 0; i < products.scores.get_capacity(); ++i) {
      const uint row = products.place(i).y;
      const float score = metal::min(metal::fma(products.scores[i], scale, -largest[row]), 0.0f);
      products.scores[i] = metal::fast::exp2(score - rest[row]);
    }
    products.wait();
#pragma unroll
    for (ushort i = 0; i < products.scores.get_capacity(); ++i)
      products.derivatives[i] = products.scores[i] * (products.derivatives[i] - subtracted[products.place(i).y]);
    products.add(key);
  }
  products.finish();
  products.store(head_rows(first_row(dq, p.dq, batch, head, first), p.head_size, rows, p.dq.row), p.scale);
}

// Names have the largest head size that a kernel takes.
#define INSTANTIATE(name, T, size, general)                                 \
  template [[host_name("attention_dq_unit_" name #size "_" #T)]] [[kernel]] \
  decltype(attention_dq_unit<T, size, general>) attention_dq_unit<T, size, general>;
#define INSTANTIATE_KINDS(T, size) \
  INSTANTIATE("", T, size, false)  \
  INSTANTIATE("general_", T, size, true)
INSTANTIATE_KINDS(half, 64)
INSTANTIATE_KINDS(half, 128)
INSTANTIATE_KINDS(bfloat, 64)
INSTANTIATE_KINDS(bfloat, 128)
