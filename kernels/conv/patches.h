// The left operand of a convolution by units that multiply tensors, and its product with the weight.
//
// metalcore_multiply_patches() is called with a 0 as its last parameter: a compiler's headers may have a function that
// is the same except for an `int` (see common/matrices.h). That for NVIDIA's GPUs copies patches while units multiply.
#pragma once

#include <metal_tensor>
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>

#include "common/pack.h"
#include "conv/terms.h"

// A matrix with a row for each pixel of the result, and a term for each element of x that the window covers there, its
// channels first. The channels of x are neighbours, and a group has packs of 16 bytes of them.
template <typename T>
struct PatchRows {
  constant ConvParams& p;
  device T* x;  // the group's first channel
  uint first;   // pixel
  uint begin;   // term

  // The pixel of a row: the place in the image that its window's first element has, and where that would lie.
  struct Row {
    device T* corner;
    int y, x;
  };
  METAL_FUNC Row row(uint index) const {
    const Pixel pixel = pixel_at(p, first + index);
    const int2 place = corner_of(p, pixel);
    if (first + index >= p.pixels) return {x, -0x40000000, 0};  // outside of each image
    return {x + int64_t(pixel.image) * p.x.image + int64_t(place.y) * p.x.y + int64_t(place.x) * p.x.x, place.y,
            place.x};
  }
  METAL_FUNC Term term(uint index) const { return term_at(p, begin + index); }
  // Goes to a later term.
  METAL_FUNC void skip(thread Term& term, uint count) const {
    term.channel += count;
    while (term.channel >= p.channels && term.y < p.window.y) {
      term.channel -= p.channels;
      next_place(p, term);
    }
  }
  // Where a term's element lies behind a row's corner, and whether there is one.
  METAL_FUNC int offset(Term term) const {
    return int(term.channel) + int(term.y * p.dilation.y) * p.x.y + int(term.x * p.dilation.x) * p.x.x;
  }
  METAL_FUNC bool has(Row row, Term term) const {
    return uint(row.y) + term.y * p.dilation.y < p.size.y && uint(row.x) + term.x * p.dilation.x < p.size.x &&
           term.y < p.window.y;
  }
};

// Adds the products of kRows rows of patches and the weight, which has a term in each of its columns: as many terms as
// the weight has.
template <uint kRows, uint kColumns, uint kSimds, typename T, typename Weight, typename Sums>
METAL_FUNC void metalcore_multiply_patches(PatchRows<T> patches, Weight weight, threadgroup T* tile, thread Sums& sums,
                                           uint thread_index, long) {
  using namespace mpp::tensor_ops;
  constexpr auto descriptor = matmul2d_descriptor(kRows, kColumns, CONV_UNIT_STEP, false, true, false,
                                                  matmul2d_descriptor::mode::multiply_accumulate);
  constexpr matmul2d<descriptor, metal::execution_simdgroups<kSimds>> multiply;
  constexpr uint kPack = 16 / sizeof(T), kPacks = CONV_UNIT_STEP / kPack, kThreads = 32 * kSimds;
  const uint own = thread_index % kPacks;
  Term term = patches.term(own * kPack);
  auto left = metal::tensor<threadgroup T, metal::extents<int, CONV_UNIT_STEP, kRows>, metal::tensor_inline>(
      tile, metal::extents<int, CONV_UNIT_STEP, kRows>());
  for (uint first = 0; first < uint(weight.get_extent(0)); first += CONV_UNIT_STEP) {
    for (uint line = thread_index / kPacks; line < kRows; line += kThreads / kPacks) {
      const auto row = patches.row(line);
      Pack<T> pack = Pack<T>();
      if (patches.has(row, term)) pack = *reinterpret_cast<device const Pack<T>*>(row.corner + patches.offset(term));
      *reinterpret_cast<threadgroup Pack<T>*>(tile + line * CONV_UNIT_STEP + own * kPack) = pack;
    }
    patches.skip(term, CONV_UNIT_STEP);
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    auto right = weight.slice(int(first), 0);
    multiply.run(left, right, sums);
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  }
}
