// Matrices scaled to entries of about one.
#pragma once

#include "../common.h"

#include <vector>

namespace metalcore {

// A times a power of two for each matrix that brings its largest entry to one, row-major, and these, (*, 1, 1). Of a
// matrix with NaN or infinities the scale is some power of two.
struct Scaled {
  Tensor a, scales;
};
Scaled scaled(const Tensor& a);

}  // namespace metalcore
