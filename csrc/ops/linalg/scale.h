// Matrices that are scaled to entries of about one.
#pragma once

#include "../common/common.h"

#include <vector>

namespace metalcore {

// A, row-major, with each matrix times a power of two that brings its largest entry to about one, and these powers,
// (*, 1, 1). A matrix with NaN or infinities gets some power of two.
struct Scaled {
  Tensor a, scales;
};
Scaled scaled(const Tensor& a);

}  // namespace metalcore
