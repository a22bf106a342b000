// Attention's results, the logarithms of its sums, and what rounding takes from both (FlashAttention-2: Dao, 2023). A
// simdgroup has 8 * kDown queries, and walks over the keys with a running maximum and sum. What it holds of queries,
// sums and weights stays in registers, except for the queries of narrow kernels.
#include "fragments.h"
#include "scores.h"

// Only general kernels know masks, soft caps and dropout.
template <typename T, uint kSize, bool kNarrow, bool kGeneral>
[[kernel]] [[max_total_threads_per_threadgroup(32 * ATTENTION_SIMDS)]] void attention_forward(
    device const T* q [[buffer(0)]], device const T* k [[buffer(1)]], device const T* v [[buffer(2)]],
    device const uchar* mask [[buffer(3)]], device const float* sinks [[buffer(4)]],
    device const int* cu_seq_q [[buffer(5)]], device const int* cu_seq_k [[buffer(6)]],
    device const uint* seed [[buffer(7)]], device T* out [[buffer(8)]], device float* lse [[buffer(9)]],
    device float* softmax_sums [[buffer(10)]], device T* rests [[buffer(11)]],
    constant AttentionParams& p [[buffer(12)]], uint group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint simd [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  constexpr uint kDown = kNarrow ? 1 : ATTENTION_DOWN(kSize);
  constexpr uint kSimds = kNarrow ? ATTENTION_NARROW_SIMDS(kSize, sizeof(T)) : ATTENTION_SIMDS;
  constexpr uint kKeys = kNarrow ? ATTENTION_NARROW_KEYS(kSize, sizeof(T)) : ATTENTION_KEYS(kSize, sizeof(T));
  constexpr uint kPitch = kSize + 16 / sizeof(T), kAcross = kKeys / 8, kQueries = 8 * kDown * kSimds;
  constexpr bool kEarly = !kNarrow && sizeof(T) == 2;  // there are registers to load the next tiles into meanwhile
  // Narrow kernels have one tile for keys and values in turn.
  constexpr uint kTileRows = kNarrow ? kKeys : 2 * kKeys;
  alignas(16) threadgroup T tile[(kTileRows + (kNarrow ? kQueries : 0)) * kPitch];
  threadgroup T* const keys = tile;
  threadgroup T* const values = kNarrow ? tile : tile + kKeys * kPitch;
  threadgroup T* const own = kNarrow ? tile + kTileRows * kPitch : tile;

  // Blocks with many keys come first.
  const HeadBlock given = block_of(p, p.first + group, p.heads);
  const uint head = given.head, batch = given.batch, block = (p.blocks - 1 - given.number) * kQueries;
  const Sequence sequence = sequence_of(p, batch, cu_seq_q, cu_seq_k);
  if (block >= sequence.q_length) return;
  const Place place = place_of(lane);
  const uint query = block + simd * 8 * kDown;
  const Visibility visibility = visibility_of(p, mask, seed, sequence, batch, head, sizeof(T));

  OwnRows<kNarrow, T, kDown, kSize / 8> queries;
  load_by_tile<kTileRows, kPitch, kSimds>(queries, own, rows_of(q, p.q, batch, head, sequence.q_first), block,
                                          sequence.q_length, p.head_size, p.vectors, thread_index, simd);
  Fragments<float, kDown, kSize / 8> sums;
  clear(sums);
  float largest[kDown], total[kDown];
#pragma unroll
  for (uint m = 0; m < kDown; ++m) largest[m] = -INFINITY, total[m] = 0.0f;

  const StridedRows<T> k_rows = rows_of(k, p.k, batch, head / p.group, sequence.k_first);
  const StridedRows<T> v_rows = rows_of(v, p.v, batch, head / p.group, sequence.k_first);
  const Range range =
      keys_of(p, visibility.shift, block, metal::min(block + kQueries, sequence.q_length) - 1, sequence.k_length);
  using Ahead = RowsAhead<T, kKeys, kSize, kPitch, 32 * kSimds, StridedRows<T>>;
  Ahead keys_ahead(k_rows, sequence.k_length, p.head_size, p.vectors, thread_index);
  Ahead values_ahead(v_rows, sequence.k_length, p.value_size, p.vectors, thread_index);
  const uint begin = range.begin / kKeys * kKeys;
  if (kEarly && begin < range.end) {
    keys_ahead.load(begin);
    values_ahead.load(begin);
  }
  for (uint key = begin; key < range.end; key += kKeys) {
    if (kNarrow) {
      exchange_rows<T, kKeys, kSize, kPitch, 32 * kSimds>(keys, k_rows, key, sequence.k_length, p.head_size, p.vectors,
                                                          thread_index);
    } else {
      if (!kEarly) {
        keys_ahead.load(key);
        values_ahead.load(key);
      }
      metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
      keys_ahead.store(keys, key);
      values_ahead.store(values, key);
      metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    }
    if (kEarly && key + kKeys < range.end) {
      keys_ahead.load(key + kKeys);
      values_ahead.load(key + kKeys);
    }

    Fragments<float, kDown, kAcross> scores;
    product_transposed<kPitch>(scores, queries, keys);
    if (kNarrow) {  // values come while softmax is computed
      metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
      load_rows<T, kKeys, kSize, kPitch, 32 * kSimds>(values, v_rows, key, sequence.k_length, p.value_size, p.vectors,
                                                      thread_index);
    }
    float shrink[kDown];
    const bool edge = has_edge<kGeneral>(p, visibility, query, 8 * kDown, key, kKeys);
#pragma unroll
    for (uint m = 0; m < kDown; ++m) {
      const uint row = query + m * 8 + place.row;
      float most = largest[m];
#pragma unroll
      for (uint n = 0; n < kAcross; ++n) {
        thread metal::float2& two = elements(scores.at[m][n]);
        two = metal::float2(scaled<kGeneral>(p, two.x), scaled<kGeneral>(p, two.y));
        if (edge) {
          const uint column = key + n * 8 + place.column;
          two = metal::float2(masked<T, kGeneral>(p, visibility, two.x, row, column),
                              masked<T, kGeneral>(p, visibility, two.y, row, column + 1));
        }
        most = metal::max(most, metal::max(two.x, two.y));
      }
      most = metal::max(most, metal::simd_shuffle_xor(most, 1));
      most = metal::max(most, metal::simd_shuffle_xor(most, 8));
      const float base = base_of(most);
      shrink[m] = metal::fast::exp2(largest[m] - base);
      largest[m] = most;
      float sum = 0.0f;
#pragma unroll
      for (uint n = 0; n < kAcross; ++n) {
        thread metal::float2& two = elements(scores.at[m][n]);
        two = metal::fast::exp2(two - base);
        sum += two.x + two.y;
        if (kGeneral && p.dropped != 0) {
          const uint column = key + n * 8 + place.column;
          two *= kept(p, visibility, row, column);
        }
      }
      total[m] = metal::fma(total[m], shrink[m], sum);
    }
    Fragments<metal::conditional_t<kNarrow, float, T>, kDown, kAcross> weights;
    round_to(weights, scores);
    if (kNarrow) metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    add_product<kPitch, kNarrow>(sums, shrink, weights, values);
  }

  float factors[kDown];
#pragma unroll
  for (uint m = 0; m < kDown; ++m) {
    total[m] += metal::simd_shuffle_xor(total[m], 1);
    total[m] += metal::simd_shuffle_xor(total[m], 8);
    factors[m] = 1.0f;
    if (p.has_sinks) {
      const float sink = sinks[head] * kLog2E, most = metal::max(largest[m], sink);
      factors[m] = metal::precise::exp2(largest[m] - base_of(most));
      total[m] = metal::fma(total[m], factors[m], metal::precise::exp2(sink - base_of(most)));
      largest[m] = most;
    }
    const float base = base_of(largest[m]);
    const float rest = total[m] == 0.0f ? INFINITY : metal::precise::log2(total[m]);
    const uint row = query + m * 8 + place.row;
    if (place.column == 0 && row < sequence.q_length) {
      const int64_t number = first_number(p, sequence, batch, head) + row;
      lse[number] = total[m] == 0.0f ? -INFINITY : natural(base, rest);
      if (p.has_rests) {
        softmax_sums[number] = base;
        softmax_sums[p.numbers + number] = rest;
      }
    }
    factors[m] = total[m] == 0.0f ? 0.0f : factors[m] / total[m];
  }
  device T* const to = first_row(out, p.out, batch, head, sequence.q_first);
  if (p.has_rests && sizeof(T) == 2)
    store<true>(sums, factors, to, p.out.row, first_row(rests, p.rests, batch, head, sequence.q_first), p.rests.row,
                query, sequence.q_length, p.value_size, place);
  else
    store(sums, factors, to, p.out.row, query, sequence.q_length, p.value_size, place);
}

// Names have the largest head size that a kernel takes.
#define INSTANTIATE(name, T, size, ...) \
  template [[host_name(                 \
      "attention_forward_" name #size   \
      "_" #T)]] [[kernel]] decltype(attention_forward<T, size, __VA_ARGS__>) attention_forward<T, size, __VA_ARGS__>;
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
