// Masks of tiles of scores by units that multiply tensors. `products` has the scores, and place(i), which is the key
// and the query of score i in the tile, or where kTurned is set, the query and the key.
#pragma once

#include "scores.h"

// Applies the mask of a tile whose queries see all its keys as far as the band tells, from its first number on. Two
// numbers of a query are read at once where the layout of scores has them together.
template <bool kTurned, typename M, typename Products, typename Apply>
METAL_FUNC void mask_by(thread Products& products, device const M* mask, int64_t row, int64_t column, Apply apply) {
#pragma unroll
  for (ushort i = 0; i < products.scores.get_capacity(); i += 2) {
    const metal::uint2 first = products.place(i), second = products.place(i + 1);
    metal::vec<M, 2> two;
    if (kTurned)
      two = metal::vec<M, 2>(mask[int64_t(first.x) * row + int64_t(first.y) * column],
                             mask[int64_t(second.x) * row + int64_t(second.y) * column]);
    else if (first.x % 2 == 0 && second.x == first.x + 1 && second.y == first.y)
      two = *reinterpret_cast<device const metal::vec<M, 2>*>(mask + int64_t(first.y) * row + first.x);
    else
      two = metal::vec<M, 2>(mask[int64_t(first.y) * row + first.x], mask[int64_t(second.y) * row + second.x]);
    products.scores[i] = apply(products.scores[i], two.x);
    products.scores[i + 1] = apply(products.scores[i + 1], two.y);
  }
}

// Applies the mask of a tile, which begins at a query and a key, and makes scores of keys that a query does not see
// -inf: `edge` tells whether there are such keys by the band.
template <typename T, bool kGeneral, bool kTurned, typename Products>
METAL_FUNC void mask_tile(constant AttentionParams& p, Visibility v, thread Products& products, bool edge, uint query,
                          uint key) {
  if (kGeneral && !edge && (kTurned ? p.mask_kind != ATTENTION_NO_MASK : p.mask_pairs != 0)) {
    const int64_t first = int64_t(query) * p.mask.row + int64_t(key) * p.mask.column;
    const int64_t row = p.mask.row, column = p.mask.column;
    const auto add = [](float score, float number) { return plus_mask(score, number); };
    const auto choose = [](float score, uchar sees) { return sees ? score : -INFINITY; };
    if (p.mask_kind == ATTENTION_BOOL_MASK)
      mask_by<kTurned>(products, v.mask + first, row, column, choose);
    else if (p.mask_kind == ATTENTION_ADDED_MASK)
      mask_by<kTurned>(products, reinterpret_cast<device const T*>(v.mask) + first, row, column, add);
    else
      mask_by<kTurned>(products, reinterpret_cast<device const float*>(v.mask) + first, row, column, add);
  } else if (edge || (kGeneral && p.mask_kind != ATTENTION_NO_MASK)) {
#pragma unroll
    for (ushort i = 0; i < products.scores.get_capacity(); ++i) {
      const metal::uint2 place = products.place(i);
      const uint2 at = kTurned ? place : place.yx;
      products.scores[i] = masked<T, kGeneral>(p, v, products.scores[i], query + at.x, key + at.y);
    }
  }
}

// The same for gradients. Returns what is left to multiply scores by: a mask is added to scores, so these are scaled
// before.
template <typename T, bool kGeneral, bool kTurned, typename Products>
METAL_FUNC float scale_and_mask(constant AttentionParams& p, Visibility v, thread Products& products, bool edge,
                                uint query, uint key) {
  if (kGeneral) {
#pragma unroll
    for (ushort i = 0; i < products.scores.get_capacity(); ++i)
      products.scores[i] = scaled<false>(p, products.scores[i]);
  }
  mask_tile<T, kGeneral, kTurned>(p, v, products, edge, query, key);
  return kGeneral ? 1.0f : p.product_scale;
}
