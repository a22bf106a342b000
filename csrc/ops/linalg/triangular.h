// Triangular systems, for the ops that use them.
#pragma once

#include "../common/common.h"

namespace metalcore {

// The operator metalcore::solve_triangular returns X with A X = B (left) or X A = B, for float32 matrices. It reads
// only the named triangle of A, and not its diagonal where `unitriangular`. Batches broadcast, and X is row-major.
Tensor solve_triangular(const Tensor& a, const Tensor& b, bool upper, bool left, bool unitriangular);

}  // namespace metalcore
