// The SVD of large matrices by the polar decomposition and eigh.
#pragma once

#include "../common/common.h"

#include <cstdint>

namespace metalcore {

// What `svd_polar` writes, for n x n matrices.
struct PolarResults {
  Tensor values;  // (batch, n), descending
  // Not written if only the values are wanted.
  Tensor left;  // entry (i, j) of the left singular vectors as columns, at these strides
  int64_t left_row, left_column;
  Tensor right;  // the right singular vectors as columns, row-major
};

// The SVD of square float32 matrices a (batch, n, n), row-major, that the caller has multiplied by `scales` (batch);
// the values are divided by them. A = X H with the polar factor X has the eigenvectors V of H = Xᵀ A as right singular
// vectors, and X V as left ones (Higham and Papadimitriou 1994; Nakatsukasa and Higham 2013). A QR decomposition makes
// orthonormal what belongs to singular values below about eps |A|, where X need not have converged. The errors of
// values, and of A = U S Vᵀ, are small beside the largest value, also for small ones. All results of a matrix with a
// NaN or an infinity are NaN. It overwrites a.
void svd_polar(const Tensor& a, int64_t batch, int64_t n, const Tensor& scales, bool compute_uv,
               const PolarResults& results);

}  // namespace metalcore
