// The gradient of attention's queries. For each query it also writes the sum over the keys of weights times their
// gradients, which is what softmax's derivative subtracts: the product of a result and its gradient.
#include "products.h"
#include "scores.h"

// Only general kernels know masks, soft caps and dropout.
template <typename T, uint kSize, bool kNarrow, bool kGeneral>
[[kernel]] [[max_total_threads_per_threadgroup(32 * ATTENTION_SIMDS)]] void attention_dq(
    device const T* q [[buffer(0)]], device const T* k [[buffer(1)]], device const T* v [[buffer(2)]],
    device const uchar* mask [[buffer(3)]], device const int* cu_seq_q [[buffer(4)]],
    device const int* cu_seq_k [[buffer(5)]], device const uint* seed [[buffer(6)]], device const T* out [[buffer(7)]],
    device const float* softmax_sums [[buffer(8)]], device const T* d_out [[buffer(9)]],
    device const float* d_lse [[buffer(10)]], device T* dq [[buffer(11)]], device float* delta [[buffer(12)]],
    device const T* rests [[buffer(13)]], constant AttentionParams& p [[buffer(14)]],
    uint group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]],
    uint simd [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  constexpr uint kDown = kNarrow ? 1 : ATTENTION_DQ_DOWN(kSize, sizeof(T));
  constexpr uint kSimds = kNarrow ? ATTENTION_NARROW_BOTH_SIMDS(kSize, sizeof(T)) : ATTENTION_SIMDS;
  constexpr uint kKeys = kNarrow ? ATTENTION_NARROW_DQ_KEYS(kSize, sizeof(T)) : ATTENTION_KEYS(kSize, sizeof(T));
  constexpr uint kPitch = kSize + 16 / sizeof(T), kAcross = kKeys / 8, kQueries = 8 * kDown * kSimds;
  // Narrow kernels have one tile for values and keys in turn.
  constexpr uint kTileRows = kNarrow ? kKeys : 2 * kKeys;
  alignas(16) threadgroup T tile[(kTileRows + (kNarrow ? 2 * kQueries : 0)) * kPitch];
  threadgroup T* const keys = tile;
  threadgroup T* const values = kNarrow ? tile : tile + kKeys * kPitch;
  threadgroup T* const own_queries = kNarrow ? tile + kTileRows * kPitch : tile;
  threadgroup T* const own_gradients = kNarrow ? own_queries + kQueries * kPitch : tile;

  // Blocks with many keys come first.
  const HeadBlock given = block_of(p, p.first + group, p.heads);
  const uint head = given.head, batch = given.batch, block = (p.blocks - 1 - given.number) * kQueries;
  const Sequence sequence = sequence_of(p, batch, cu_seq_q, cu_seq_k);
  if (block >= sequence.q_length) return;
  const Place place = place_of(lane);
  const uint query = block + simd * 8 * kDown;
  const Visibility visibility = visibility_of(p, mask, seed, sequence, batch, head, sizeof(T));

  // Results are needed before the queries are.
  OwnRows<kNarrow, T, kDown, kSize / 8> queries, gradients;
  load_by_tile<kTileRows, kPitch, kSimds>(queries, own_queries, rows_of(out, p.out, batch, head, sequence.q_first),
                                          block, sequence.q_length, p.value_size, p.vectors, thread_index, simd);
  load_by_tile<kTileRows, kPitch, kSimds>(gradients, own_gradients,
                                          rows_of(d_out, p.d_out, batch, head, sequence.q_first), block,
                                          sequence.q_length, p.value_size, p.vectors, thread_index, simd);
  const int64_t numbers = first_number(p, sequence, batch, head);
  float subtracted[kDown];
  fill(subtracted, 0.0f);
  add_products<kPitch>(subtracted, queries, gradients);
  if (sizeof(T) == 2) {
    load_by_tile<kTileRows, kPitch, kSimds>(queries, own_queries,
                                            rows_of(rests, p.rests, batch, head, sequence.q_first), block,
                                            sequence.q_length, p.value_size, p.vectors, thread_index, simd);
    add_products<kPitch>(subtracted, queries, gradients);
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
  load_by_tile<kTileRows, kPitch, kSimds>(queries, own_queries, rows_of(q, p.q, batch, head, sequence.q_first), block,
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
    Fragments<float, kDown, kAcross> scores, products;
    if (kNarrow) {
      exchange_rows<T, kKeys, kSize, kPitch, 32 * kSimds>(values, v_rows, key, sequence.k_length, p.value_size,
                                                          p.vectors, thread_index);
      product_transposed<kPitch>(products, gradients, values);
    }
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    load_rows<T, kKeys, kSize, kPitch, 32 * kSimds>(keys, k_rows, key, sequence.k_length, p.head_size, p.vectors,
                                                    thread_index);
    if (!kNarrow)
      load_rows<T, kKeys, kSize, kPitch, 32 * kSimds>(values, v_rows, key, sequence.k_length, p.value_size, p.vectors,
                                                      thread_index);
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);

    product_transposed<kPitch>(scores, queries, keys);
    if (!kNarrow) product_transposed<kPitch>(products, gradients, values);
    const bool edge = has_edge<kGeneral>(p, visibility, query, 8 * kDown, key, kKeys);
#pragma unroll
    for (uint m = 0; m < kDown; ++m) {
      const uint row = query + m * 8 + place.row;
#pragma unroll
      for (uint n = 0; n < kAcross; ++n) {
        const uint column = key + n * 8 + place.column;
        thread metal::float2& two = elements(scores.at[m][n]);
        metal::float2 gradient = elements(products.at[m][n]);
        if (kGeneral && p.dropped != 0) gradient *= kept(p, visibility, row, column);
        const Weight x = weight<T, kGeneral>(p, visibility, two.x, softmax[m], edge, row, column);
        const Weight y = weight<T, kGeneral>(p, visibility, two.y, softmax[m], edge, row, column + 1);
        two = metal::float2(x.derivative, y.derivative) * (gradient - subtracted[m]);
      }
    }
    Fragments<metal::conditional_t<kNarrow, float, T>, kDown, kAcross> rounded;
    round_to(rounded, scores);
    add_product<kPitch, kNarrow>(sums, ones, rounded, keys);
  }

  store(sums, factors, first_row(dq, p.dq, batch, head, sequence.q_first), p.dq.row, query, sequence.q_length,
        p.head_size, place);
}

// Names have the largest head size that a kernel takes.
#define INSTANTIATE(name, T, size, ...) \
  template [[host_name(                 \
      "attention_dq_" name #size        \
      "_" #T)]] [[kernel]] decltype(attention_dq<T, size, __VA_ARGS__>) attention_dq<T, size, __VA_ARGS__>;
#define INSTANTIATE_SIZES(T, name, ...)  \
  INSTANTIATE(name, T, 64, __VA_ARGS__)  \
  INSTANTIATE(name, T, 96, __VA_ARGS__)  \
  INSTANTIATE(name, T, 128, __VA_ARGS__) \
  INSTANTIATE(name, T, 192, __VA_ARGS__) \
  INSTANTIATE(name, T, 256, __VA_ARGS__)
#define INSTANTIATE_KINDS(T)                   \
  INSTANTIATE_SIZES(T, "", false, true)        \
  INSTANTIATE_SIZES(T, "narrow_", true, false) \
  INSTANTIATE_SIZES(T, "narrow_general_", true, true)
INSTANTIATE_KINDS(float)
INSTANTIATE_KINDS(half)
INSTANTIATE_KINDS(bfloat)
