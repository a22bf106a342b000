// The LU factorization, for the ops that use it.
#pragma once

#include "../../../kernels/linalg/lu.h"
#include "../common/common.h"
#include "lu_plan.h"
#include "matrices.h"

#include <optional>

namespace metalcore {

// The factors of a batch of m x n matrices A = P L U. `lu` holds L (without its ones) and U, `pivots` are LAPACK's
// (1-based, int32), and `info` is 0 or the 1-based index of the first zero on U's diagonal. Row i of L U is row
// permutation[i] of A; `permutation` exists only if the caller asked for it.
struct LuFactors {
  Tensor lu, pivots, info;
  MaybeTensor permutation;
};
LuFactors lu_factors(const Tensor& a, bool pivoting, bool with_permutation);

// What one dispatch does when a thread, a simdgroup or a threadgroup takes each matrix. It also solves A X = B where X
// is given, except in a threadgroup. Without `factors` it writes only info and X. With `given` other than LU_MATRIX,
// `a` holds factors, and it writes only X.
struct LuSmall {
  const Matrices& a;
  const Matrices* b;  // nullptr: the identity
  const Tensor* x;    // nullptr: nothing to solve
  int64_t b_columns, x_row, x_column;
  bool pivoting, factors;
  uint32_t given = LU_MATRIX;
};
// plan.variant must be thread, simd or block.
void lu_small(const LuPlan& plan, const LuSmall& task, const LuFactors& results);

// Puts the rows of B in the order of the factorization, or with `transpose` back in their own. Row-major.
Tensor lu_permute(const Tensor& b, const Tensor& permutation, bool transpose);
Tensor lu_permuted_identity(const Tensor& like, const Tensor& permutation);
Tensor lu_permutation(const Tensor& pivots, int64_t rows);

// These return X with A X = B (B nullptr: the identity), or Aᵀ X = B, for A's factors. Factors and B have one batch,
// and X is row-major.
Tensor lu_solve_factored(const Tensor& lu, const Tensor& permutation, const Tensor* b);
Tensor lu_solve_transposed(const Tensor& lu, const Tensor& permutation, const Tensor& b);

}  // namespace metalcore
