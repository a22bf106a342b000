// metalcore_multiply_patches() for GPUs with tensor cores, which convolutions call (kernels/conv/patches.h): the
// pipeline of tensor_product.h, whose left operand is gathered from images by asynchronous copies.
#pragma once

#include "target/tensor_product.h"

#if __CUDA_ARCH__ >= 800

namespace msl {

// Copies patches, step by step. A thread has the pack `pack` of the rows `first`, `first` + threads / 8 ….
template <class Patches, class Stage, int threads>
struct PatchCopies {
  static constexpr int between = threads / 8, count = Stage::lines / between;
  static_assert(Stage::lines % between == 0, "each thread has as many rows");
  using Row = typename Patches::Row;

  Patches patches;
  int first, pack;
  decltype(std::declval<Patches>().term(0)) term;
  Row rows[count];

  METAL_FUNC explicit PatchCopies(const Patches& patches)
      : patches(patches), first(int(index_in_block()) / 8), pack(int(index_in_block()) % 8) {
    term = patches.term(pack * kPackElements);
#pragma unroll
    for (int i = 0; i < count; ++i) rows[i] = patches.row(first + i * between);
  }
  // Each call is for the step after the last one's.
  METAL_FUNC void copy(uint32_t stage, int) {
    const int offset = patches.offset(term);
#pragma unroll
    for (int i = 0; i < count; ++i) {
      const int line = first + i * between;
      const bool exists = patches.has(rows[i], term);
      const auto* const from = exists ? rows[i].corner + offset : patches.x;
      asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(
                       stage + uint32_t(line * kLineBytes + ((pack ^ line) & 7) * kPackBytes)),
                   "l"(from), "r"(exists ? kPackBytes : 0)
                   : "memory");
    }
    patches.skip(term, kInner);
  }
};

}  // namespace msl

template <uint32_t rows, uint32_t columns, uint32_t simdgroups, class Patches, class T, class Weight, class Sums>
METAL_FUNC void metalcore_multiply_patches(const Patches& patches, const Weight& weight, T*, Sums& sums, uint32_t,
                                           int) {
  using Product = msl::TileProduct<T, int(rows), int(columns), 0, false, true, int(simdgroups)>;
  msl::PatchCopies<Patches, typename Product::Left, Product::threads> lefts(patches);
  const msl::Copies<T, typename Weight::index_type, typename Product::Right, true, Product::threads> rights(
      weight, int(weight.get_extent(0)));
  float held[Product::Layout::capacity];
#pragma unroll
  for (int i = 0; i < Product::Layout::capacity; ++i) held[i] = sums.value(i);
  Product::add_steps(lefts, rights, (rights.inner + msl::kInner - 1) / msl::kInner, held);
#pragma unroll
  for (int i = 0; i < Product::Layout::capacity; ++i) sums.give(i, held[i]);
}

#endif
