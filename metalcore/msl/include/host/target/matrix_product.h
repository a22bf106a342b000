// The product of two 8 by 8 matrices that are spread over a simdgroup.
#pragma once

#include "metal/matrix_place.h"
#include "target/lanes.h"
#include "target/math.h"

namespace msl {

METAL_FUNC MatrixPlace place_of_lane() { return matrix_place(index_of_lane()); }

// This lane's two elements of a * b + c, summed in float. Each lane publishes its parts of a and b in one exchange.
template <class A, class B>
METAL_FUNC metal::vec<float, 2> matrix_product(const metal::vec<A, 2>& a, const metal::vec<B, 2>& b,
                                               metal::vec<float, 2> c, uint32_t line) {
  struct Parts {
    metal::vec<A, 2> a;
    metal::vec<B, 2> b;
  };
  Lanes<Parts> lanes = publish(Parts{a, b}, kSimd, line);
  MatrixPlace place = matrix_place(lanes.lane);
  for (uint32_t k = 0; k < 8; k += 2) {
    metal::vec<A, 2> left = lanes[matrix_lane(place.row, k)].a;
    metal::vec<B, 2> first = lanes[matrix_lane(k, place.column)].b, second = lanes[matrix_lane(k + 1, place.column)].b;
    c.x = math::multiply_add(float(left.x), float(first.x), c.x);
    c.y = math::multiply_add(float(left.x), float(first.y), c.y);
    c.x = math::multiply_add(float(left.y), float(second.x), c.x);
    c.y = math::multiply_add(float(left.y), float(second.y), c.y);
  }
  return c;
}

}  // namespace msl
