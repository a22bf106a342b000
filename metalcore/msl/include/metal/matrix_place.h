// The places of a lane's two elements of a simdgroup_matrix.
#pragma once

#include "target/runtime.h"

namespace msl {

struct MatrixPlace {
  uint32_t row, column;  // the lane's first element; its second one is in the next column
};
METAL_FUNC MatrixPlace matrix_place(uint32_t lane) {
  uint32_t quad = lane / 4;
  return {(quad & 4) + lane / 2 % 4, (quad & 2) * 2 + lane % 2 * 2};
}
// The lane that holds an element; the inverse of matrix_place.
METAL_FUNC uint32_t matrix_lane(uint32_t row, uint32_t column) {
  return (row & 4) << 2 | (column & 4) << 1 | (row & 3) << 1 | (column >> 1 & 1);
}

}  // namespace msl
