// The places of a lane's two elements of a simdgroup_matrix: Metal's if the program can see them, and otherwise
// (MSL_OPAQUE_MATRICES) those that tensor cores need.
#pragma once

#include "target/lanes.h"

#ifdef MSL_OPAQUE_MATRICES

namespace msl {

struct MatrixPlace {
  uint32_t row, column;
};
METAL_FUNC MatrixPlace matrix_place(uint32_t lane) { return {lane / 4, lane % 4 * 2}; }
METAL_FUNC uint32_t matrix_lane(uint32_t row, uint32_t column) { return row * 4 + column / 2; }

template <class T>
METAL_FUNC T to_tensor_place(T value) {
  return value;
}
template <class T>
METAL_FUNC T from_tensor_place(T value) {
  return value;
}

}  // namespace msl

#else

#include "metal/matrix_place.h"

namespace msl {

// Moves elements between the lanes of Metal's layout and those of the tensor cores' layout, whose rows are four lanes
// long.
template <class T>
METAL_FUNC T to_tensor_place(T value) {
  uint32_t lane = index_of_lane();
  return shuffle<kSimd>(kEveryLane, value, matrix_lane(lane / 4, lane % 4 * 2));
}
template <class T>
METAL_FUNC T from_tensor_place(T value) {
  MatrixPlace place = matrix_place(index_of_lane());
  return shuffle<kSimd>(kEveryLane, value, place.row * 4 + place.column / 2);
}

}  // namespace msl

#endif
