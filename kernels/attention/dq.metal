// The gradient of attention's queries. For each query it also writes the sum over the keys of weights times their
// gradients, which is what softmax's derivative subtracts: the product of a result and its gradient.
#include "scores.h"

// Adds a lane's part of the products of two matrices' rows.
template <typename T, uint kDown, uint kAcross>
METAL_FUNC void add_products(thread float (&sums)[kDown], thread Fragments<T, kDown, kAcross>& a,
                             thread Fragments<T, kDown, kAcross>& b) {
#pragma unroll
  for (uint m = 0; m < kDown; ++m) {
#pragma unroll
    for (uint n = 0; n < kAcross; ++n) {
      const metal::float2 product = metal::float2(elements(a.at[m][n])) * metal::float2(elements(b.at[m][n]));
      sums[m] += product.x + product.y;
    }
  }
}

template <typename T, uint kSize>
[[kernel]] [[max_total_threads_per_threadgroup(32 * ATTENTION_SIMDS)]] void attention_dq(
    device const T* q [[buffer(0)]], device const T* k [[buffer(1)]], device const T* v [[buffer(2)]],
    device const uchar* mask [[buffer(3)]], device const int* cu_seq_q [[buffer(4)]],
    device const int* cu_seq_k [[buffer(5)]], device const uint* seed [[buffer(6)]], device const T* out [[buffer(7)]],
    device const float* softmax_sums [[buffer(8)]], device const T* d_out [[buffer(9)]],
    device const float* d_lse [[buffer(10)]], device T* dq [[buffer(11)]], device float* delta [[buffer(12)]],
    device const T* rests [[buffer(13)]], constant AttentionParams& p [[buffer(14)]],
    uint group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]],
    uint simd [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  constexpr uint kDown = ATTENTION_DQ_DOWN(kSize, sizeof(T)), kSimds = ATTENTION_SIMDS;
  constexpr uint kKeys = ATTENTION_KEYS(kSize, sizeof(T)), kPitch = kSize + 16 / sizeof(T), kAcross = kKeys / 8;
  constexpr uint kQueries = 8 * kDown * kSimds;
  alignas(16) threadgroup T tile[2 * kKeys * kPitch];
  threadgroup T* const keys = tile;
  threadgroup T* const values = tile + kKeys * kPitch;

  // Blocks with many keys come first.
  const uint index = p.first + group, head = index / p.blocks % p.heads, batch = index / p.blocks / p.heads;
  const uint block = (p.blocks - 1 - index % p.blocks) * kQueries;
  const Sequence sequence = sequence_of(p, batch, cu_seq_q, cu_seq_k);
  if (block >= sequence.q_length) return;
  const Place place = place_of(lane);
  const uint query = block + simd * 8 * kDown;
  const Visibility visibility = visibility_of(p, mask, seed, sequence, batch, head, sizeof(T));

  // Results are needed before the queries are.
  Fragments<T, kDown, kSize / 8> queries, gradients;
  load_by_tile<2 * kKeys, kPitch, kSimds>(queries, tile, rows_of(out, p.out, batch, head, sequence.q_first), block,
                                          sequence.q_length, p.value_size, p.vectors, thread_index, simd);
  load_by_tile<2 * kKeys, kPitch, kSimds>(gradients, tile, rows_of(d_out, p.d_out, batch, head, sequence.q_first),
                                          block, sequence.q_length, p.value_size, p.vectors, thread_index, simd);
  const int64_t numbers = first_number(p, sequence, batch, head);
  float subtracted[kDown];
  fill(subtracted, 0.0f);
  add_products(subtracted, queries, gradients);
  if (sizeof(T) == 2) {
    load_by_tile<2 * kKeys, kPitch, kSimds>(queries, tile, rows_of(rests, p.rests, batch, head, sequence.q_first),
                                            block, sequence.q_length, p.value_size, p.vectors, thread_index, simd);
    add_products(subtracted, queries, gradients);
  }
  Sum softmax[kDown];
#pragma unroll
  for (uint m = 0; m < kDown; ++m) {
    float sum = subtracted[m];
    sum += metal::simd_shuffle_xor(sum, 1);
    sum += metal::simd_shuffle_xor(sum, 8);
    const uint row = query + m * 8 + place.row;
    const bool exists = row < sequence.q_length;
    softmax[m] = sum_of(softmax_sums, p.numbers, numbers + row, exists);
    if (exists) {
      if (p.has_lse_gradient) sum -= d_lse[numbers + row];
      if (place.column == 0) delta[numbers + row] = sum;
    }
    subtracted[m] = sum;
  }
  load_by_tile<2 * kKeys, kPitch, kSimds>(queries, tile, rows_of(q, p.q, batch, head, sequence.q_first), block,
                                          sequence.q_length, p.head_size, p.vectors, thread_index, simd);

  float ones[kDown], factors[kDown];
  fill(ones, 1.0f);
  fill(factors, p.scale);
  Fragments<float, kDown, kSize / 8> sums;
  clear(sums);
  const StridedRows<T> k_rows = rows_of(k, p.k, batch, head / p.group, sequence.k_first);
  const StridedRows<T> v_rows = rows_of(v, p.v, batch, head / p.group, sequence.k_first);
  const Range range =
      keys_of(p, visibility.shift, block, metal::min(block + kQueries, sequence.q_length) - 1, sequence.k_length);
  for (uint key = range.begin / kKeys * kKeys; key < range.end; key += kKeys) {
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    load_rows<T, kKeys, kSize, kPitch, 32 * kSimds>(keys, k_rows, key, sequence.k_length, p.head_size, p.vectors,
                                                    thread_index);
    load_rows<T, kKeys, kSize, kPitch, 32 * kSimds>(values, v_rows, key, sequence.k_length, p.value_size, p.vectors,
                                                    thread_index);
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);

    Fragments<float, kDown, kAcross> scores, products;
    product_transposed<kPitch>(scores, queries, keys);
    product_transposed<kPitch>(products, gradients, values);
    const bool edge = has_edge(p, visibility, query, 8 * kDown, key, kKeys);
#pragma unroll
    for (uint m = 0; m < kDown; ++m) {
      const uint row = query + m * 8 + place.row;
#pragma unroll
      for (uint n = 0; n < kAcross; ++n) {
        const uint column = key + n * 8 + place.column;
        thread metal::float2& two = elements(scores.at[m][n]);
        metal::float2 gradient = elements(products.at[m][n]);
        if (p.dropped != 0) gradient *= kept(p, visibility, row, column);
        const Weight x = weight<T>(p, visibility, two.x, softmax[m], edge, row, column);
        const Weight y = weight<T>(p, visibility, two.y, softmax[m], edge, row, column + 1);
        two = metal::float2(x.derivative, y.derivative) * (gradient - subtracted[m]);
      }
    }
    Fragments<T, kDown, kAcross> rounded;
    round_to(rounded, scores);
    add_product<kPitch>(sums, ones, rounded, keys);
  }

  store(sums, factors, first_row(dq, p.dq, batch, head, sequence.q_first), p.dq.row, query, sequence.q_length,
        p.head_size, place);
}

// Names have the largest head size that a kernel takes.
#define INSTANTIATE(T, size) \
  template [[host_name("attention_dq_" #size "_" #T)]] [[kernel]] decltype(attention_dq<T, size>) attention_dq<T, size>;
#define INSTANTIATE_SIZES(T) \
  INSTANTIATE(T, 64)         \
  INSTANTIATE(T, 96)         \
  INSTANTIATE(T, 128)        \
  INSTANTIATE(T, 192)        \
  INSTANTIATE(T, 256)
INSTANTIATE_SIZES(float)
INSTANTIATE_SIZES(half)
INSTANTIATE_SIZES(bfloat)
