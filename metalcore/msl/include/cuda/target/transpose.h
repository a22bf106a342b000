// A lane's two elements of a transposed 8 by 8 matrix, in the lanes' order of the tensor cores: lane 4 r + c has the
// elements 2 c and 2 c + 1 of row r. Two shuffles fetch them; movmatrix does the same for 16-bit elements, in several
// times as many cycles.
#pragma once

#include "metal/vec.h"

namespace msl {

// The lane that has this lane's column in row 2 c; the lane of the row after it is 4 further.
METAL_FUNC int lane_of_column() { return int((warp_lane() & 3u) << 3 | warp_lane() >> 3); }
METAL_FUNC uint32_t is_in_odd_row() { return warp_lane() & 4u; }

// For two elements of 16 bits.
METAL_FUNC uint32_t transposed(uint32_t pair) {
  const uint32_t first = __shfl_sync(0xffffffffu, pair, lane_of_column());
  const uint32_t second = __shfl_sync(0xffffffffu, pair, lane_of_column() + 4);
  return __byte_perm(first, second, is_in_odd_row() ? 0x7632 : 0x5410);
}

// Lanes of even rows take their first element from an even row and their second one from an odd row, and the others
// take them the other way round. So in each shuffle a lane gives only one of its elements.
METAL_FUNC metal::vec<float, 2> transposed(metal::vec<float, 2> v) {
  const bool odd = is_in_odd_row();
  const int lane = lane_of_column() | int(is_in_odd_row());
  const float same = __shfl_sync(0xffffffffu, odd ? v.y : v.x, lane);
  const float other = __shfl_sync(0xffffffffu, odd ? v.x : v.y, lane ^ 4);
  return metal::vec<float, 2>(odd ? other : same, odd ? same : other);
}

}  // namespace msl
