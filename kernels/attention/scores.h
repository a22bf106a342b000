// Scores of a block of queries and a block of keys: scale, softcap, masks, dropout.
#pragma once

#include "logarithm.h"
#include "sequence.h"

// Random numbers for dropout: Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011). Each
// kernel makes those of a place anew.
METAL_FUNC metal::uint4 philox(metal::uint4 counter, metal::uint2 key) {
#pragma unroll 1
  for (uint round = 0; round < 10; ++round) {
    const uint high0 = metal::mulhi(0xD2511F53u, counter.x), low0 = 0xD2511F53u * counter.x;
    const uint high1 = metal::mulhi(0xCD9E8D57u, counter.z), low1 = 0xCD9E8D57u * counter.z;
    counter = metal::uint4(high1 ^ counter.y ^ key.x, low1, high0 ^ counter.w ^ key.y, low0);
    key += metal::uint2(0x9E3779B9u, 0xBB67AE85u);
  }
  return counter;
}

// The random numbers of a query's weights for an even key and the next one.
METAL_FUNC metal::uint2 random_numbers(metal::uint2 seed, uint batch, uint head, uint query, uint key) {
  const metal::uint4 four = philox(metal::uint4(key / 4, query, head, batch), seed);
  return key & 2 ? four.zw : four.xy;
}

// The buffers that say which keys a query sees, and how.
struct Visibility {
  device const uchar* mask;  // of the head
  Sequence sequence;
  int shift;
  uint batch, head;
  metal::uint2 seed;
};

METAL_FUNC int shift_of(constant AttentionParams& p, Sequence sequence) {
  return p.band.lower_right ? int(sequence.k_length) - int(sequence.q_length) : 0;
}

METAL_FUNC device const uchar* mask_of(device const uchar* mask, constant AttentionParams& p, uint batch, uint head,
                                       uint element_size) {
  const int64_t size = p.mask_kind == ATTENTION_BOOL_MASK ? 1 : p.mask_kind == ATTENTION_ADDED_MASK ? element_size : 4;
  return mask + (p.mask.first + int64_t(batch) * p.mask.batch + int64_t(head) * p.mask.head) * size;
}

// Where a head's numbers of one per query begin: lse, and what the gradients of softmax subtract.
METAL_FUNC int64_t first_number(constant AttentionParams& p, Sequence sequence, uint batch, uint head) {
  return p.variable ? int64_t(head) * p.q_length + sequence.q_first : (int64_t(batch) * p.heads + head) * p.q_length;
}

METAL_FUNC Visibility visibility_of(constant AttentionParams& p, device const uchar* mask, device const uint* seed,
                                    Sequence sequence, uint batch, uint head, uint element_size) {
  const metal::uint2 numbers = p.dropped != 0 ? metal::uint2(seed[0], seed[1]) : metal::uint2(0u);
  return {mask_of(mask, p, batch, head, element_size), sequence, shift_of(p, sequence), batch, head, numbers};
}

// The keys that queries first to last see, of a band alone.
struct Range {
  uint begin, end;
};
METAL_FUNC Range keys_of(constant AttentionParams& p, int shift, uint first, uint last, uint k_length) {
  const int begin = metal::max(int(first) + shift - p.band.left, 0);
  const int end = metal::clamp(int(last) + shift + p.band.right + 1, 0, int(k_length));
  return {uint(begin), uint(metal::max(begin, end))};
}
// The queries that see one of the keys first to last.
METAL_FUNC Range queries_of(constant AttentionParams& p, int shift, uint first, uint last, uint q_length) {
  const int begin = metal::max(int(first) - shift - p.band.right, 0);
  const int end = metal::clamp(int(last) - shift + p.band.left + 1, 0, int(q_length));
  return {uint(begin), uint(metal::max(begin, end))};
}

// Whether some query of a block does not see some key of another one, or has a mask.
template <bool kGeneral>
METAL_FUNC bool has_edge(constant AttentionParams& p, Visibility v, uint query, uint queries, uint key, uint keys) {
  const int first = int(key) - v.shift, last = int(key + keys) - 1 - v.shift;
  return (kGeneral && p.mask_kind != ATTENTION_NO_MASK) || key + keys > v.sequence.k_length ||
         query + queries > v.sequence.q_length || first < int(query + queries) - 1 - p.band.left ||
         last > int(query) + p.band.right;
}

// A score from a product of a query and a key: what softmax takes the power of 2 of, if the query sees the key.
template <bool kGeneral>
METAL_FUNC float scaled(constant AttentionParams& p, float product) {
  const float score = product * p.product_scale;
  return kGeneral && p.softcap > 0.0f ? p.softcap * metal::precise::tanh(score) : score;
}
// Scales a score of a block with edges: the mask counts, and the score is -inf if the query does not see the key.
template <typename T, bool kGeneral>
METAL_FUNC float masked(constant AttentionParams& p, Visibility v, float score, uint query, uint key) {
  const int distance = int(key) - int(query) - v.shift;
  if (query >= v.sequence.q_length || key >= v.sequence.k_length || distance < -p.band.left || distance > p.band.right)
    return -INFINITY;
  if (!kGeneral) return score;
  const int64_t at = int64_t(query) * p.mask.row + int64_t(key) * p.mask.column;
  if (p.mask_kind == ATTENTION_BOOL_MASK) return v.mask[at] ? score : -INFINITY;
  if (p.mask_kind == ATTENTION_ADDED_MASK)
    return plus_mask(score, float(reinterpret_cast<device const T*>(v.mask)[at]));
  if (p.mask_kind == ATTENTION_ADDED_FLOAT_MASK)
    return plus_mask(score, reinterpret_cast<device const float*>(v.mask)[at]);
  return score;
}

// The logarithm to base 2 of a softmax's sum is largest + rest, where `largest` is the largest score: so it has more
// bits than float32. The rest is inf for a query that sees no key, or that does not exist.
struct Sum {
  float largest, rest;
};
METAL_FUNC Sum sum_of(device const float* sums, int64_t numbers, int64_t number, bool exists) {
  return exists ? Sum{sums[number], sums[numbers + number]} : Sum{0.0f, INFINITY};
}

// A weight of softmax from products of a query and a key, and its derivative by the product except for the scale.
struct Weight {
  float value, derivative;
};
template <typename T, bool kGeneral>
METAL_FUNC Weight weight(constant AttentionParams& p, Visibility v, float product, Sum sum, bool edge, uint query,
                         uint key) {
  float score = product * p.product_scale, slope = 1.0f;
  if (kGeneral && p.softcap > 0.0f) {
    const float capped = metal::precise::tanh(score);
    score = p.softcap * capped;
    slope = 1.0f - capped * capped;
  }
  if (edge) score = masked<T, kGeneral>(p, v, score, query, key);
  // The largest score came from a product that may have been rounded in another order.
  const float value = metal::fast::exp2(metal::min(score - sum.largest, 0.0f) - sum.rest);
  return {value, value * slope};
}

// What dropout multiplies the weights of a query for an even key and the next one by.
METAL_FUNC metal::float2 kept(constant AttentionParams& p, Visibility v, uint query, uint key) {
  const metal::uint2 numbers = random_numbers(v.seed, v.batch, v.head, query, key);
  return metal::float2(numbers.x >= p.dropped ? p.kept_scale : 0.0f, numbers.y >= p.dropped ? p.kept_scale : 0.0f);
}
