// The gradients of attention's keys and values. A simdgroup holds 8 * kDown keys and values, and walks over the queries
// of all heads that share them, so that nothing is added up in memory. Narrow kernels of long heads write the gradients
// of keys or those of values, since a thread's registers do not hold the sums of both.
#include "fragments.h"
#include "scores.h"

// What a kernel writes the gradients of.
constexpr constant uint kKeysAndValues = 0, kKeysAlone = 1, kValuesAlone = 2;

// Only general kernels know masks, soft caps and dropout.
template <typename T, uint kSize, bool kNarrow, bool kGeneral, uint kOf>
[[kernel]] [[max_total_threads_per_threadgroup(32 * ATTENTION_SIMDS)]] void attention_dkv(
    device const T* q [[buffer(0)]], device const T* k [[buffer(1)]], device const T* v [[buffer(2)]],
    device const uchar* mask [[buffer(3)]], device const int* cu_seq_q [[buffer(4)]],
    device const int* cu_seq_k [[buffer(5)]], device const uint* seed [[buffer(6)]],
    device const float* softmax_sums [[buffer(7)]], device const float* delta [[buffer(8)]],
    device const T* d_out [[buffer(9)]], device T* dk [[buffer(10)]], device T* dv [[buffer(11)]],
    constant AttentionParams& p [[buffer(12)]], uint group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint simd [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  constexpr bool kBoth = kOf == kKeysAndValues, kWithKeys = kOf != kValuesAlone, kWithValues = kOf != kKeysAlone;
  constexpr uint kDown = kNarrow ? 1 : ATTENTION_DKV_DOWN(kSize, sizeof(T));
  constexpr uint kSimds = kNarrow ? ATTENTION_NARROW_BOTH_SIMDS(kSize, sizeof(T)) : ATTENTION_SIMDS;
  constexpr uint kQueries = !kNarrow ? ATTENTION_DKV_QUERIES(kSize, sizeof(T))
                            : kBoth  ? ATTENTION_NARROW_DKV_QUERIES(kSize, sizeof(T))
                                     : ATTENTION_NARROW_SPLIT_QUERIES(kSize, sizeof(T));
  constexpr uint kPitch = kSize + 16 / sizeof(T), kAcross = kQueries / 8, kKeys = 8 * kDown * kSimds;
  // What writes one gradient uses queries and gradients in turn.
  constexpr uint kTileRows = kBoth ? 2 * kQueries : kQueries;
  alignas(16) threadgroup T tile[(kTileRows + (kNarrow ? kWithKeys ? 2 * kKeys : kKeys : 0)) * kPitch];
  threadgroup T* const queries = tile;
  threadgroup T* const gradients = kBoth ? tile + kQueries * kPitch : tile;
  threadgroup T* const own_keys = kNarrow ? tile + kTileRows * kPitch : tile;
  threadgroup T* const own_values = kNarrow && kWithKeys ? own_keys + kKeys * kPitch : own_keys;
  threadgroup float largest[kQueries], rest[kQueries], subtracted[kQueries];

  const HeadBlock given = block_of(p, p.first + group, p.heads / p.group);
  const uint k_head = given.head, batch = given.batch,
             block = given.number * kKeys;  // blocks with many queries come first
  const Sequence sequence = sequence_of(p, batch, cu_seq_q, cu_seq_k);
  if (block >= sequence.k_length) return;
  const Place place = place_of(lane);
  const uint key = block + simd * 8 * kDown;

  OwnRows<kNarrow, T, kDown, kSize / 8> keys, values;
  load_by_tile<kTileRows, kPitch, kSimds>(keys, own_keys, rows_of(k, p.k, batch, k_head, sequence.k_first), block,
                                          sequence.k_length, p.head_size, p.vectors, thread_index, simd);
  if (kWithKeys)
    load_by_tile<kTileRows, kPitch, kSimds>(values, own_values, rows_of(v, p.v, batch, k_head, sequence.k_first), block,
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
      if (kWithValues)
        load_rows<T, kQueries, kSize, kPitch, 32 * kSimds>(queries, q_rows, query, sequence.q_length, p.head_size,
                                                           p.vectors, thread_index);
      if (kWithKeys)
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
      if (kOf == kKeysAlone) {
        product_transposed<kPitch>(products, values, gradients);
        exchange_rows<T, kQueries, kSize, kPitch, 32 * kSimds>(queries, q_rows, query, sequence.q_length, p.head_size,
                                                               p.vectors, thread_index);
      }
      product_transposed<kPitch>(scores, keys, queries);
      if (kBoth) product_transposed<kPitch>(products, values, gradients);
      const bool edge = has_edge<kGeneral>(p, visibility, query, kQueries, key, 8 * kDown);
#pragma unroll
      for (uint m = 0; m < kDown; ++m) {
        const uint row = key + m * 8 + place.row;
#pragma unroll
        for (uint n = 0; n < kAcross; ++n) {
          const uint at = n * 8 + place.column, column = query + at;
          thread metal::float2& two = elements(scores.at[m][n]);
          thread metal::float2& gradient = elements(products.at[m][n]);
          const Weight x = weight<T, kGeneral>(p, visibility, two.x, {largest[at], rest[at]}, edge, column, row);
          const Weight y =
              weight<T, kGeneral>(p, visibility, two.y, {largest[at + 1], rest[at + 1]}, edge, column + 1, row);
          two = metal::float2(x.value, y.value);
          if (kGeneral && p.dropped != 0) {
            const metal::float2 upper = kept(p, visibility, column, row & ~1u),
                                lower = kept(p, visibility, column + 1, row & ~1u);
            const metal::float2 factors = row & 1 ? metal::float2(upper.y, lower.y) : metal::float2(upper.x, lower.x);
            two *= factors;
            if (kWithKeys) gradient *= factors;
          }
          if (kWithKeys)
            gradient = metal::float2(x.derivative, y.derivative) *
                       (gradient - metal::float2(subtracted[at], subtracted[at + 1]));
        }
      }
      Fragments<metal::conditional_t<kNarrow, float, T>, kDown, kAcross> rounded;
      if (kWithValues) {
        round_to(rounded, scores);
        if (kOf == kValuesAlone)
          exchange_rows<T, kQueries, kSize, kPitch, 32 * kSimds>(gradients, gradient_rows, query, sequence.q_length,
                                                                 p.value_size, p.vectors, thread_index);
        add_product<kPitch, kNarrow>(v_sums, ones, rounded, gradients);
      }
      if (kWithKeys) {
        round_to(rounded, products);
        add_product<kPitch, kNarrow>(k_sums, ones, rounded, queries);
      }
    }
  }

  if (kWithValues)
    store(v_sums, ones, first_row(dv, p.dv, batch, k_head, sequence.k_first), p.dv.row, key, sequence.k_length,
          p.value_size, place);
  if (kWithKeys)
    store(k_sums, factors, first_row(dk, p.dk, batch, k_head, sequence.k_first), p.dk.row, key, sequence.k_length,
          p.head_size, place);
}

