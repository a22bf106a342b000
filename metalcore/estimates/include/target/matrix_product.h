// Products of 8 by 8 matrices: a call is an instruction.
#pragma once

#include "metal/matrix_place.h"
#include "target/lanes.h"
#include "target/math.h"

#pragma push_macro("METAL_FUNC")
#undef METAL_FUNC
#define METAL_FUNC inline __attribute__((noinline))
#define matrix_product matrix_product_of
#include_next "target/matrix_product.h"
#undef matrix_product
#pragma pop_macro("METAL_FUNC")

namespace msl {

// The operands are copied: arrays of matrices, whose elements' addresses a call would take, would not become registers.
template <class A, class B>
METAL_FUNC metal::vec<float, 2> matrix_product(const metal::vec<A, 2>& a, const metal::vec<B, 2>& b,
                                               metal::vec<float, 2> c, uint32_t line) {
  const metal::vec<A, 2> left = a;
  const metal::vec<B, 2> right = b;
  return matrix_product_of(left, right, c, line);
}

}  // namespace msl
