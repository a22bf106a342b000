// Wording that error messages share.
#pragma once

#include "host/kernel_abi.h"

#include <cstdint>
#include <string>

namespace metalcore::simulator {

inline std::string text(msl_abi::Uint3 p) {
  return "(" + std::to_string(p.x) + ", " + std::to_string(p.y) + ", " + std::to_string(p.z) + ")";
}

inline std::string plural(uint64_t count, const std::string& noun) {
  return std::to_string(count) + " " + noun + (count == 1 ? "" : "s");
}

}  // namespace metalcore::simulator
