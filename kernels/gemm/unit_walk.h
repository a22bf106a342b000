// Products of a tile that stays in threadgroup memory with others, one after the other, by units that multiply tensors.
//
// metalcore_unit_walk() is called with a 0 as its last parameter: a compiler's headers may have a function that is the
// same except for an `int` (see common/matrices.h). That for NVIDIA's GPUs copies the next tile while the threadgroup
// stores what it made of the one before.
#pragma once

#include <metal_tensor>
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>

// kKeepsRows: whether the operand that stays is the left one.
template <bool kKeepsRows, typename Multiply, typename Left, typename Right>
struct UnitWalk {
  Left left;
  Right right;

  // Sets the sums to the product of the tiles, and goes to `next` in the place of the one that does not stay.
  template <typename Next, typename Sums>
  METAL_FUNC void multiply(bool has_next, Next next, thread Sums& sums) {
    constexpr Multiply multiply;
    Left own_left = left;
    Right own_right = right;
    multiply.run(own_left, own_right, sums);
    if (!has_next) return;
    if constexpr (kKeepsRows)
      right = next;
    else
      left = next;
  }
};

// The products have up to kTerms terms.
template <uint kRows, uint kColumns, uint kTerms, uint kSimds, bool kAcrossA, bool kAcrossB, bool kKeepsRows,
          typename Left, typename Right>
METAL_FUNC auto metalcore_unit_walk(Left left, Right right, long) {
  using namespace mpp::tensor_ops;
  constexpr auto descriptor = matmul2d_descriptor(kRows, kColumns, kTerms, kAcrossA, kAcrossB);
  using Multiply = matmul2d<descriptor, metal::execution_simdgroups<kSimds>>;
  return UnitWalk<kKeepsRows, Multiply, Left, Right>{left, right};
}
