// How the lanes of a simdgroup are numbered. In programs with simdgroup_matrix (MSL_MATRIX_LANES) the warp's lanes are
// numbered such that a lane's two elements of a matrix, whose place Metal fixes, are those that the tensor cores give
// it. A row's number is then bits 4, 2 and 1 of the program's lane and bits 4, 3 and 2 of the warp's; the column's is
// bits 3 and 0, and 1 and 0. A threadgroup's last, short simdgroup cannot multiply matrices and keeps the warp's order,
// in which the missing lanes are the last ones.
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
  return is_renumbered() ? (lane & 0x11u) | (lane << 1 & 0xcu) | (lane >> 2 & 2u) : lane;
}

// Exchanges the bits of a mask of lanes whose numbers differ in two places.
template <uint32_t shift, uint32_t lower>
METAL_FUNC uint32_t exchange_bits(uint32_t mask) {
  uint32_t changed = (mask >> shift ^ mask) & lower;
  return mask ^ changed ^ changed << shift;
}

// The same lanes in the program's numbers.
METAL_FUNC uint32_t program_lanes(uint32_t hardware_lanes) {
  if (!is_renumbered()) return hardware_lanes;
  return exchange_bits<2, 0x0c0c0c0cu>(exchange_bits<6, 0x00cc00ccu>(hardware_lanes));
}

#else

METAL_FUNC uint32_t hardware_lane(uint32_t lane) { return lane; }
METAL_FUNC uint32_t program_lanes(uint32_t hardware_lanes) { return hardware_lanes; }

#endif

}  // namespace msl
