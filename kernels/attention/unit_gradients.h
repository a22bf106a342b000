// The products of attention's gradients by units that multiply tensors. A simdgroup has 16 rows of its own: queries
// with the gradients of their results, or keys with their values. It walks over tiles of the others' rows.
//
// metalcore_unit_gradients() is called with a 0 as its last parameter, as metalcore_unit_products() is: the headers for
// Hopper GPUs have a function that is the same except for an `int`, whose result has the same members.
#pragma once

#include "unit_products.h"

// What scores and what their derivatives are products of: queries and gradients of results, or keys and values.
template <typename Rows>
struct RowPair {
  Rows of_scores, of_derivatives;
};

// A local variable's own type would have its address space.
template <typename Rows>
METAL_FUNC RowPair<Rows> pair_of_rows(Rows of_scores, Rows of_derivatives) {
  return RowPair<Rows>{of_scores, of_derivatives};
}

template <typename T, uint kSize, bool kBoth, typename Rows>
struct UnitGradients {
  static constexpr constant uint kColumns = 32;  // rows of the others in a tile
  using Descriptor = mpp::tensor_ops::matmul2d_descriptor;
  using OfRows =
      mpp::tensor_ops::matmul2d<Descriptor(16, kColumns, mpp::tensor_ops::dynamic_length_v<int>, false, true),
                                metal::execution_simdgroup>;
  using OfColumns = mpp::tensor_ops::matmul2d<Descriptor(16, kSize, kColumns, false, false, false,
                                                         Descriptor::mode::multiply_accumulate),
                                              metal::execution_simdgroup>;
  using Scores = decltype(OfRows().template get_destination_cooperative_tensor<Rows, Rows, float>());
  using Factors = decltype(OfColumns().template get_left_input_cooperative_tensor<T, T, float>());
  using Sums = decltype(OfColumns().template get_destination_cooperative_tensor<Factors, Rows, float>());

  RowPair<Rows> own, others;
  uint first;  // row of the simdgroup
  Scores scores, derivatives;
  Sums sums, value_sums;  // of derivatives and the others' rows, and if kBoth, of weights and the gradients of results

  METAL_FUNC UnitGradients(RowPair<Rows> own, uint simd) : own(own), others(own), first(16 * simd) {
    for (ushort i = 0; i < sums.get_capacity(); ++i) sums[i] = 0.0f;
    if (kBoth)
      for (ushort i = 0; i < value_sums.get_capacity(); ++i) value_sums[i] = 0.0f;
  }

  // The other's row and the own row of score i, in the tile and in the threadgroup.
  METAL_FUNC uint2 place(ushort i) const {
    const auto at = scores.get_multidimensional_index(i);
    return uint2(uint(at[0]), first + uint(at[1]));
  }

  // What comes before the first call of multiply(): the tiles are those of these rows from `begin` on, up to `end`.
  METAL_FUNC void start(RowPair<Rows> rows, uint, uint) { others = rows; }
  // Makes the scores of the tile that begins at a row. Their derivatives are there after wait().
  METAL_FUNC void multiply(uint row) {
    multiply(own.of_scores, others.of_scores, row, scores);
    multiply(own.of_derivatives, others.of_derivatives, row, derivatives);
  }
  METAL_FUNC void wait() {}
  // Adds the products of the derivatives and the tile's rows, and if kBoth, of the scores, which are weights now.
  METAL_FUNC void add(uint row) {
    add(derivatives, others.of_scores, row, sums);
    if (kBoth) add(scores, others.of_derivatives, row, value_sums);
  }
  METAL_FUNC void finish() {}

  // Writes a factor times the gradients of the threadgroup's queries or keys, or the gradients of its values.
  METAL_FUNC void store(Rows to, float factor) { store(sums, to, factor); }
  METAL_FUNC void store_values(Rows to) { store(value_sums, to, 1.0f); }

 private:
  // The simdgroup's rows, of which there are none behind the last one.
  METAL_FUNC auto own_rows(Rows all) const { return all.slice(0, metal::min(int(first), all.get_extent(1))); }
  METAL_FUNC void multiply(Rows left, Rows right, uint row, thread Scores& products) {
    auto rows = own_rows(left);
    auto tile = right.slice(0, int(row));
    OfRows().run(rows, tile, products);
  }
  METAL_FUNC void add(thread Scores& left, Rows right, uint row, thread Sums& to) {
    auto rounded = OfRows().template get_destination_cooperative_tensor<Rows, Rows, T>();
    for (ushort i = 0; i < left.get_capacity(); ++i) rounded[i] = T(left[i]);
    auto factors = OfColumns().template get_left_input_cooperative_tensor<T, T, float>(rounded);
    auto tile = right.slice(0, int(row));
    OfColumns().run(factors, tile, to);
  }
  METAL_FUNC void store(thread Sums& from, Rows to, float factor) {
    auto rounded = OfColumns().template get_destination_cooperative_tensor<Factors, Rows, T>();
    for (ushort i = 0; i < from.get_capacity(); ++i) rounded[i] = T(factor * from[i]);
    rounded.store(own_rows(to));
  }
};

template <typename T, uint kSize, bool kBoth, uint kSimds, typename Rows>
METAL_FUNC UnitGradients<T, kSize, kBoth, Rows> metalcore_unit_gradients(RowPair<Rows> own, uint simd, long) {
  return UnitGradients<T, kSize, kBoth, Rows>(own, simd);
}
