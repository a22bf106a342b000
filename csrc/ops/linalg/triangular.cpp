// solve_triangular(A, B, upper, left, unitriangular) -> X, for float32 triangular matrices of any strides.
#include "triangular.h"

#include "../../../kernels/linalg/triangular.h"
#include "../../gpu/cost.h"
#include "cpu_route.h"
#include "matrices.h"
#include "triangular_plan.h"

#include <algorithm>
#include <cstdlib>
#include <utility>
#include <vector>

namespace metalcore {
namespace {

// The shape of X. The errors are PyTorch's.
std::vector<int64_t> check_shapes(const std::vector<int64_t>& a, const std::vector<int64_t>& b, bool left) {
  const MatrixShape A = check_square("solve_triangular", a);
  check(b.size() >= 2, "linalg.solve_triangular: The input tensor B must have at least 2 dimensions.");
  const MatrixShape B = matrix_shape(b);
  check(A.rows == (left ? B.rows : B.columns),
        "linalg.solve_triangular: Incompatible shapes of A and B for the equation ", left ? "AX = B" : "XA = B", " (",
        times(A.rows, A.columns), " and ", times(B.rows, B.columns), ")");
  std::vector<int64_t> sizes = broadcast_batches(b, a);
  sizes.insert(sizes.end(), {B.rows, B.columns});
  return sizes;
}

// The matrices of a tensor, broadcast to the batch of the shape `target`.
Matrices broadcast(const Tensor& tensor, const std::vector<int64_t>& target) {
  const std::vector<int64_t> sizes = sizes_of(tensor);
  std::vector<int64_t> expanded = target;
  expanded[target.size() - 2] = sizes[sizes.size() - 2];
  expanded[target.size() - 1] = sizes[sizes.size() - 1];
  if (sizes == expanded) return matrices(tensor);
  if (matrix_shape(sizes).batch == 1) {
    Matrices one = matrices(tensor);
    one.batch_stride = 0;
    return one;
  }
  return matrices(call_torch<1>("aten::expand", "", tensor, expanded, false)[0]);
}

StridedMatrices strided(int64_t first, int64_t batch, int64_t row, int64_t column) {
  return {first, batch, row, column, std::abs(column) <= std::abs(row)};
}

StridedMatrices transposed(const StridedMatrices& m) { return strided(m.first, m.batch, m.column, m.row); }

// The part of each matrix that begins at (row, column).
StridedMatrices from(const StridedMatrices& m, int64_t row, int64_t column) {
  StridedMatrices part = m;
  part.first += row * m.row + column * m.column;
  return part;
}

// The system that the kernels solve: A is lower triangular and on the left. X A = B becomes Aᵀ Xᵀ = Bᵀ. An upper
// triangle becomes a lower one when its rows and columns are read backwards, and the rows of X and B with them.
struct Problem {
  Tensor a, b, x;
  TriangularParams params;
};

StridedMatrices backwards(StridedMatrices m, int64_t rows, int64_t columns, bool both_dimensions) {
  m.first += (rows - 1) * m.row + (both_dimensions ? (columns - 1) * m.column : 0);
  return strided(m.first, m.batch, -m.row, both_dimensions ? -m.column : m.column);
}

Problem problem_of(const Tensor& a, const Tensor& b, const Tensor& x, bool upper, bool left, bool unitriangular) {
  const std::vector<int64_t> sizes = sizes_of(x);
  const Matrices A = broadcast(a, sizes), B = broadcast(b, sizes), X = matrices(x);
  const int64_t n = A.rows, columns = left ? X.columns : X.rows;
  auto view = [&](const Matrices& m) {
    const StridedMatrices s = strided(0, m.batch_stride, m.row_stride, m.column_stride);
    return left ? s : transposed(s);
  };
  TriangularParams p{.a = view(A),
                     .b = view(B),
                     .x = view(X),
                     .matrices = grid_side(X.batch),
                     .order = grid_side(n),
                     .columns = grid_side(columns),
                     .column_tiles = 1,
                     .unit = unitriangular};
  if (upper == left) {
    p.a = backwards(p.a, n, n, true);
    p.b = backwards(p.b, n, columns, false);
    p.x = backwards(p.x, n, columns, false);
  }
  return {A.tensor, B.tensor, X.tensor, p};
}

void solve(gpu::Recording& recording, const TriangularPlan& plan, const Problem& problem, const Tensor& b,
           TriangularParams params) {
  params.column_tiles = ceil_div(params.columns, plan.columns);
  const double flops = 1.0 * params.order * params.order * params.columns;
  const double bytes = 4.0 * params.order * (params.order * 0.5 * params.column_tiles + 2.0 * params.columns);
  gpu::in_pieces(recording, params.matrices, {flops, bytes}, [&](const gpu::Piece& piece) {
    TriangularParams own = params;
    own.matrices = grid_side(piece.count);
    for (StridedMatrices* m : {&own.a, &own.b, &own.x}) m->first += piece.first * m->batch;
    recording.kernel(plan.kernel).buffer(0, problem.a).buffer(1, b).buffer(2, problem.x).bytes(3, own);
    const int64_t slots = piece.count * params.column_tiles;
    recording.work(piece.work.flops, piece.work.bytes);
    recording.dispatch_threadgroups({grid_side(ceil_div<int64_t>(slots, plan.slots))}, {plan.threads});
  });
}

void update(gpu::Recording& recording, const TriangularPlan& plan, const Problem& problem, const Tensor& b,
            TriangularUpdateParams params) {
  params.row_tiles = ceil_div(params.rows, plan.update_rows);
  params.column_tiles = ceil_div(params.columns, plan.update_columns);
  recording.kernel(plan.update)
      .buffer(0, problem.a)
      .buffer(1, problem.x)
      .buffer(2, b)
      .buffer(3, problem.x)
      .bytes(4, params);
  const double entries = 1.0 * problem.params.matrices * params.rows * params.columns;
  recording.work(2 * entries * params.depth, 8 * entries);
  recording.dispatch_threadgroups(
      {grid_side(int64_t{problem.params.matrices} * params.row_tiles * params.column_tiles)}, {plan.update_threads});
}

// The right-looking variant solves a panel of rows, and then subtracts it from all rows below. The rows are in B for
// the first panel and in X for the others.
void blocked(gpu::Recording& recording, const TriangularPlan& plan, const Problem& problem) {
  const TriangularParams& system = problem.params;
  for (uint32_t first = 0; first < system.order; first += plan.panel) {
    const uint32_t end = std::min(first + plan.panel, system.order);
    const Tensor& b = first == 0 ? problem.b : problem.x;
    const StridedMatrices& rows = first == 0 ? system.b : system.x;
    TriangularParams panel = system;
    panel.a = from(system.a, first, first);
    panel.b = from(rows, first, 0);
    panel.x = from(system.x, first, 0);
    panel.order = end - first;
    solve(recording, plan, problem, b, panel);
    if (end == system.order) break;
    update(recording, plan, problem, b,
           {.a = from(system.a, end, first),
            .solved = transposed(panel.x),
            .b = from(rows, end, 0),
            .x = from(system.x, end, 0),
            .rows = system.order - end,
            .depth = panel.order,
            .columns = system.columns});
  }
}

}  // namespace

Tensor solve_triangular(const Tensor& a, const Tensor& b, bool upper, bool left, bool unitriangular) {
  check_float32("solve_triangular", "A", a);
  check_float32("solve_triangular", "B", b);
  check_same_device("solve_triangular", "B", b, a);
  const std::vector<int64_t> sizes = check_shapes(sizes_of(a), sizes_of(b), left);
  const MatrixShape shape = matrix_shape(sizes);
  const TriangularPlan plan = plan_triangular(left ? shape.rows : shape.columns, left ? shape.columns : shape.rows,
                                              shape.batch, triangular_tuning(a));
  gpu::note_plan("solve_triangular", name_of(plan.variant), [&] { return plan.why; });
  if (is_left(plan.variant))
    return as_contiguous(
        call_left<1>(plan.variant, "aten::linalg_solve_triangular", a, b, upper, left, unitriangular)[0]);
  const Tensor x = new_tensor(sizes, ScalarType::Float, a);
  if (plan.variant == TriangularVariant::empty) return x;
  const Problem problem = problem_of(a, b, x, upper, left, unitriangular);
  gpu::record(x, [&](gpu::Recording& recording) {
    if (plan.variant == TriangularVariant::blocked)
      blocked(recording, plan, problem);
    else
      solve(recording, plan, problem, problem.b, problem.params);
  });
  return x;
}

}  // namespace metalcore

STABLE_TORCH_LIBRARY_FRAGMENT(metalcore, m) {
  m.def("solve_triangular(Tensor A, Tensor B, bool upper, bool left, bool unitriangular) -> Tensor");
}

METALCORE_KERNELS(m) { m.impl<&metalcore::solve_triangular>("solve_triangular"); }
