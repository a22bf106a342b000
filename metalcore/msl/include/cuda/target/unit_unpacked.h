// metalcore_multiply_unpacked() for GPUs with tensor cores, which products of packed weights call
// (kernels/quant/unpacked.h): the pipeline of tensor_product.h, whose right operand is unpacked into its stages while
// products go on. What a step needs is loaded one step ahead.
#pragma once

#include "target/tensor_product.h"

#if __CUDA_ARCH__ >= 800

namespace msl {

// Unpacks weights, step by step. A thread has a half of the step's terms of row `row`.
template <class Weights, class Stage, int threads>
struct UnpackedCopies {
  static constexpr int parts = 2 * Stage::lines / threads, between = threads / 2;
  static_assert(2 * Stage::lines % threads == 0, "each thread has as many rows");

  Weights weights;
  uint32_t row, half_step;
  typename Weights::Loaded next[parts];

  METAL_FUNC explicit UnpackedCopies(const Weights& weights)
      : weights(weights), row(index_in_block() / 2), half_step(index_in_block() % 2) {
    load(0);
  }
  // Each call is for the step after the last one's.
  METAL_FUNC void copy(uint32_t stage, int step) {
#pragma unroll
    for (int i = 0; i < parts; ++i) {
      const uint32_t line = row + i * between;
      weights.unpack(next[i], half_step, uint32_t(step), [&](uint32_t pack, const auto& elements) {
        const auto& words = elements.words;
        asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(stage + line * kLineBytes +
                                                                     ((pack ^ line) & 7) * kPackBytes),
                     "r"(words.x), "r"(words.y), "r"(words.z), "r"(words.w)
                     : "memory");
      });
    }
    load(uint32_t(step) + 1);
  }

 private:
  METAL_FUNC void load(uint32_t step) {
#pragma unroll
    for (int i = 0; i < parts; ++i) next[i] = weights.load(row + i * between, half_step, step);
  }
};

}  // namespace msl

template <uint32_t rows, uint32_t columns, uint32_t simdgroups, class T, class X, class Weights, class Sums>
METAL_FUNC void metalcore_multiply_unpacked(const X& x, const Weights& weights, T*, Sums& sums, uint32_t, int) {
  using Product = msl::TileProduct<T, int(rows), int(columns), 0, false, true, int(simdgroups)>;
  const msl::Copies<T, typename X::index_type, typename Product::Left, true, Product::threads> lefts(
      x, int(x.get_extent(0)));
  msl::UnpackedCopies<Weights, typename Product::Right, Product::threads> rights(weights);
  float held[Product::Layout::capacity];
#pragma unroll
  for (int i = 0; i < Product::Layout::capacity; ++i) held[i] = sums.value(i);
  Product::add_steps(lefts, rights, (lefts.inner + msl::kInner - 1) / msl::kInner, held);
#pragma unroll
  for (int i = 0; i < Product::Layout::capacity; ++i) sums.give(i, held[i]);
}

#endif
