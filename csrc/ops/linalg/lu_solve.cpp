// solve_ex(A, B, left, factors) -> (X, LU, pivots, info), inv_ex(A) -> (inverse, info) and
// lu_solve(LU, pivots, B, left, adjoint) -> X, of float32 matrices of any strides; row-major results.
#include "lu.h"

#include "triangular.h"

#include <algorithm>
#include <tuple>
#include <vector>

namespace metalcore {

namespace {

// One batch for A and B: the Python functions broadcast.
void check_right(const char* op, const Tensor& a, const Tensor& b, bool left) {
  check_float32(op, "B", b);
  check_same_device(op, "B", b, a);
  check(b.dim() == a.dim() && std::equal(a.sizes().begin(), a.sizes().end() - 2, b.sizes().begin()), "metalcore::", op,
        ": B must have the batch of A, whose shape is ", shape_text(a), ", not shape ", shape_text(b));
  check(b.size(left ? -2 : -1) == a.size(-1), "metalcore::", op, ": Incompatible shapes of A and B for the equation ",
        left ? "AX = B" : "XA = B", " (", shape_text(a), " and ", shape_text(b), ")");
}

Tensor empty_of(const Tensor& like, ScalarType dtype) { return new_tensor({0}, dtype, like); }

// A X = B: where a tile of B goes along with the factorization by that, else with the factors. B nullptr stands for the
// identity; `transpose` for Aᵀ Xᵀ = Bᵀ, where A, B and X are given as they are stored.
struct Solved {
  Tensor x;
  LuFactors factors;
};
Solved solve(const LuPlan& plan, const Tensor& a, const Tensor* b, bool transpose, bool with_factors) {
  const MatrixShape s = matrix_shape(a.sizes());
  const Tensor x = new_tensor(b ? b->sizes() : a.sizes(), ScalarType::Float, a);
  const int64_t right = !b ? s.rows : b->size(transpose ? -2 : -1);
  const Tensor a_taken = transpose ? transposed(a) : a;
  const bool together = plan.tile > 0 && x.numel() > 0;
  if (together) {
    LuFactors factors{
        with_factors ? new_tensor(a.sizes(), ScalarType::Float, a) : empty_of(a, ScalarType::Float),
        with_factors ? new_tensor(batch_sizes(a, {s.rows}), ScalarType::Int, a) : empty_of(a, ScalarType::Int),
        new_tensor(batch_sizes(a, {}), ScalarType::Int, a), std::nullopt};
    const Matrices on_left = matrices(a_taken);
    std::optional<Matrices> on_right;
    if (b) on_right = matrices(transpose ? transposed(*b) : *b);
    lu_small(plan,
             {on_left, on_right ? &*on_right : nullptr, &x, right, transpose ? 1 : right, transpose ? s.rows : 1, true,
              with_factors},
             factors);
    return {x, factors};
  }
  LuFactors factors = lu_factors(a_taken, true, true);
  if (x.numel() == 0) return {x, factors};
  const Tensor b_taken = b && transpose ? transposed(*b) : b ? *b : a;
  const Tensor found = lu_solve_factored(factors.lu, *factors.permutation, b ? &b_taken : nullptr);
  return {transpose ? torch::stable::contiguous(transposed(found)) : found, factors};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> solve_ex(const Tensor& a, const Tensor& b, bool left, bool with_factors) {
  const MatrixShape s = check_square("solve", a);
  check_right("solve", a, b, left);
  const int64_t right = b.size(left ? -1 : -2);
  const LuPlan plan = plan_lu(s.rows, s.rows, s.batch, right, lu_tuning(a));
  gpu::note_plan("solve", name_of(plan.variant), [&] { return plan.why; });
  if (plan.variant == LuVariant::torch) {
    if (with_factors) {  // which _linalg_solve_ex has of A or Aᵀ, depending on strides
      auto [lu, pivots, info] = call_torch<3>("aten::linalg_lu_factor_ex", "", left ? a : transposed(a), true, false);
      auto [x] = call_torch<1>("aten::linalg_lu_solve", "", lu, pivots, b, left, !left);
      return {as_contiguous(x), as_contiguous(lu), pivots, info};
    }
    auto [x, lu, pivots, info] = call_torch<4>("aten::_linalg_solve_ex", "", a, b, left, false);
    return {as_contiguous(x), empty_of(a, ScalarType::Float), empty_of(a, ScalarType::Int), info};
  }
  Solved found = solve(plan, a, &b, !left, with_factors);
  if (!with_factors) return {found.x, empty_of(a, ScalarType::Float), empty_of(a, ScalarType::Int), found.factors.info};
  return {found.x, found.factors.lu, found.factors.pivots, found.factors.info};
}

std::tuple<Tensor, Tensor> inv_ex(const Tensor& a) {
  const MatrixShape s = check_square("inv", a);
  const LuPlan plan = plan_lu(s.rows, s.rows, s.batch, s.rows, lu_tuning(a));
  gpu::note_plan("inv", name_of(plan.variant), [&] { return plan.why; });
  if (plan.variant == LuVariant::torch) {
    auto [inverse, info] = call_torch<2>("aten::linalg_inv_ex", "", a, false);
    return {as_contiguous(inverse), info};
  }
  Solved found = solve(plan, a, nullptr, false, false);
  return {found.x, found.factors.info};
}

Tensor lu_solve(const Tensor& lu, const Tensor& pivots, const Tensor& b, bool left, bool adjoint) {
  const MatrixShape s = check_square("lu_solve", lu);
  check_right("lu_solve", lu, b, left);
  check(pivots.scalar_type() == ScalarType::Int,
        "linalg.lu_solve: pivots should be a Tensor of scalar type torch.int32");
  check_same_device("lu_solve", "pivots", pivots, lu);
  check(pivots.dim() == lu.dim() - 1 && std::equal(pivots.sizes().begin(), pivots.sizes().end(), lu.sizes().begin()),
        "linalg.lu_solve: Expected LU.shape[:-1] and pivots.shape to be the same, but got pivots with shape ",
        shape_text(pivots), " instead");
  if (b.numel() == 0) return new_tensor(b.sizes(), ScalarType::Float, b);
  // X A = B is Aᵀ Xᵀ = Bᵀ, and the factors of A transposed give the solution of Aᵀ X = B.
  const bool transpose = adjoint == left;
  const int64_t right = b.size(left ? -1 : -2);
  const LuPlan plan = plan_lu(s.rows, s.rows, s.batch, right, lu_tuning(b), true);
  gpu::note_plan("lu_solve", name_of(plan.variant), [&] { return plan.why; });
  if (plan.variant == LuVariant::torch)
    return as_contiguous(call_torch<1>("aten::linalg_lu_solve", "", lu, pivots, b, left, adjoint)[0]);
  if (plan.tile > 0) {
    const Tensor x = new_tensor(b.sizes(), ScalarType::Float, b), packed = as_contiguous(pivots);
    const Matrices factors = matrices(transpose ? transposed(lu) : lu), on_right = matrices(left ? b : transposed(b));
    lu_small(plan,
             {factors, &on_right, &x, right, left ? right : 1, left ? 1 : s.rows, false, false,
              uint32_t(transpose ? LU_ADJOINT : LU_FACTORED)},
             {packed, packed, packed, std::nullopt});
    return x;
  }
  const Tensor permutation = lu_permutation(pivots, s.rows);
  const Tensor b_taken = left ? b : transposed(b);
  const Tensor x =
      transpose ? lu_solve_transposed(lu, permutation, b_taken) : lu_solve_factored(lu, permutation, &b_taken);
  return left ? x : torch::stable::contiguous(transposed(x));
}

}  // namespace

Tensor lu_solve_factored(const Tensor& lu, const Tensor& permutation, const Tensor* b) {
  const Tensor permuted = b ? lu_permute(*b, permutation, false) : lu_permuted_identity(lu, permutation);
  return solve_triangular(lu, solve_triangular(lu, permuted, false, true, true), true, true, false);
}

Tensor lu_solve_transposed(const Tensor& lu, const Tensor& permutation, const Tensor& b) {
  const Tensor of_u = solve_triangular(transposed(lu), b, false, true, false);
  return lu_permute(solve_triangular(transposed(lu), of_u, true, true, true), permutation, true);
}

}  // namespace metalcore

STABLE_TORCH_LIBRARY_FRAGMENT(metalcore, m) {
  m.def("solve_ex(Tensor A, Tensor B, bool left, bool factors) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def("inv_ex(Tensor A) -> (Tensor, Tensor)");
  m.def("lu_solve(Tensor LU, Tensor pivots, Tensor B, bool left, bool adjoint) -> Tensor");
}

METALCORE_KERNELS(m) {
  m.impl("solve_ex", TORCH_BOX(&metalcore::solve_ex));
  m.impl("inv_ex", TORCH_BOX(&metalcore::inv_ex));
  m.impl("lu_solve", TORCH_BOX(&metalcore::lu_solve));
}
