// The host has no way of its own to multiply tiles in memory, or fragments that lanes hold (see
// cuda/target/tensor_product.h and held_products.h).
#pragma once

#include "metal/cooperative_tensor.h"

namespace msl {

template <int rows, int columns, int simdgroups>
using DestinationLayout = MatrixLayout<rows, columns, simdgroups, Operand::destination>;

template <class T, int m, int n, int k, bool swaps_left, bool swaps_right, int simdgroups>
struct TileProduct {
  static constexpr bool is_possible = false;
};

template <class Left, class Right, class Destination>
struct HeldProduct {
  static constexpr bool is_possible = false;
};

}  // namespace msl
