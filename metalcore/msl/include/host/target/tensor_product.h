// The host has no way of its own to multiply tiles in memory (see cuda/target/tensor_product.h).
#pragma once

#include "metal/cooperative_tensor.h"

namespace msl {

template <int rows, int columns, int simdgroups>
using DestinationLayout = MatrixLayout<rows, columns, simdgroups, Operand::destination>;

template <class T, int m, int n, int k, bool swaps_left, bool swaps_right, int simdgroups>
struct TileProduct {
  static constexpr bool is_possible = false;
};

}  // namespace msl
