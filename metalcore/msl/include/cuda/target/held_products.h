// Products of fragments that the lanes of a simdgroup hold in cooperative tensors, on tensor cores (mma), which have
// another place for each element. The order of the inner elements is free, as long as both operands have the same. A
// program that multiplies such fragments numbers its lanes (lanes.h) so that a left operand is in place:
//
// - A lane is 4 g + c of the warp, and bits 2, 1 and 0 of its fragments' row r are bits 1, 2 and 0 of g. It has the
//   columns 4 c to 4 c + 3 of the rows r and r + 8, as words of two columns.
// - Tensor cores have the rows in any order. A product of 8 columns gives lane 4 g + c the columns 2 c and 2 c + 1 of
//   its own. Two of these are the columns 4 c to 4 c + 3 of a fragment if the right operand of product b has column
//   4 (g / 2) + 2 b + g % 2 in lane g. These are a transposed right operand's rows once lanes with bit 2 of g and
//   those without it have exchanged one of two words.
// - Other operands are transposed by movmatrix. The inner elements then have another order, in which operands that are
//   not transposed lie once lanes with bit 1 of c and those without it have exchanged one of two words.
#pragma once

#include "metal/cooperative_tensor.h"
#include "target/tensor_instructions.h"

namespace msl {

// Exchanges a word between lanes whose numbers differ in `bit`: {a, b} of one lane and {c, d} of the other become
// {a, c} and {b, d}. The assembly here is not volatile, so that products that share an operand share its words. Their
// own is, so that all lanes come here.
METAL_FUNC void exchange_words(uint32_t& first, uint32_t& second, uint32_t bit) {
  const bool upper = warp_lane() & bit;
  const uint32_t given = upper ? first : second;
  uint32_t found;
  asm("shfl.sync.bfly.b32 %0, %1, %2, 31, -1;" : "=r"(found) : "r"(given), "r"(bit));
  first = upper ? found : first;
  second = upper ? second : found;
}

METAL_FUNC uint32_t transposed_word(uint32_t word) {
  uint32_t found;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(found) : "r"(word));
  return found;
}

template <class T>
METAL_FUNC uint32_t word_of_pair(T low, T high) {
  uint32_t word;
  asm("mov.b32 %0, {%1, %2};" : "=r"(word) : "h"(bit_cast<uint16_t>(low)), "h"(bit_cast<uint16_t>(high)));
  return word;
}

// A fragment as tensor cores want it: words by parts of the outer and of the inner elements.
struct FragmentWords {
  uint32_t of[2][2];

  // `inner_is_column`: whether the inner elements go along the fragment's rows. `in_turn`: whether the other operand's
  // do not, or these do not.
  template <bool is_left, bool inner_is_column, bool in_turn, class Tensor>
  METAL_FUNC void read(const Tensor& tensor, int number) {
#pragma unroll
    for (int row = 0; row < 2; ++row)
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        const int i = number * kSlots + 4 * row + 2 * pair;
        const uint32_t word = word_of_pair(tensor.value(i), tensor.value(i + 1));
        if (inner_is_column)
          of[row][pair] = word;
        else
          of[pair][row] = transposed_word(word);
      }
    if (inner_is_column && in_turn)
#pragma unroll
      for (int outer = 0; outer < 2; ++outer) exchange_words(of[outer][0], of[outer][1], 2);
    if (is_left != inner_is_column)
#pragma unroll
      for (int inner = 0; inner < 2; ++inner) exchange_words(of[0][inner], of[1][inner], 16);
  }
};

template <class Left, class Right, class Destination>
struct HeldProduct {
  using A = typename Left::layout;
  using B = typename Right::layout;
  using C = typename Destination::layout;
  using T = typename Left::value_type;
  static constexpr bool is_whole(int length) { return length % kFragment == 0; }
#ifdef MSL_FRAGMENT_LANES
  static constexpr bool is_possible =
      __CUDA_ARCH__ >= 800 && is_among<T, metal::half, metal::bfloat> &&
      std::is_same_v<T, typename Right::value_type> && std::is_same_v<typename Destination::value_type, float> &&
      is_whole(A::rows) && is_whole(A::columns) && is_whole(B::rows) && is_whole(B::columns);
#else
  static constexpr bool is_possible = false;
#endif

  // Adds the product to the destination, or gives it the product.
  template <bool swaps_left, bool swaps_right, bool adds>
  static METAL_FUNC void multiply(const Left& left, const Right& right, Destination& destination) {
    constexpr bool in_turn = swaps_left || !swaps_right;
    constexpr int down = C::rows / kFragment, across = C::columns / kFragment;
    constexpr int inner = (swaps_left ? A::rows : A::columns) / kFragment;
#pragma unroll
    for (int row = 0; row < down; ++row)
#pragma unroll
      for (int column = 0; column < across; ++column) {
        const int number = (row * across + column) * kSlots;
        float sums[2][4];
#pragma unroll
        for (int i = 0; i < kSlots; ++i)
          sums[i / 2 % 2][i / 4 * 2 + i % 2] = adds ? destination.value(number + i) : 0.0f;
#pragma unroll
        for (int k = 0; k < inner; ++k) {
          FragmentWords a, b;
          a.template read<true, !swaps_left, in_turn>(left, swaps_left ? k * down + row : row * inner + k);
          b.template read<false, swaps_right, in_turn>(right, swaps_right ? column * inner + k : k * across + column);
          const uint32_t words[4] = {a.of[0][0], a.of[1][0], a.of[0][1], a.of[1][1]};
#pragma unroll
          for (int part = 0; part < 2; ++part)
            multiply_simdgroup(T(), sums[part], words, b.of[part][0], b.of[part][1]);
        }
#pragma unroll
        for (int i = 0; i < kSlots; ++i) destination.give(number + i, sums[i / 2 % 2][i / 4 * 2 + i % 2]);
      }
  }
};

}  // namespace msl
