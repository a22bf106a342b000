// How SVD and symmetric eigendecomposition run: the kernels of kernels/linalg/{svd,eigh}_jacobi.metal. For matrices
// that are larger than a threadgroup holds, svd has the blocked variant, and eigh tridiagonal form (tridiagonalize.h).
#pragma once

#include "../../gpu/limits.h"
#include "../../gpu/tuning.h"
#include "../common/common.h"
#include "cpu_route.h"

#include <cstdint>
#include <string>
#include <tuple>

namespace metalcore {

enum class JacobiVariant { empty, simd, block, blocked, tridiagonal, polar, torch, cpu };

const char* name_of(JacobiVariant variant);

struct JacobiTuning {
  const char* family;
  uint32_t sweeps = 24;          // the most sweeps of the blocked variant: fewer may leave a result inexact
  bool few_registers = false;    // whether kernels whose threads hold less take the place of others
  uint32_t wide_columns = 3072;  // the blocked variant's blocks are wide from so many columns on
  // From so many columns on, one number more than kernels take, svd is by the polar decomposition (svd_polar.h).
  uint32_t polar_columns = 1 << 16;
  TorchRegions eigh_torch = {};
  TorchRegions svd_torch = {};  // the size is the smaller of rows and columns, here and in what follows
  // jacobi_plan.cpp derives these estimates.
  TorchRegions svd_cpu = {}, eigh_cpu = {};
};
extern const gpu::Table<JacobiTuning> jacobi_tuning;

struct JacobiPlan {
  JacobiVariant variant;
  bool after_qr;  // svd: the matrix is R of a QR decomposition
  std::string why;
  std::string kernel;
  uint32_t matrices_per_threadgroup, threads;
  bool only_left = false;  // svd: the kernel makes left singular vectors, and no right ones
};

// The arithmetic of a small m x n matrix's sweeps, of which 15 are more than are usual: for each pair of columns, dot
// products, and the rotation of the columns and of the vectors.
inline double jacobi_flops(int64_t m, int64_t n) {
  return 15.0 * static_cast<double>(n * n) / 2 * static_cast<double>(12 * m + 6 * n);
}

// The plans for `batch` m x n or n x n matrices.
JacobiPlan plan_svd(int64_t m, int64_t n, int64_t batch, bool full_matrices, bool compute_uv, bool is_complex,
                    const JacobiTuning& tuning);
JacobiPlan plan_eigh(int64_t n, int64_t batch, bool compute_v, bool is_complex, const JacobiTuning& tuning);
// The plan for complex matrices that are too large for all kernels.
JacobiPlan too_large_plan(const std::string& size);

// The operator metalcore::eigh returns (L, V).
std::tuple<Tensor, Tensor> eigh(const Tensor& input, const std::string& uplo, bool compute_v);

// ---------------------------------------------------------------- blocked one-sided Jacobi

// A block has 16 columns, or a wide one 64 (kernels/linalg/jacobi_wide.metal). A round makes the 32 columns of each
// pair of blocks orthogonal, with the eigenvectors of their 32 x 32 Gram matrix (Hari 2005; Bečka, Okša and Vajteršic
// 2002). All pairs and all matrices of the batch run in parallel. The device ends the sweeps over all pairs, for each
// matrix alone, after a sweep that found all columns orthogonal.

// How a call runs. A sweep has `rounds` rounds, and a round has `splits` threadgroups for each of a matrix's `pairs`
// pairs of blocks. There are `padded` columns of `length` elements: `gram_rows` belong to the matrix, and the others to
// V, if V is accumulated.
struct JacobiBlockedPlan {
  uint32_t padded, gram_rows, length, pairs, rounds, sweeps, splits;
  bool wide;
};
JacobiBlockedPlan plan_jacobi_blocked(int64_t columns, int64_t rows, int64_t batch, bool accumulate,
                                      const Tensor& like);

// The SVD X = U diag(values) Vᵀ of matrices with n columns and m >= n rows, n and m up to 65535, given and written by
// columns: float32, contiguous, x (batch, n, m) with row j column j of the matrix.
//   values  (batch, n), descending
//   u       (batch, n, m), row j the j-th left singular vector; orthonormal also where values are zero
//   v       (batch, n, n), row j the j-th right singular vector
// Entry i of a left singular vector is written at order[i]; order is (batch, m), int32. Without `compute_uv` the
// kernels do not read or write u, v and order. The caller has multiplied x by scales (batch), float32, and the values
// are divided by them. Sweeps are fewest where x is the row-major R of a QR factorization of a matrix with columns in
// descending order of norm, so that the matrix factored here is Rᵀ. Small singular values are then as accurate as the
// grading of R's rows allows. All results of a matrix with a NaN or an infinity are NaN.
void svd_jacobi_blocked(const Tensor& x, int64_t batch, bool compute_uv, const Tensor& order, const Tensor& scales,
                        const Tensor& values, const Tensor& u, const Tensor& v);

}  // namespace metalcore
