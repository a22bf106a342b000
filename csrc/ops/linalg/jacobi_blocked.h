// Blocked one-sided Jacobi: the SVD and the eigendecomposition of matrices that are larger than a threadgroup holds.
//
// Columns in blocks of 16; a round makes the 32 columns of each pair of blocks orthogonal, by the eigenvectors of their
// 32 x 32 Gram matrix (Hari 2005; Bečka, Okša and Vajteršic 2002), all pairs and matrices of the batch in parallel.
// Sweeps over all pairs end on the device, for each matrix where none of its columns were found to be less than
// orthogonal.
#pragma once

#include "../../gpu/tuning.h"
#include "../common.h"

#include <cstdint>
#include <vector>

namespace metalcore {

// How a call runs: `splits` threadgroups for each of `pairs` pairs of a matrix's blocks, in `rounds` rounds a sweep, on
// `padded` columns of `length`, of which `gram_rows` are the matrix's and the others V's, if V is accumulated.
struct JacobiBlockedPlan {
  uint32_t padded, gram_rows, length, pairs, rounds, sweeps, splits;
};
JacobiBlockedPlan plan_jacobi_blocked(int64_t columns, int64_t rows, int64_t batch, bool accumulate, const Tensor& on);

// The SVD X = U diag(values) Vᵀ of matrices with n columns and m >= n rows, n and m up to 65535, given and written by
// columns: float32, contiguous, x (batch, n, m) with row j column j of the matrix.
//   values  (batch, n), descending
//   u       (batch, n, m), row j the j-th left singular vector; orthonormal also where values are zero
//   v       (batch, n, n), row j the j-th right singular vector
// Entry i of a left singular vector is written at order[i]; order is (batch, m), int32. u, v and order are not looked
// at unless `vectors`.
// scales (batch), float32, says what x has been multiplied by, which is taken out of the values.
// Fewest sweeps for x = R, row-major, of the QR factorization of a matrix with its columns in descending order of norm
// (so the matrix factored here is Rᵀ); small singular values are then as accurate as the grading of R's rows allows.
// Of a matrix with a NaN or an infinity all results are NaN.
void svd_jacobi_blocked(const Tensor& x, int64_t batch, bool vectors, const Tensor& order, const Tensor& scales,
                        const Tensor& values, const Tensor& u, const Tensor& v);

// Writes the eigenvalues (batch, n), ascending, and eigenvectors u (batch, n, n), as columns, row-major, of symmetric
// matrices a (batch, n, n), float32, contiguous, of which only the triangle `upper` names is read. u is not looked at
// unless vectors are wanted. One-sided Jacobi of A + s I, with s so large that it is well conditioned; eigenvalues are
// Rayleigh quotients.
void eigh_jacobi_blocked(const Tensor& a, int64_t batch, bool upper, bool vectors, const Tensor& values,
                         const Tensor& u);

}  // namespace metalcore
