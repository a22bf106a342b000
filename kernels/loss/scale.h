// What scale.metal and csrc/ops/loss/scale.cpp share.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

struct ScaleParams {
  uint64_t count;
};
