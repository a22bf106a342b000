// How the lanes of a simdgroup are numbered. In programs with simdgroup_matrix (MSL_MATRIX_LANES) the warp's lanes are
// numbered such that a lane's two elements of a matrix, whose place Metal fixes, are those that the tensor cores give
// it: bits 1 and 3 of its number change places. The column is then bits 3 and 0 of the program's lane, and bits 1 and 0
// of the warp's. The row is bits 4, 2 and 1 of the program's, and bits 4, 2 and 3 of the warp's. Tensor cores have it in
// bits 4, 3 and 2. They may have rows in another order, since the left matrix and the sum have the same, and in this one
// eight lanes that store 16 bytes each to a tile of 16 columns meet in no bank. A threadgroup's last, short simdgroup
// cannot multiply matrices and keeps the warp's order, in which the missing lanes are the last ones.
#pragma once

#include "target/runtime.h"

namespace msl {

#ifdef MSL_MATRIX_LANES

METAL_FUNC bool is_renumbered() {
#ifdef MSL_CONVERGENT
  return true;  // only whole simdgroups ask
#else
  return is_in_whole_warp();
#endif
}

// The warp's lane that is the program's lane `lane`. It also holds for the exclusive or of two lanes.
METAL_FUNC uint32_t hardware_lane(uint32_t lane) {
  return is_renumbered() ? numbered_lane(lane) : lane;
}

// The same lanes in the program's numbers: lanes with only bit 1 change places with those 6 further, with only bit 3.
METAL_FUNC uint32_t program_lanes(uint32_t hardware_lanes) {
  if (!is_renumbered()) return hardware_lanes;
  const uint32_t changed = (hardware_lanes >> 6 ^ hardware_lanes) & 0x00cc00ccu;
  return hardware_lanes ^ changed ^ changed << 6;
}

#else

METAL_FUNC uint32_t hardware_lane(uint32_t lane) { return lane; }
METAL_FUNC uint32_t program_lanes(uint32_t hardware_lanes) { return hardware_lanes; }

#endif

}  // namespace msl
