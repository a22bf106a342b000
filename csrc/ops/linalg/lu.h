// The LU factorization: its plan, and what the ops that use it call.
#pragma once

#include "../../../kernels/linalg/lu.h"
#include "../../gpu/limits.h"
#include "../../gpu/tuning.h"
#include "../common/common.h"
#include "cpu_route.h"
#include "matrices.h"

#include <cstdint>
#include <string>

namespace metalcore {

// How an LU factorization runs, alone or with the solution of A X = B: the kernels of kernels/linalg/lu_*.metal.
enum class LuVariant { empty, thread, simd, block, blocked, torch, cpu };

const char* name_of(LuVariant variant);

struct LuTuning {
  const char* family;
  // A threadgroup of up to so many threads factors a matrix in registers.
  uint32_t block_threads = 1024;
  // The blocked variant's panels form blocks of so many columns.
  uint32_t blocked_columns = 128;
  // Factorizations, and systems whose factors are given.
  TorchRegions torch = {}, solve_torch = {};
  TorchRegions cpu = {}, solve_cpu = {};
};
extern const gpu::Table<LuTuning> lu_tuning;

struct LuPlan {
  LuVariant variant;
  std::string why;
  std::string kernel;    // variants thread, simd and block
  uint32_t matrices;     // matrices per threadgroup
  uint32_t threads;      // threads of a threadgroup
  uint32_t row_threads;  // block: the threads that share a column
  uint32_t tile;         // columns of B that the kernel also solves; 0: two triangular systems follow
};

// The plan for `batch` m x n matrices and a B with `b_columns` columns (0: only the factorization). For matrices that
// are already `factored`, b_columns is not 0, and variant blocked means two triangular systems.
LuPlan plan_lu(int64_t m, int64_t n, int64_t batch, int64_t b_columns, bool is_complex, const LuTuning& tuning,
               bool factored = false);

// The kernel for a panel of the blocked variant with `rows` rows.
struct LuPanel {
  const char* kernel;
  uint32_t threads;
};
LuPanel lu_panel(uint32_t rows);

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
