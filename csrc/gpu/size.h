// The size of a grid or of a threadgroup.
#pragma once

#include <cstdint>

namespace metalcore::gpu {

struct Size {
  uint32_t x = 1, y = 1, z = 1;
  bool empty() const { return x == 0 || y == 0 || z == 0; }
};

}  // namespace metalcore::gpu
