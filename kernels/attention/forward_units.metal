// The results of forward.metal on GPUs whose units multiply tensors, for calls without dropout. Scores stay
// products here: powers of 2 take the scale, which is above 0, with what they subtract. Only general kernels, which
// scale products first, know masks and soft caps.
#include <metal_tensor>

#include "scores.h"
#include "unit_masks.h"
#include "unit_products.h"

// A rounded base beyond this may differ from the largest exponent by more than 2^-12. Then differences of scores are
// scaled, which takes one instruction more for each.
constexpr constant float kFarBase = 0x1p12f;

// Makes weights of a tile's scores, and adds them to each query's total. The largest score may have grown, so that the
// total and the results so far shrink. Tiles without edges have code of their own, which changes scores in place.
template <typename T, bool kGeneral, bool kMasks, typename Products, typename Numbers>
METAL_FUNC void weigh(constant AttentionParams& p, Visibility visibility, thread Products& products, float scale,
                      uint block, uint key, bool edge, thread Numbers& largest, thread Numbers& total,
                      thread Numbers& shrink) {
  if (kGeneral && p.softcap > 0.0f) {
#pragma unroll
    for (ushort i = 0; i < products.scores.get_capacity(); ++i)
      products.scores[i] = scaled<true>(p, products.scores[i]);
  } else if (kGeneral) {
#pragma unroll
    for (ushort i = 0; i < products.scores.get_capacity(); ++i)
      products.scores[i] = scaled<false>(p, products.scores[i]);
  }
  if (kMasks) mask_tile<T, kGeneral, false>(p, visibility, products, edge, block, key);
  Numbers base;
  bool is_far = false;
  products.largest(base);
#pragma unroll
  for (ushort j = 0; j < base.get_capacity(); ++j) {
    const float most = metal::max(largest[j], base[j]);
    base[j] = base_of(most * scale);
    shrink[j] = metal::fast::exp2((largest[j] - base_of(most)) * scale);
    largest[j] = most;
    is_far |= metal::abs(base[j]) > kFarBase;
  }
  if (metal::simd_any(is_far)) {
#pragma unroll
    for (ushort i = 0; i < products.scores.get_capacity(); ++i) products.scores[i] -= base_of(products.of(largest, i));
#pragma unroll
    for (ushort j = 0; j < base.get_capacity(); ++j) base[j] = 0.0f;
  }
#pragma unroll
  for (ushort i = 0; i < products.scores.get_capacity(); ++i)
    products.scores[i] = metal::fast::exp2(metal::fma(products.scores[i], scale, -products.of(base, i)));
  products.add_weights(total, shrink);
}

