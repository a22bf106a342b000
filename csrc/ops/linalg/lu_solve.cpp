// solve_ex(A, B, left, factors) -> (X, LU, pivots, info), inv_ex(A) -> (inverse, info) and
// lu_solve(LU, pivots, B, left, adjoint) -> X, for matrices of any strides, float32 or complex64. Results are
// row-major.
//
// det(A) -> (value, LU, pivots) and slogdet(A) -> (sign, logabsdet, LU, pivots): the product of U's diagonal, with
// a change of sign for each exchange of rows. The determinant of a 0 x 0 matrix is 1.
#include "cpu_route.h"
#include "lu.h"
#include "matrices.h"

#include <algorithm>
#include <tuple>

namespace metalcore {

namespace {

// A and B must have one batch: the Python functions broadcast.
void check_b(const char* op, const Tensor& a, const Tensor& b, bool left) {
  check_same_dtype(op, "B", b, a);
  check_same_device(op, "B", b, a);
  check(b.dim() == a.dim() && std::equal(a.sizes().begin(), a.sizes().end() - 2, b.sizes().begin()), "metalcore::", op,
        ": B must have the batch of A, whose shape is ", shape_text(a), ", not shape ", shape_text(b));
  check(b.size(left ? -2 : -1) == a.size(-1), "metalcore::", op, ": Incompatible shapes of A and B for the equation ",
        left ? "AX = B" : "XA = B", " (", shape_text(a), " and ", shape_text(b), ")");
}

Tensor conjugated(const Tensor& a) { return call_torch<1>("aten::conj_physical", "", a)[0]; }

Tensor empty_of(const Tensor& like, ScalarType dtype) { return new_tensor({0}, dtype, like); }

// Solves A X = B, or with `transpose` Aᵀ Xᵀ = Bᵀ, where A, B and X are stored without the transposition. B nullptr is
// the identity. The factorization's kernel solves for tiles of B where the plan has them; elsewhere two triangular
// systems follow.
struct Solved {
  Tensor x;
  LuFactors factors;
};
Solved solve(const LuPlan& plan, const Tensor& a, const Tensor* b, bool transpose, bool with_factors) {
  const MatrixShape s = matrix_shape(a.sizes());
  const Tensor x = new_like(b ? *b : a);
  const int64_t b_columns = !b ? s.rows : b->size(transpose ? -2 : -1);
  const Tensor left_matrix = transpose ? transposed(a) : a;
  if (plan.tile > 0 && x.numel() > 0) {
    LuFactors factors{
        with_factors ? new_like(a) : empty_of(a, a.scalar_type()),
        with_factors ? new_tensor(batch_sizes(a, {s.rows}), ScalarType::Int, a) : empty_of(a, ScalarType::Int),
        new_tensor(batch_sizes(a, {}), ScalarType::Int, a), std::nullopt};
    const Matrices a_matrices = matrices(left_matrix);
    std::optional<Matrices> b_matrices;
    if (b) b_matrices = matrices(transpose ? transposed(*b) : *b);
    lu_small(plan,
             {a_matrices, b_matrices ? &*b_matrices : nullptr, &x, b_columns, transpose ? 1 : b_columns,
              transpose ? s.rows : 1, true, with_factors},
             factors);
    return {x, factors};
  }
  LuFactors factors = lu_factors(left_matrix, true, true);
  if (x.numel() == 0) return {x, factors};
  const Tensor right_matrix = b && transpose ? transposed(*b) : b ? *b : a;
  const Tensor solution = lu_solve_factored(factors.lu, *factors.permutation, b ? &right_matrix : nullptr);
  return {transpose ? torch::stable::contiguous(transposed(solution)) : solution, factors};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> solve_ex(const Tensor& a, const Tensor& b, bool left, bool with_factors) {
  const MatrixShape s = check_square_of_numbers("solve", a);
  check_b("solve", a, b, left);
  const int64_t b_columns = b.size(left ? -1 : -2);
  const LuPlan plan = plan_lu(s.rows, s.rows, s.batch, b_columns, is_complex(a), lu_tuning(a));
  gpu::note_plan("solve", name_of(plan.variant), [&] { return plan.why; });
  if (is_left(plan.variant)) {
    if (with_factors) {  // _linalg_solve_ex factors A or Aᵀ, as the strides have it
      const Tensor left_matrix = left ? a : transposed(a);
      auto [lu, pivots, info] = call_left<3>(plan.variant, "aten::linalg_lu_factor_ex", left_matrix, true, false);
      // X A = B by the factors of Aᵀ: Aᵀ is (A*)ᴴ, and X* A* = B*.
      const bool conjugates = !left && is_complex(a);
      auto [x] =
          call_left<1>(plan.variant, "aten::linalg_lu_solve", lu, pivots, conjugates ? conjugated(b) : b, left, !left);
      return {as_contiguous(conjugates ? conjugated(x) : x), as_contiguous(lu), pivots, info};
    }
    auto [x, lu, pivots, info] = call_left<4>(plan.variant, "aten::_linalg_solve_ex", a, b, left, false);
    return {as_contiguous(x), empty_of(a, a.scalar_type()), empty_of(a, ScalarType::Int), info};
  }
  Solved solved = solve(plan, a, &b, !left, with_factors);
  if (!with_factors) return {solved.x, empty_of(a, a.scalar_type()), empty_of(a, ScalarType::Int), solved.factors.info};
  return {solved.x, solved.factors.lu, solved.factors.pivots, solved.factors.info};
}

std::tuple<Tensor, Tensor> inv_ex(const Tensor& a) {
  const MatrixShape s = check_square_of_numbers("inv", a);
  const LuPlan plan = plan_lu(s.rows, s.rows, s.batch, s.rows, is_complex(a), lu_tuning(a));
  gpu::note_plan("inv", name_of(plan.variant), [&] { return plan.why; });
  if (is_left(plan.variant)) {
    auto [inverse, info] = call_left<2>(plan.variant, "aten::linalg_inv_ex", a, false);
    return {as_contiguous(inverse), info};
  }
  Solved solved = solve(plan, a, nullptr, false, false);
  return {solved.x, solved.factors.info};
}

Tensor lu_solve(const Tensor& lu, const Tensor& pivots, const Tensor& given, bool left, bool adjoint) {
  const MatrixShape s = check_square_of_numbers("lu_solve", lu);
  check_b("lu_solve", lu, given, left);
  check(pivots.scalar_type() == ScalarType::Int,
        "linalg.lu_solve: pivots should be a Tensor of scalar type torch.int32");
  check_same_device("lu_solve", "pivots", pivots, lu);
  check(pivots.dim() == lu.dim() - 1 && std::equal(pivots.sizes().begin(), pivots.sizes().end(), lu.sizes().begin()),
        "linalg.lu_solve: Expected LU.shape[:-1] and pivots.shape to be the same, but got pivots with shape ",
        shape_text(pivots), " instead");
  if (given.numel() == 0) return new_like(given);
  // X A = B is Aᵀ Xᵀ = Bᵀ, and the transposed factors of A solve a system with Aᵀ.
  const bool transpose = adjoint == left;
  const int64_t b_columns = given.size(left ? -1 : -2);
  const LuPlan plan = plan_lu(s.rows, s.rows, s.batch, b_columns, is_complex(lu), lu_tuning(lu), true);
  gpu::note_plan("lu_solve", name_of(plan.variant), [&] { return plan.why; });
  if (is_left(plan.variant))
    return as_contiguous(call_left<1>(plan.variant, "aten::linalg_lu_solve", lu, pivots, given, left, adjoint)[0]);
  // A complex Aᴴ X = B is Aᵀ X* = B*.
  const bool conjugates = adjoint && is_complex(lu);
  const Tensor b = conjugates ? conjugated(given) : given;
  if (plan.tile > 0) {
    const Tensor x = new_like(b), packed = as_contiguous(pivots);
    const Matrices factors = matrices(transpose ? transposed(lu) : lu), b_matrices = matrices(left ? b : transposed(b));
    lu_small(plan,
             {factors, &b_matrices, &x, b_columns, left ? b_columns : 1, left ? 1 : s.rows, false, false,
              uint32_t(transpose ? LU_ADJOINT : LU_FACTORED)},
             {packed, packed, packed, std::nullopt});
    return conjugates ? conjugated(x) : x;
  }
  const Tensor permutation = lu_permutation(pivots, s.rows);
  const Tensor right_matrix = left ? b : transposed(b);
  const Tensor found = transpose ? lu_solve_transposed(lu, permutation, right_matrix)
                                 : lu_solve_factored(lu, permutation, &right_matrix);
  const Tensor x = left ? found : torch::stable::contiguous(transposed(found));
  return conjugates ? conjugated(x) : x;
}

}  // namespace

Tensor lu_solve_factored(const Tensor& lu, const Tensor& permutation, const Tensor* b) {
  const Tensor permuted = b ? lu_permute(*b, permutation, false) : lu_permuted_identity(lu, permutation);
  return solve_triangular(lu, solve_triangular(lu, permuted, false, true, true), true, true, false);
}

Tensor lu_solve_transposed(const Tensor& lu, const Tensor& permutation, const Tensor& b) {
  const Tensor y = solve_triangular(transposed(lu), b, false, true, false);
  return lu_permute(solve_triangular(transposed(lu), y, true, true, true), permutation, true);
}

namespace {

constexpr uint32_t kSimdgroups = 4;  // per threadgroup of lu_determinant

void determinant(const LuFactors& factors, const MatrixShape& s, const Tensor& value, const MaybeTensor& logarithm) {
  if (s.batch == 0) return;
  gpu::record(value, [&](gpu::Recording& recording) {
    recording.kernel(std::string("lu_determinant") + complex_suffix(value))
        .buffer(0, factors.lu)
        .buffer(1, factors.pivots);
    recording.buffer(2, value);
    recording.buffer(3, logarithm);
    recording.bytes(4, LuResultParams{.rows = grid_side(s.rows),
                                      .columns = grid_side(s.columns),
                                      .pivots = 0,
                                      .matrices = grid_side(s.batch),
                                      .part = 0,
                                      .logarithm = logarithm.has_value()});
    recording.dispatch_threadgroups({grid_side(ceil_div<int64_t>(s.batch, kSimdgroups))},
                                    {kSimdgroups * gpu::kSimdWidth});
  });
}

std::tuple<Tensor, Tensor, Tensor> det(const Tensor& a) {
  const MatrixShape s = check_square_of_numbers("det", a);
  const LuFactors factors = lu_factors(a, true, false);
  const Tensor value = new_tensor(batch_sizes(a, {}), a.scalar_type(), a);
  determinant(factors, s, value, std::nullopt);
  return {value, factors.lu, factors.pivots};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> slogdet(const Tensor& a) {
  const MatrixShape s = check_square_of_numbers("slogdet", a);
  const LuFactors factors = lu_factors(a, true, false);
  const Tensor sign = new_tensor(batch_sizes(a, {}), a.scalar_type(), a);
  const Tensor logarithm = new_tensor(sign.sizes(), ScalarType::Float, a);
  determinant(factors, s, sign, logarithm);
  return {sign, logarithm, factors.lu, factors.pivots};
}

}  // namespace
}  // namespace metalcore

STABLE_TORCH_LIBRARY_FRAGMENT(metalcore, m) {
  m.def("solve_ex(Tensor A, Tensor B, bool left, bool factors) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def("inv_ex(Tensor A) -> (Tensor, Tensor)");
  m.def("lu_solve(Tensor LU, Tensor pivots, Tensor B, bool left, bool adjoint) -> Tensor");
  m.def("det(Tensor A) -> (Tensor, Tensor, Tensor)");
  m.def("slogdet(Tensor A) -> (Tensor, Tensor, Tensor, Tensor)");
}

METALCORE_KERNELS(m) {
  m.impl<&metalcore::solve_ex>("solve_ex");
  m.impl<&metalcore::inv_ex>("inv_ex");
  m.impl<&metalcore::lu_solve>("lu_solve");
  m.impl<&metalcore::det>("det");
  m.impl<&metalcore::slogdet>("slogdet");
}
