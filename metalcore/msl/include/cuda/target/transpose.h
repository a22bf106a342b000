// A lane's two elements of a transposed 8 by 8 matrix, in the lanes' order of the tensor cores: lane 4 r + c has the
// elements 2 c and 2 c + 1 of row r. Two shuffles fetch them; movmatrix does the same for 16-bit elements, in several
// times as many cycles.
#pragma once

#include "metal/matrix_place.h"
#include "metal/vec.h"

namespace msl {

// The program's row (see lane_numbers.h) that is a row of the tensor cores, and the other way round.
METAL_FUNC uint32_t exchanged_row(uint32_t row) { return (row & 4) | (row >> 1 & 1) | (row << 1 & 2); }

// Only whole simdgroups, which are renumbered, have matrices.
METAL_FUNC MatrixPlace place_of_lane() { return {exchanged_row(warp_lane() / 4), warp_lane() % 4 * 2}; }

// The lane that has this lane's column in row 2 c; the lane of the row after it is kNextRow further.
constexpr uint32_t kNextRow = 8;
METAL_FUNC int lane_of_column() { return int((warp_lane() & 2u) << 3 | (warp_lane() & 1u) << 2 | warp_lane() >> 3); }
METAL_FUNC uint32_t is_in_odd_row() { return warp_lane() & 4u; }
// Which halves of the two lanes' pairs are in this lane's column.
METAL_FUNC uint32_t halves_of_column() { return is_in_odd_row() ? 0x7632 : 0x5410; }

// Lanes of even rows take their first element from an even row and their second one from an odd row, and the others
// take them the other way round. So in each shuffle a lane gives only one of its elements.
METAL_FUNC metal::vec<float, 2> transposed(metal::vec<float, 2> v) {
  const bool odd = is_in_odd_row(), gives_odd = warp_lane() & kNextRow;
  const int lane = lane_of_column() | (odd ? kNextRow : 0);
  const float same = __shfl_sync(0xffffffffu, gives_odd ? v.y : v.x, lane);
  const float other = __shfl_sync(0xffffffffu, gives_odd ? v.x : v.y, lane ^ kNextRow);
  return metal::vec<float, 2>(odd ? other : same, odd ? same : other);
}

}  // namespace msl
