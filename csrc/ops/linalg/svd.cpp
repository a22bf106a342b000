// svd(A, full_matrices, compute_uv) -> (U, S, Vh): the singular value decomposition of a batch of float32 matrices of any
// strides; row-major results.
#include "../../../kernels/linalg/svd.h"

#include "../plan.h"
#include "jacobi_blocked.h"
#include "jacobi_plan.h"
#include "matrices.h"
#include "qr.h"

#include <algorithm>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

namespace metalcore {
namespace {

using Results = std::tuple<Tensor, Tensor, Tensor>;

struct Shape {
  int64_t m, n, batch;
};

Shape shape_of(const std::vector<int64_t>& sizes) {
  check(sizes.size() >= 2, "linalg.svd: The input tensor A must have at least 2 dimensions.");
  const MatrixShape shape = matrix_shape(sizes);
  return {shape.rows, shape.columns, shape.batch};
}

SvdMatrices contiguous(int64_t rows, int64_t columns) { return {rows * columns, columns, 1}; }
SvdMatrices where(const Matrices& a) { return {a.batch_stride, a.row_stride, a.column_stride}; }
SvdMatrices transposed(const SvdMatrices& a) { return {a.batch_stride, a.column_stride, a.row_stride}; }

Results torchs(const Tensor& a, bool full_matrices, bool compute_uv) {
  auto [u, s, vh] = call_torch<3>("aten::_linalg_svd", "", a, full_matrices, compute_uv, std::nullopt);
  return {as_contiguous(u), s, as_contiguous(vh)};
}

// Left and right singular vectors of tall matrices, and where they are to be written. Not looked at if only the values
// are wanted.
struct Vectors {
  Tensor left, right;
  SvdMatrices at_left, at_right;
};

void jacobi(const JacobiPlan& plan, const Tensor& a, const SvdParams& params, const Vectors& to, const Tensor& s,
            bool compute_uv) {
  const Tensor present = compute_uv ? new_tensor({params.matrices}, ScalarType::Int, a) : s;
  const Tensor& left = compute_uv ? to.left : s;
  gpu::encode(a, [&](gpu::Encoder& encoder) {
    encoder.kernel(plan.kernel).buffer(0, a).buffer(1, left).buffer(2, s).buffer(3, compute_uv ? to.right : s);
    encoder.buffer(4, present).bytes(5, params);
    encoder.dispatch_threadgroups({ceil_div(params.matrices, plan.matrices_per_threadgroup)}, {plan.threads});
    if (!compute_uv) return;
    encoder.kernel("svd_complete").buffer(0, left).buffer(1, present).bytes(2, params);
    encoder.dispatch_threadgroups({params.matrices}, {256});
  });
}

void multiply(const Tensor& a, const Tensor& b, const Tensor& out, SvdMultiplyParams p, int64_t batch) {
  p.row_tiles = ceil_div<uint32_t>(p.rows, SVD_MULTIPLY_TILE);
  p.column_tiles = ceil_div<uint32_t>(p.columns, SVD_MULTIPLY_TILE);
  gpu::encode(a, [&](gpu::Encoder& encoder) {
    encoder.kernel("svd_multiply").buffer(0, a).buffer(1, b).buffer(2, out).bytes(3, p);
    encoder.dispatch_threadgroups({grid_side(batch * p.row_tiles * p.column_tiles)}, {256});
  });
}

// Of tall matrices by A = Q R and Rᵀ = X V, whose columns are nearer to orthogonal than R's (Drmač and Veselić 2008).
void after_qr(const JacobiPlan& plan, const Tensor& tall, const Shape& s, const Vectors& to, const Tensor& values,
              bool full_matrices, bool compute_uv) {
  const int64_t rows = std::max(s.m, s.n), columns = std::min(s.m, s.n);
  const int64_t q_columns = full_matrices ? rows : columns;
  const auto [q, r] = qr(tall, !compute_uv ? "r" : full_matrices ? "complete" : "reduced");
  const int64_t r_rows = compute_uv ? q_columns : columns;
  const Tensor small = new_tensor({compute_uv ? s.batch : 0, columns, columns}, ScalarType::Float, tall);
  SvdMatrices from = transposed(contiguous(columns, columns));
  from.batch_stride = r_rows * columns;
  jacobi(plan, r,
         {.a = from,
          .left = transposed(to.at_right),
          .right = transposed(contiguous(columns, columns)),
          .matrices = grid_side(s.batch),
          .rows = grid_side(columns),
          .columns = grid_side(columns)},
         {to.right, small, {}, {}}, values, compute_uv);
  if (!compute_uv) return;
  multiply(q, small, to.left,
           {.a = contiguous(rows, q_columns),
            .b = contiguous(columns, columns),
            .out = to.at_left,
            .rows = grid_side(rows),
            .inner = grid_side(columns),
            .columns = grid_side(q_columns),
            .row_tiles = 0,
            .column_tiles = 0},
           s.batch);
}

// The same by blocks of columns.
void blocked(const Tensor& tall, const Shape& s, const Vectors& to, const Tensor& values, bool full_matrices,
             bool compute_uv) {
  const int64_t rows = std::max(s.m, s.n), columns = std::min(s.m, s.n);
  const int64_t q_columns = full_matrices ? rows : columns;
  const auto [q, r] = qr(tall, !compute_uv ? "r" : full_matrices ? "complete" : "reduced");
  const bool wide = s.m < s.n;
  const Tensor left = new_tensor({compute_uv ? s.batch : 0, columns, columns}, ScalarType::Float, tall);
  const Tensor right = wide && compute_uv ? new_like(to.right) : to.right;
  Tensor whole = r;
  const Tensor square = as_contiguous(torch::stable::narrow(whole, -2, 0, columns));
  svd_jacobi_blocked(square, s.batch, compute_uv, values, right, left);
  if (!compute_uv) return;
  if (wide) {
    Tensor transposed_right = to.right;
    torch::stable::copy_(transposed_right, torch::stable::transpose(right, -2, -1));
  }
  multiply(q, left, to.left,
           {.a = contiguous(rows, q_columns),
            .b = transposed(contiguous(columns, columns)),
            .out = to.at_left,
            .rows = grid_side(rows),
            .inner = grid_side(columns),
            .columns = grid_side(q_columns),
            .row_tiles = 0,
            .column_tiles = 0},
           s.batch);
}

}  // namespace

Results svd(const Tensor& input, bool full_matrices, bool compute_uv) {
  const ScalarType dtype = input.scalar_type();
  check(dtype == ScalarType::Float, "metalcore::svd: A must be float32, not ", dtype_name(dtype));
  const Shape s = shape_of({input.sizes().begin(), input.sizes().end()});
  const JacobiPlan plan = plan_svd(s.m, s.n, s.batch, full_matrices, compute_uv, gpu::tuning(input));
  if (plan.variant == JacobiVariant::empty || plan.variant == JacobiVariant::torch)
    return torchs(input, full_matrices, compute_uv);

  const int64_t k = std::min(s.m, s.n), u_columns = full_matrices ? s.m : k, vh_rows = full_matrices ? s.n : k;
  auto result = [&](std::vector<int64_t> sizes) { return new_tensor(sizes, ScalarType::Float, input); };
  const Tensor u = result(compute_uv ? batch_sizes(input, {s.m, u_columns}) : std::vector<int64_t>{0});
  const Tensor vh = result(compute_uv ? batch_sizes(input, {vh_rows, s.n}) : std::vector<int64_t>{0});
  const Tensor values = result(batch_sizes(input, {k}));
  // Of a wide A the transpose: Aᵀ = V S Uᵀ.
  const bool wide = s.m < s.n;
  const SvdMatrices at_u = contiguous(s.m, u_columns), at_vh = contiguous(vh_rows, s.n);
  const Vectors to = wide ? Vectors{vh, u, transposed(at_vh), transposed(at_u)} : Vectors{u, vh, at_u, at_vh};
  if (plan.variant == JacobiVariant::blocked) {
    blocked(wide ? transposed(input) : input, s, to, values, full_matrices, compute_uv);
  } else if (plan.after_qr) {
    after_qr(plan, wide ? transposed(input) : input, s, to, values, full_matrices, compute_uv);
  } else {
    const Matrices a = matrices(input);
    jacobi(plan, a.tensor,
           {.a = wide ? transposed(where(a)) : where(a),
            .left = to.at_left,
            .right = to.at_right,
            .matrices = grid_side(s.batch),
            .rows = grid_side(std::max(s.m, s.n)),
            .columns = grid_side(k)},
           to, values, compute_uv);
  }
  return {u, values, vh};
}

namespace {

// explain("svd", shape, full_matrices=…, compute_uv=…); svdvals is svd without vectors. Of the blocked variant's many
// dispatches the first of each kernel.
Explanation explain(const Request& request) {
  check(request.shapes.size() == 1, "metalcore::svd: explain needs the shape of A");
  const Shape s = shape_of(request.shapes[0]);
  const bool full_matrices = request.option("full_matrices", "True") == "True";
  const bool compute_uv = request.option("compute_uv", "True") == "True";
  const gpu::Tuning& tuning = gpu::tuning(request.device_type);
  const JacobiPlan plan = plan_svd(s.m, s.n, s.batch, full_matrices, compute_uv, tuning);
  Explanation e{name_of(plan.variant), plan.why, {}};
  if (plan.variant == JacobiVariant::empty || plan.variant == JacobiVariant::torch) return e;
  const int64_t rows = std::max(s.m, s.n), columns = std::min(s.m, s.n);
  const int64_t q_columns = full_matrices ? rows : columns;
  if (plan.after_qr) {
    const char* mode = !compute_uv ? "r" : full_matrices ? "complete" : "reduced";
    Request qr{{{s.batch, rows, columns}}, request.dtype, request.device_type, {{"mode", mode}}};
    e.steps = explanations().at("qr")(qr).steps;
  }
  auto step = [&](const std::string& kernel, int64_t groups, uint32_t threads) {
    e.steps.push_back({kernel, {grid_side(groups)}, {threads}});
  };
  if (plan.variant == JacobiVariant::blocked) {
    for (const Step& each : jacobi_blocked_steps(columns, columns, s.batch, false, compute_uv, tuning))
      e.steps.push_back(each);
  } else {
    step(plan.kernel, ceil_div<int64_t>(s.batch, plan.matrices_per_threadgroup), plan.threads);
  }
  if (!compute_uv) return e;
  step("svd_complete", s.batch, 256);
  if (plan.after_qr)
    step("svd_multiply",
         s.batch * ceil_div<int64_t>(rows, SVD_MULTIPLY_TILE) * ceil_div<int64_t>(q_columns, SVD_MULTIPLY_TILE), 256);
  return e;
}

const ExplainOp explain_svd("svd", explain);

}  // namespace
}  // namespace metalcore

STABLE_TORCH_LIBRARY_FRAGMENT(metalcore, m) {
  m.def("svd(Tensor A, bool full_matrices, bool compute_uv) -> (Tensor, Tensor, Tensor)");
}

METALCORE_KERNELS(m) {
  m.impl("svd", TORCH_BOX(&metalcore::svd));
}
