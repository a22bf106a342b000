// metalcore_unit_walk() for GPUs with tensor cores, which products of few terms call (kernels/gemm/unit_walk.h). Shared
// memory has all terms of the tile that stays, and two places for those that come in turn.
#pragma once

#include "target/tensor_product.h"

#if __CUDA_ARCH__ >= 800

namespace msl {

template <class Product, class T, int terms, bool keeps_left, bool swaps_left, bool swaps_right, class Index>
struct TileWalk {
  using Left = typename Product::Left;
  using Right = typename Product::Right;
  using Kept = std::conditional_t<keeps_left, Left, Right>;
  using Moving = std::conditional_t<keeps_left, Right, Left>;
  static constexpr bool kept_is_packed = keeps_left ? !swaps_left : swaps_right;
  static constexpr bool moving_is_packed = keeps_left ? swaps_right : !swaps_left;
  static constexpr int steps = (terms + kInner - 1) / kInner;
  static constexpr int kept_bytes = steps * Kept::bytes, moving_bytes = steps * Moving::bytes;
  static constexpr int kib = (kept_bytes + 2 * moving_bytes + 1023) / 1024 + 1;

  uint32_t memory;
  int own_steps, length, place = 0;

  template <class LeftTensor, class RightTensor>
  METAL_FUNC TileWalk(const LeftTensor& left, const RightTensor& right)
      : memory(pipeline_memory<kib>()), length(int(left.get_extent(swaps_left ? 1 : 0))) {
    own_steps = (length + kInner - 1) / kInner;
    if constexpr (keeps_left) {
      copy<Kept, kept_is_packed>(left, memory);
      copy<Moving, moving_is_packed>(right, memory + kept_bytes);
    } else {
      copy<Kept, kept_is_packed>(right, memory);
      copy<Moving, moving_is_packed>(left, memory + kept_bytes);
    }
  }

  template <class Next, class Sums>
  METAL_FUNC void multiply(bool has_next, const Next& next, Sums& sums) {
    wait_for_copies<0>();
    if constexpr (Product::by_warpgroups) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    const uint32_t moving = memory + kept_bytes + place * moving_bytes;
    place = 1 - place;
    if (has_next) copy<Moving, moving_is_packed>(next, memory + kept_bytes + place * moving_bytes);
    float held[Product::Layout::capacity] = {};
#pragma unroll
    for (int step = 0; step < steps; ++step)
      if (step < own_steps)
        Product::multiply(keeps_left ? memory + step * Left::bytes : moving + step * Left::bytes,
                          keeps_left ? moving + step * Right::bytes : memory + step * Right::bytes, held);
    wait_for_products();
#pragma unroll
    for (int i = 0; i < Product::Layout::capacity; ++i) sums.give(i, held[i]);
  }

 private:
  template <class Stage, bool is_packed, class Tensor>
  METAL_FUNC void copy(const Tensor& tensor, uint32_t to) const {
    const Copies<T, Index, Stage, is_packed, Product::threads> copies(tensor, length);
#pragma unroll
    for (int step = 0; step < steps; ++step)
      if (step < own_steps) copies.copy(to + step * Stage::bytes, step);
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
};

}  // namespace msl

template <uint32_t rows, uint32_t columns, uint32_t terms, uint32_t simdgroups, bool across_left, bool across_right,
          bool keeps_rows, class Left, class Right>
METAL_FUNC auto metalcore_unit_walk(Left left, Right right, int) {
  using T = std::remove_cv_t<typename Left::value_type>;
  using Product = msl::TileProduct<T, int(rows), int(columns), 0, across_left, across_right, int(simdgroups)>;
  return msl::TileWalk<Product, T, int(terms), keeps_rows, across_left, across_right, typename Left::index_type>(left,
                                                                                                                 right);
}

#endif
