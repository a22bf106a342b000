// Eigenvalues and eigenvectors of symmetric tridiagonal matrices.
#pragma once

#include "../common/common.h"

#include <tuple>

namespace metalcore {

// Returns the eigenvalues (*, n), ascending, and with `compute_v` the eigenvectors (*, n, n), as columns of row-major
// matrices, of matrices with the diagonals d (*, n) and the off-diagonals e (*, n - 1), both float32. Nothing waits for
// the device. All results of a matrix with a NaN or an infinity are NaN.
std::tuple<Tensor, Tensor> eigh_tridiagonal(const Tensor& d, const Tensor& e, bool compute_v);

}  // namespace metalcore
