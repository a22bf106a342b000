// explain() for the LU family: the plan's kernels, and of the blocked variant's many dispatches the first of each
// kernel.
#include "lu.h"

#include "../plan.h"

#include <algorithm>
#include <functional>
#include <numeric>

namespace metalcore {
namespace {

void blocked_steps(Explanation& e, int64_t m, int64_t n, int64_t batch) {
  const LuPanel panel = lu_panel(grid_side(m));
  const int64_t width = std::min<int64_t>({panel.width, m, n});
  auto tiles = [](int64_t size, int64_t tile) { return ceil_div(std::max<int64_t>(size, 1), tile); };
  e.steps.push_back({panel.kernel, {grid_side(batch)}, {panel.threads}});
  e.steps.push_back({"lu_rows", {grid_side(batch * tiles(n - width, LU_ROWS_THREADS))}, {LU_ROWS_THREADS}});
  if (width < std::min(m, n))
    e.steps.push_back({"lu_update",
                       {grid_side(batch * tiles(m - width, LU_UPDATE_TILE) * tiles(n - width, LU_UPDATE_TILE))},
                       {LU_UPDATE_TILE * LU_UPDATE_TILE / 16}});
}

// `right` columns of B (0: none); without B's columns going along with the factorization they are solved for
// afterwards.
Explanation explain_plan(const LuPlan& plan, const MatrixShape& s, int64_t right, bool factored) {
  Explanation e{name_of(plan.variant), plan.why, {}};
  const int64_t tiles = plan.tile > 0 ? ceil_div<int64_t>(right, plan.tile) : 1;
  switch (plan.variant) {
    case LuVariant::empty:
    case LuVariant::torch: break;
    case LuVariant::thread:
    case LuVariant::simd:
    case LuVariant::block:
      e.steps.push_back({plan.kernel, {grid_side(ceil_div<int64_t>(s.batch * tiles, plan.matrices))}, {plan.threads}});
      break;
    case LuVariant::blocked:
      if (!factored) blocked_steps(e, s.rows, s.columns, s.batch);
      break;
  }
  const bool by_us = plan.variant == LuVariant::block || plan.variant == LuVariant::blocked;
  if (by_us && right > 0) e.variant += ", triangular";
  return e;
}

const std::vector<int64_t>& first_shape(const Request& request, const char* op) {
  check(!request.shapes.empty(), "linalg.", op, ": explain needs the shape of A");
  return request.shapes[0];
}

MatrixShape square_shape(const Request& request, const char* op) { return check_square(op, first_shape(request, op)); }

Explanation explain_factor(const Request& request) {
  const MatrixShape s = check_matrices("lu_factor", first_shape(request, "lu_factor"));
  return explain_plan(plan_lu(s.rows, s.columns, s.batch, 0, gpu::tuning(request.device_type)), s, 0, false);
}

Explanation explain_determinant(const Request& request) {
  const MatrixShape s = square_shape(request, "det");
  Explanation e = explain_plan(plan_lu(s.rows, s.columns, s.batch, 0, gpu::tuning(request.device_type)), s, 0, false);
  if (s.batch > 0) e.steps.push_back({"lu_determinant", {grid_side(ceil_div<int64_t>(s.batch, 4))}, {128}});
  return e;
}

Explanation explain_inverse(const Request& request) {
  const MatrixShape s = square_shape(request, "inv");
  const LuPlan plan = plan_lu(s.rows, s.rows, s.batch, s.rows, gpu::tuning(request.device_type));
  return explain_plan(plan, s, s.rows, false);
}

int64_t broadcast_batch(const std::vector<int64_t>& a, const std::vector<int64_t>& b) {
  const std::vector<int64_t> sizes = broadcast_batches(a, b);
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
}

// Of B's batch: PyTorch's rule of which B are vectors.
Explanation explain_solve(const Request& request) {
  MatrixShape s = square_shape(request, "solve");
  check(request.shapes.size() == 2, "linalg.solve: explain needs the shapes of A and B");
  const std::vector<int64_t>& a = request.shapes[0];
  std::vector<int64_t> b = request.shapes[1];
  if (b.size() == 1 || (b.size() + 1 == a.size() && std::equal(b.begin(), b.end(), a.begin()))) b.push_back(1);
  const bool left = request.option("left", "True") == "True";
  check(b.size() >= 2 && b[b.size() - (left ? 2 : 1)] == s.rows, "linalg.solve: Incompatible shapes of A and B");
  const MatrixShape of_b = matrix_shape(b);
  s.batch = broadcast_batch(a, b);
  const int64_t right = left ? of_b.columns : of_b.rows;
  return explain_plan(plan_lu(s.rows, s.rows, s.batch, right, gpu::tuning(request.device_type)), s, right, false);
}

// explain("lu_solve", LU's shape, pivots' shape, B's shape).
Explanation explain_lu_solve(const Request& request) {
  MatrixShape s = square_shape(request, "lu_solve");
  check(request.shapes.size() == 3 && request.shapes[2].size() >= 2,
        "linalg.lu_solve: explain needs the shapes of LU, pivots and B");
  const MatrixShape of_b = matrix_shape(request.shapes[2]);
  s.batch = broadcast_batch(request.shapes[0], request.shapes[2]);
  const int64_t right = request.option("left", "True") == "True" ? of_b.columns : of_b.rows;
  return explain_plan(plan_lu(s.rows, s.rows, s.batch, right, gpu::tuning(request.device_type), true), s, right, true);
}

const ExplainOp explain_ops[] = {{"lu_factor", explain_factor},    {"lu_factor_ex", explain_factor},
                                 {"lu", explain_factor},           {"det", explain_determinant},
                                 {"slogdet", explain_determinant}, {"inv", explain_inverse},
                                 {"inv_ex", explain_inverse},      {"solve", explain_solve},
                                 {"solve_ex", explain_solve},      {"lu_solve", explain_lu_solve}};

}  // namespace
}  // namespace metalcore