// Names have the largest head size that a kernel takes.
#define INSTANTIATE(name, T, size, ...) \
  template [[host_name(                 \
      "attention_" name #size           \
      "_" #T)]] [[kernel]] decltype(attention_dkv<T, size, __VA_ARGS__>) attention_dkv<T, size, __VA_ARGS__>;
#define INSTANTIATE_SPLIT(kind, T, size, general)             \
  INSTANTIATE("dk_" kind, T, size, true, general, kKeysAlone) \
  INSTANTIATE("dv_" kind, T, size, true, general, kValuesAlone)
#define INSTANTIATE_NARROW(kind, T, general)                     \
  INSTANTIATE("dkv_" kind, T, 64, true, general, kKeysAndValues) \
  INSTANTIATE("dkv_" kind, T, 96, true, general, kKeysAndValues) \
  INSTANTIATE_SPLIT(kind, T, 128, general)                       \
  INSTANTIATE_SPLIT(kind, T, 192, general)                       \
  INSTANTIATE_SPLIT(kind, T, 256, general)
#define INSTANTIATE_KINDS(T)                               \
  INSTANTIATE("dkv_", T, 64, false, true, kKeysAndValues)  \
  INSTANTIATE("dkv_", T, 96, false, true, kKeysAndValues)  \
  INSTANTIATE("dkv_", T, 128, false, true, kKeysAndValues) \
  INSTANTIATE("dkv_", T, 192, false, true, kKeysAndValues) \
  INSTANTIATE("dkv_", T, 256, false, true, kKeysAndValues) \
  INSTANTIATE_NARROW("narrow_", T, false)                  \
  INSTANTIATE_NARROW("narrow_general_", T, true)
INSTANTIATE_KINDS(float)
INSTANTIATE_KINDS(half)
INSTANTIATE_KINDS(bfloat)
