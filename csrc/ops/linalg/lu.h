// The LU factorization, for the ops that are made of it.
#pragma once

#include "../../../kernels/linalg/lu.h"
#include "../common.h"
#include "lu_plan.h"
#include "matrices.h"

#include <optional>

namespace metalcore {

// A = P L U of a batch of m x n matrices: L (without its ones) and U in one matrix, LAPACK's 1-based pivots (int32),
// and for each matrix 0 or the 1-based index of the first zero on U's diagonal. Row i of L U is row permutation[i] of
// A; not computed (and without storage) unless it was asked for.
struct LuFactors {
  Tensor lu, pivots, info;
  std::optional<Tensor> permutation;
};
LuFactors lu_factors(const Tensor& a, bool pivoting, bool with_permutation);

// A thread, a simdgroup or a threadgroup a matrix: plan.variant must say so. With B and X also A X = B, but not by a
// threadgroup; without factors nothing but info and X is written. Where factors are given, `a` has them, and X is all
// that is written.
struct LuSmall {
  const Matrices& a;
  const Matrices* b;  // nullptr: the identity
  const Tensor* x;
  int64_t right, x_row, x_column;
  bool pivoting, factors;
  uint32_t given = LU_MATRIX;
};
void lu_small(const LuPlan& plan, const LuSmall& of, const LuFactors& results);

// Rows of B in the order of the factorization, or with `transpose` back from it; row-major.
Tensor lu_permute(const Tensor& b, const Tensor& permutation, bool transpose);
Tensor lu_permuted_identity(const Tensor& like, const Tensor& permutation);
Tensor lu_permutation(const Tensor& pivots, int64_t rows);

// X with A X = B, of factors with one batch, for B nullptr of the identity; or Aᵀ X = B. Row-major.
Tensor lu_solve_factored(const Tensor& lu, const Tensor& permutation, const Tensor* b);
Tensor lu_solve_transposed(const Tensor& lu, const Tensor& permutation, const Tensor& b);

}  // namespace metalcore