template <typename T, uint kSize, bool kGeneral>
[[kernel]] [[max_total_threads_per_threadgroup(ATTENTION_UNIT_FORWARD_THREADS(kSize))]] void attention_forward_unit(
    device T* q [[buffer(0)]], device T* k [[buffer(1)]], device T* v [[buffer(2)]],
    device const uchar* mask [[buffer(3)]], device const float* sinks [[buffer(4)]],
    device const int* cu_seq_q [[buffer(5)]], device const int* cu_seq_k [[buffer(6)]], device T* out [[buffer(8)]],
    device float* lse [[buffer(9)]], device float* softmax_sums [[buffer(10)]], device T* rests [[buffer(11)]],
    constant AttentionParams& p [[buffer(12)]], uint group [[threadgroup_position_in_grid]],
    uint simd [[simdgroup_index_in_threadgroup]]) {
  constexpr uint kSimds = ATTENTION_UNIT_FORWARD_THREADS(kSize) / 32, kQueries = ATTENTION_UNIT_FORWARD_ROWS(kSize);
  threadgroup float shared[kQueries];

  // Blocks with many keys come first.
  const HeadBlock given = block_of(p, p.first + group, p.heads);
  const uint head = given.head, batch = given.batch, block = (p.blocks - 1 - given.number) * kQueries;
  const Sequence sequence = sequence_of(p, batch, cu_seq_q, cu_seq_k);
  if (block >= sequence.q_length) return;
  const uint rows = metal::min(kQueries, sequence.q_length - block);
  const Visibility visibility = visibility_of(p, mask, nullptr, sequence, batch, head, sizeof(T));
  const float scale = kGeneral ? 1.0f : p.product_scale;
  const auto queries = head_rows(first_row(q, p.q, batch, head, sequence.q_first + block), p.head_size, rows, p.q.row);
  const auto keys =
      head_rows(first_row(k, p.k, batch, head / p.group, sequence.k_first), p.head_size, sequence.k_length, p.k.row);
  const auto values =
      head_rows(first_row(v, p.v, batch, head / p.group, sequence.k_first), p.value_size, sequence.k_length, p.v.row);
  auto products = metalcore_unit_products<T, kSize, kSimds>(queries, keys, values, shared, simd, 0);
  constexpr uint kKeys = decltype(products)::kKeys;
  using Numbers = typename decltype(products)::Numbers;
  Numbers largest, total;
#pragma unroll
  for (ushort j = 0; j < largest.get_capacity(); ++j) largest[j] = -INFINITY, total[j] = 0.0f;

  const Range range = keys_of(p, visibility.shift, block, block + rows - 1, sequence.k_length);
  const uint begin = range.begin / kKeys * kKeys;
  products.start(begin, range.end);
  uint key = begin;
  do {  // at least one tile, of which queries that see no key see none
    products.multiply(key);
    const bool edge = has_edge<false>(p, visibility, block + simd * 16, 16, key, kKeys);
    Numbers shrink;
    if (kGeneral || edge)
      weigh<T, kGeneral, true>(p, visibility, products, scale, block, key, edge, largest, total, shrink);
    else
      weigh<T, kGeneral, false>(p, visibility, products, scale, block, key, edge, largest, total, shrink);
    products.add(key, shrink);
    key += kKeys;
  } while (key < range.end);
  products.finish();
  products.finish_totals(total);

  Numbers base, rest, factors;
#pragma unroll
  for (ushort j = 0; j < base.get_capacity(); ++j) {
    const float top = largest[j] * scale;
    base[j] = base_of(top);
    factors[j] = 1.0f;
    if (p.has_sinks) {
      const float sink = sinks[head] * kLog2E;
      base[j] = base_of(metal::max(top, sink));
      factors[j] = metal::precise::exp2(top - base[j]);
      total[j] = metal::fma(total[j], factors[j], metal::precise::exp2(sink - base[j]));
    }
    rest[j] = total[j] == 0.0f ? INFINITY : metal::precise::log2(total[j]);
    factors[j] = total[j] == 0.0f ? 0.0f : factors[j] / total[j];
  }
#pragma unroll
  for (ushort i = 0; i < products.scores.get_capacity(); ++i) {
    const metal::uint2 place = products.place(i);
    if (place.x != 0 || place.y >= rows) continue;
    const int64_t number = first_number(p, sequence, batch, head) + block + place.y;
    const float of_base = products.of(base, i), of_rest = products.of(rest, i);
    lse[number] = of_rest == INFINITY ? -INFINITY : natural(of_base, of_rest);
    if (p.has_rests) {
      softmax_sums[number] = of_base;
      softmax_sums[p.numbers + number] = of_rest;
    }
  }
  products.scale(factors);
  products.template store<false>(
      head_rows(first_row(out, p.out, batch, head, sequence.q_first + block), p.value_size, rows, p.out.row));
  if (p.has_rests)
    products.template store<true>(
        head_rows(first_row(rests, p.rests, batch, head, sequence.q_first + block), p.value_size, rows, p.rests.row));
}

// Names have the largest head size that a kernel takes.
#define INSTANTIATE(name, T, size, general)                                      \
  template [[host_name("attention_forward_unit_" name #size "_" #T)]] [[kernel]] \
  decltype(attention_forward_unit<T, size, general>) attention_forward_unit<T, size, general>;
#define INSTANTIATE_SIZES(name, T, general) \
  INSTANTIATE(name, T, 64, general)         \
  INSTANTIATE(name, T, 128, general)        \
  INSTANTIATE(name, T, 256, general)
#define INSTANTIATE_KINDS(T)      \
  INSTANTIATE_SIZES("", T, false) \
  INSTANTIATE_SIZES("general_", T, true)
INSTANTIATE_KINDS(half)
INSTANTIATE_KINDS(bfloat)
