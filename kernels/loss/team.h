// Who works on a row where that is one thread; see common/rows.h for others.
#pragma once

#include <metal_stdlib>

// A team of one thread.
struct Alone {
  uint thread_index = 0;
  uint threads = 1;

  float sum(float value, uint) const { return value; }
  float maximum(float value, uint) const { return value; }
};
