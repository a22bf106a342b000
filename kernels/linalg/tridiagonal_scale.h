// The scale of tridiagonal matrices while they are solved.
#pragma once

#include <metal_stdlib>

#include "scalars.h"

constant constexpr float kLargestEntry = 0.125f;  // of entries that a scale brings to about one

// An eigenvalue, which is NaN for a matrix that is not finite: its scale is 0.
inline float in_own_scale(float value, float scale) {
  return scale > 0.0f ? value * (1.0f / kLargestEntry) * inverse_of_scale(scale) : NAN;
}
