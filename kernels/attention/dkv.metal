// The gradients of attention's keys and values. A simdgroup holds 8 * kDown keys and values, and walks over the queries
// of all heads that share them, so that nothing is added up in memory.
#include "scores.h"

template <typename T, uint kSize>
[[kernel]] [[max_total_threads_per_threadgroup(32 * ATTENTION_SIMDS)]] void attention_dkv(
    device const T* q [[buffer(0)]], device const T* k [[buffer(1)]], device const T* v [[buffer(2)]],
    device const uchar* mask [[buffer(3)]], device const int* cu_seq_q [[buffer(4)]],
    device const int* cu_seq_k [[buffer(5)]], device const uint* seed [[buffer(6)]],
    device const float* softmax_sums [[buffer(7)]], device const float* delta [[buffer(8)]],
    device const T* d_out [[buffer(9)]], device T* dk [[buffer(10)]], device T* dv [[buffer(11)]],
    constant AttentionParams& p [[buffer(12)]], uint group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint simd [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  constexpr uint kDown = ATTENTION_DKV_DOWN(kSize, sizeof(T)), kSimds = ATTENTION_SIMDS;
  constexpr uint kQueries = ATTENTION_DKV_QUERIES(kSize, sizeof(T)), kPitch = kSize + 16 / sizeof(T),
                 kAcross = kQueries / 8;
  constexpr uint kKeys = 8 * kDown * kSimds;
  alignas(16) threadgroup T tile[2 * kQueries * kPitch];
  threadgroup T* const queries = tile;
  threadgroup T* const gradients = tile + kQueries * kPitch;
  threadgroup float largest[kQueries], rest[kQueries], subtracted[kQueries];

  const uint k_heads = p.heads / p.group;
  const uint index = p.first + group, k_head = index / p.blocks % k_heads, batch = index / p.blocks / k_heads;
  const uint block = index % p.blocks * kKeys;  // blocks with many queries come first
  const Sequence sequence = sequence_of(p, batch, cu_seq_q, cu_seq_k);
  if (block >= sequence.k_length) return;
  const Place place = place_of(lane);
  const uint key = block + simd * 8 * kDown;

  Fragments<T, kDown, kSize / 8> keys, values;
  load_by_tile<2 * kQueries, kPitch, kSimds>(keys, tile, rows_of(k, p.k, batch, k_head, sequence.k_first), block,
                                             sequence.k_length, p.head_size, p.vectors, thread_index, simd);
  load_by_tile<2 * kQueries, kPitch, kSimds>(values, tile, rows_of(v, p.v, batch, k_head, sequence.k_first), block,
                                             sequence.k_length, p.value_size, p.vectors, thread_index, simd);
  float ones[kDown], factors[kDown];
  fill(ones, 1.0f);
  fill(factors, p.scale);
  Fragments<float, kDown, kSize / 8> k_sums, v_sums;
  clear(k_sums);
  clear(v_sums);
  for (uint head = k_head * p.group; head < (k_head + 1) * p.group; ++head) {
    const Visibility visibility = visibility_of(p, mask, seed, sequence, batch, head, sizeof(T));
    const StridedRows<T> q_rows = rows_of(q, p.q, batch, head, sequence.q_first);
    const StridedRows<T> gradient_rows = rows_of(d_out, p.d_out, batch, head, sequence.q_first);
    const int64_t numbers = first_number(p, sequence, batch, head);
    const Range range =
        queries_of(p, visibility.shift, block, metal::min(block + kKeys, sequence.k_length) - 1, sequence.q_length);
    for (uint query = range.begin / kQueries * kQueries; query < range.end; query += kQueries) {
      metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
      load_rows<T, kQueries, kSize, kPitch, 32 * kSimds>(queries, q_rows, query, sequence.q_length, p.head_size,
                                                         p.vectors, thread_index);
      load_rows<T, kQueries, kSize, kPitch, 32 * kSimds>(gradients, gradient_rows, query, sequence.q_length,
                                                         p.value_size, p.vectors, thread_index);
      if (thread_index < kQueries) {
        const uint column = query + thread_index;
        const bool exists = column < sequence.q_length;
        const Sum softmax = sum_of(softmax_sums, p.numbers, numbers + column, exists);
        largest[thread_index] = softmax.largest;
        rest[thread_index] = softmax.rest;
        subtracted[thread_index] = exists ? delta[numbers + column] : 0.0f;
      }
      metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);

      Fragments<float, kDown, kAcross> scores, products;
      product_transposed<kPitch>(scores, keys, queries);
      product_transposed<kPitch>(products, values, gradients);
      const bool edge = has_edge(p, visibility, query, kQueries, key, 8 * kDown);
#pragma unroll
      for (uint m = 0; m < kDown; ++m) {
        const uint row = key + m * 8 + place.row;
#pragma unroll
        for (uint n = 0; n < kAcross; ++n) {
          const uint at = n * 8 + place.column, column = query + at;
          thread metal::float2& two = elements(scores.at[m][n]);
          thread metal::float2& gradient = elements(products.at[m][n]);
          const Weight x = weight<T>(p, visibility, two.x, {largest[at], rest[at]}, edge, column, row);
          const Weight y = weight<T>(p, visibility, two.y, {largest[at + 1], rest[at + 1]}, edge, column + 1, row);
          two = metal::float2(x.value, y.value);
          if (p.dropped != 0) {
            const metal::float2 upper = kept(p, visibility, column, row & ~1u),
                                lower = kept(p, visibility, column + 1, row & ~1u);
            const metal::float2 factors = row & 1 ? metal::float2(upper.y, lower.y) : metal::float2(upper.x, lower.x);
            two *= factors;
            gradient *= factors;
          }
          gradient = metal::float2(x.derivative, y.derivative) *
                     (gradient - metal::float2(subtracted[at], subtracted[at + 1]));
        }
      }
      Fragments<T, kDown, kAcross> rounded;
      round_to(rounded, scores);
      add_product<kPitch>(v_sums, ones, rounded, gradients);
      round_to(rounded, products);
      add_product<kPitch>(k_sums, ones, rounded, queries);
    }
  }

  store(v_sums, ones, first_row(dv, p.dv, batch, k_head, sequence.k_first), p.dv.row, key, sequence.k_length,
        p.value_size, place);
  store(k_sums, factors, first_row(dk, p.dk, batch, k_head, sequence.k_first), p.dk.row, key, sequence.k_length,
        p.head_size, place);
}

// Names have the largest head size that a kernel takes.
#define INSTANTIATE(T, size) \
  template                   \
      [[host_name("attention_dkv_" #size "_" #T)]] [[kernel]] decltype(attention_dkv<T, size>) attention_dkv<T, size>;
#define INSTANTIATE_SIZES(T) \
  INSTANTIATE(T, 64)         \
  INSTANTIATE(T, 96)         \
  INSTANTIATE(T, 128)        \
  INSTANTIATE(T, 192)        \
  INSTANTIATE(T, 256)
INSTANTIATE_SIZES(float)
INSTANTIATE_SIZES(half)
INSTANTIATE_SIZES(bfloat)
