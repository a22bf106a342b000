// Triangular systems, for the ops that are made of them.
#pragma once

#include "../common.h"

namespace metalcore {

// The operator metalcore::solve_triangular: X with A X = B (left) or X A = B of float32 matrices, of whose A only the
// triangle named is read, without its diagonal where `unitriangular`. Batches broadcast; X is row-major.
Tensor solve_triangular(const Tensor& a, const Tensor& b, bool upper, bool left, bool unitriangular);

}  // namespace metalcore
