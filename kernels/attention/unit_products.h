// The two products of attention by units that multiply tensors. A simdgroup has 16 queries. It multiplies them by tiles
// of kKeys keys, and adds the products of weights and values to its results.
//
// metalcore_unit_products() is called with a 0 as its last parameter: a compiler's headers may have a function that is
// the same except for an `int`, whose result has the same members (see common/matrices.h). That for Hopper GPUs has
// keys and values brought to threadgroup memory, while the simdgroups multiply and compute weights together.
#pragma once

#include <metal_stdlib>
#include <metal_tensor>
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>

// Rows of a head, which begin `stride` elements after each other.
template <typename T>
METAL_FUNC auto head_rows(device T* first, uint size, uint rows, int64_t stride) {
  using Extents = metal::dextents<int, 2>;
  return metal::tensor<device T, Extents, metal::tensor_inline>(first, Extents(int(size), int(rows)),
                                                                metal::array<int, 2>{1, int(stride)});
}

template <typename T, uint kSize, typename Rows>
struct UnitProducts {
  static constexpr constant uint kKeys = ATTENTION_UNIT_KEYS(kSize);
  using Descriptor = mpp::tensor_ops::matmul2d_descriptor;
  using OfKeys = mpp::tensor_ops::matmul2d<Descriptor(16, kKeys, mpp::tensor_ops::dynamic_length_v<int>, false, true),
                                           metal::execution_simdgroup>;
  using OfValues = mpp::tensor_ops::matmul2d<Descriptor(16, kSize, kKeys, false, false, false,
                                                        Descriptor::mode::multiply_accumulate),
                                             metal::execution_simdgroup>;
  using Scores = decltype(OfKeys().template get_destination_cooperative_tensor<Rows, Rows, float>());
  using Weights = decltype(OfValues().template get_left_input_cooperative_tensor<T, T, float>());
  using Sums = decltype(OfValues().template get_destination_cooperative_tensor<Weights, Rows, float>());
  // A number for each query of which this thread has scores.
  using Numbers = decltype(OfKeys().template get_row_reduction_destination_cooperative_tensor<Rows, Rows, float>());

  Rows queries, keys, values;
  threadgroup float* shared;  // a number for each query of the threadgroup
  uint first;                 // query of the simdgroup
  Scores scores;
  Sums sums;

  METAL_FUNC UnitProducts(Rows queries, Rows keys, Rows values, threadgroup float* shared, uint simd)
      : queries(queries), keys(keys), values(values), shared(shared), first(16 * simd) {
    for (ushort i = 0; i < sums.get_capacity(); ++i) sums[i] = 0.0f;
  }

  // The key and the query of score i, in the tile and in the threadgroup.
  METAL_FUNC uint2 place(ushort i) const {
    const auto at = scores.get_multidimensional_index(i);
    return uint2(uint(at[0]), first + uint(at[1]));
  }
  // The number of the query of score i.
  METAL_FUNC float of(thread Numbers& numbers, ushort i) { return *numbers.map_iterator(scores.get_iterator(i)); }

  // What comes before the first call of multiply(): the tiles are those from key `begin` on, up to key `end`, or one.
  METAL_FUNC void start(uint, uint) {}
  // Makes the scores of the tile that begins at a key.
  METAL_FUNC void multiply(uint key) {
    auto rows = own(queries);
    auto tile = keys.slice(0, int(key));
    OfKeys().run(rows, tile, scores);
  }
  METAL_FUNC void largest(thread Numbers& numbers) {
    reduce_rows(scores, numbers, mpp::tensor_ops::reduction_operation::max, -INFINITY);
  }
  // Multiplies each query's total by a factor, and adds its scores, which are weights now.
  METAL_FUNC void add_weights(thread Numbers& totals, thread Numbers& factors) {
    Numbers added;
    reduce_rows(scores, added, mpp::tensor_ops::reduction_operation::sum, 0.0f);
    for (ushort j = 0; j < totals.get_capacity(); ++j) totals[j] = metal::fma(totals[j], factors[j], added[j]);
  }
  // What comes behind the last call of add_weights(): threads may have had totals of their own until then.
  METAL_FUNC void finish_totals(thread Numbers&) {}
  // Multiplies the results by a factor for each query.
  METAL_FUNC void scale(thread Numbers& factors) {
    for (ushort i = 0; i < scores.get_capacity(); ++i)
      if (place(i).x == 0) shared[place(i).y] = of(factors, i);
    metal::simdgroup_barrier(metal::mem_flags::mem_threadgroup);
    for (ushort i = 0; i < sums.get_capacity(); ++i)
      sums[i] *= shared[first + uint(sums.get_multidimensional_index(i)[1])];
    metal::simdgroup_barrier(metal::mem_flags::mem_threadgroup);
  }
  // The same, and adds the products of the scores, which are weights now, and the tile's values.
  METAL_FUNC void add(uint key, thread Numbers& factors) {
    scale(factors);
    auto rounded = OfKeys().template get_destination_cooperative_tensor<Rows, Rows, T>();
    for (ushort i = 0; i < scores.get_capacity(); ++i) rounded[i] = T(scores[i]);
    auto weights = OfValues().template get_left_input_cooperative_tensor<T, T, float>(rounded);
    auto tile = values.slice(0, int(key));
    OfValues().run(weights, tile, sums);
  }
  METAL_FUNC void finish() {}

  // Writes the results, or what rounding takes from them, to the threadgroup's rows.
  template <bool kRests>
  METAL_FUNC void store(Rows to) {
    auto rounded = OfValues().template get_destination_cooperative_tensor<Weights, Rows, T>();
    for (ushort i = 0; i < sums.get_capacity(); ++i) rounded[i] = kRests ? T(sums[i] - float(T(sums[i]))) : T(sums[i]);
    rounded.store(own(to));
  }

 private:
  // The simdgroup's rows, of which there are none behind the last one.
  METAL_FUNC auto own(Rows all) const { return all.slice(0, metal::min(int(first), all.get_extent(1))); }
};

template <typename T, uint kSize, uint kSimds, typename Rows>
METAL_FUNC UnitProducts<T, kSize, Rows> metalcore_unit_products(Rows queries, Rows keys, Rows values,
                                                                threadgroup float* shared, uint simd, long) {
  return UnitProducts<T, kSize, Rows>(queries, keys, values, shared, simd);
}
