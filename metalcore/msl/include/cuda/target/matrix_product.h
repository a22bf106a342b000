// The product of two 8 by 8 matrices that lie spread over a simdgroup.
#pragma once

#include "metal/matrix_place.h"
#include "target/lanes.h"
#include "target/math.h"

namespace msl {

// This lane's two elements of a * b + c, in float.
template <class A, class B>
METAL_FUNC metal::vec<float, 2> matrix_product(const metal::vec<A, 2>& a, const metal::vec<B, 2>& b,
                                               metal::vec<float, 2> c, uint32_t) {
  MatrixPlace place = matrix_place(index_of_lane());
#pragma unroll
  for (uint32_t k = 0; k < 8; k += 2) {
    metal::vec<A, 2> left = shuffle<kSimd>(kEveryLane, a, matrix_lane(place.row, k));
    metal::vec<B, 2> first = shuffle<kSimd>(kEveryLane, b, matrix_lane(k, place.column));
    metal::vec<B, 2> second = shuffle<kSimd>(kEveryLane, b, matrix_lane(k + 1, place.column));
    c.x = ::fmaf(float(left.x), float(first.x), c.x);
    c.y = ::fmaf(float(left.x), float(first.y), c.y);
    c.x = ::fmaf(float(left.y), float(second.x), c.x);
    c.y = ::fmaf(float(left.y), float(second.y), c.y);
  }
  return c;
}

}  // namespace msl
