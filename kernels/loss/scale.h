// What scale.metal and csrc/ops/loss/divergence.cpp share.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

struct ScaleParams {
  uint64_t count;
};
