// qr(A, mode) -> (Q, R): Householder QR of a batch of float32 matrices of any strides; row-major results.
#include "qr.h"

#include "../../../kernels/linalg/qr.h"
#include "matrices.h"
#include "qr_plan.h"
#include "../plan.h"

#include <algorithm>
#include <tuple>
#include <utility>
#include <vector>

namespace metalcore {
namespace {

struct Shape {
  int64_t m, n, batch;
  int64_t q_columns, r_rows;
};

// The errors are PyTorch's.
Shape shape_of(const std::vector<int64_t>& sizes, const std::string& mode) {
  check(sizes.size() >= 2, "linalg.qr: The input tensor A must have at least 2 dimensions.");
  check(mode == "reduced" || mode == "complete" || mode == "r", "qr received unrecognized mode '", mode,
        "' but expected one of 'reduced' (default), 'r', or 'complete'");
  Shape s{};
  const MatrixShape shape = matrix_shape(sizes);
  s.m = shape.rows, s.n = shape.columns, s.batch = shape.batch;
  const int64_t k = std::min(s.m, s.n);
  s.q_columns = mode == "complete" ? s.m : mode == "reduced" ? k : 0;
  s.r_rows = mode == "complete" ? s.m : k;
  return s;
}

QrParams params_of(const Matrices& a, const Shape& s) {
  return {.batch_stride = a.batch_stride,
          .row_stride = a.row_stride,
          .column_stride = a.column_stride,
          .matrices = grid_side(s.batch),
          .rows = grid_side(s.m),
          .columns = grid_side(s.n),
          .blocks = 1,
          .block_rows = grid_side(s.m),
          .q_columns = grid_side(s.q_columns),
          .r_rows = grid_side(s.r_rows)};
}

// Arguments of the kernels that take whole matrices or blocks of rows. Where Q is not wanted any buffer will do.
void bind_all(gpu::Encoder& encoder, std::string_view kernel, const Tensor& a, const Tensor& q, const Tensor& r,
              const QrParams& params) {
  encoder.kernel(kernel).buffer(0, a).buffer(1, params.q_columns ? q : r).buffer(2, r).bytes(3, params);
}

void dispatch_elements(gpu::Encoder& encoder, int64_t count) {
  encoder.dispatch_threads({grid_side(count)}, {256});
}

void small(const QrPlan& plan, const Tensor& a, const QrParams& params, const Tensor& q, const Tensor& r) {
  gpu::encode(a, [&](gpu::Encoder& encoder) {
    if (plan.variant == QrVariant::simd) {
      bind_all(encoder, plan.simd_kernel, a, q, r, params);
      encoder.dispatch_threadgroups({ceil_div(params.matrices, plan.matrices_per_threadgroup)}, {128});
    } else {
      bind_all(encoder, plan.levels[0].kernel, a, q, r, params);
      encoder.dispatch_threadgroups({params.matrices}, {plan.levels[0].threads});
    }
  });
}

// Down the levels, each factoring the stack of the R of the one before; up again, multiplying each level's Q by the one
// above. Mode r goes up as well, to learn the signs of R's rows, but for the matrix's own Q.
void tall(const QrPlan& plan, const Tensor& a, const QrParams& params, const Tensor& q, const Tensor& r) {
  const uint32_t n = params.columns, batch = params.matrices;
  const size_t top = plan.levels.size() - 1;
  std::vector<Tensor> level_q, level_r, joined;  // joined[i]: level i's Q times those above
  for (const QrLevel& level : plan.levels) {
    level_q.push_back(new_tensor({batch, level.rows, n}, ScalarType::Float, a));
    level_r.push_back(level.blocks == 1 ? r : new_tensor({batch, level.blocks * n, n}, ScalarType::Float, a));
  }
  for (size_t i = 0; i < top; ++i) joined.push_back(i == 0 ? q : new_tensor(level_q[i].sizes(), ScalarType::Float, a));
  joined.push_back(level_q[top]);
  const Tensor signs = new_tensor({batch, n}, ScalarType::Float, a);

  gpu::encode(a, [&](gpu::Encoder& encoder) {
    for (size_t i = 0; i <= top; ++i) {
      const QrLevel& level = plan.levels[i];
      QrParams p = params;
      if (i > 0) p.batch_stride = int64_t{level.rows} * n, p.row_stride = n, p.column_stride = 1;
      p.matrices = batch * level.blocks;
      p.rows = level.rows;
      p.blocks = level.blocks;
      p.block_rows = level.block_rows;
      p.q_columns = p.r_rows = n;
      bind_all(encoder, level.kernel, i == 0 ? a : level_r[i - 1], level_q[i], level_r[i], p);
      encoder.dispatch_threadgroups({p.matrices}, {level.threads});
    }
    for (size_t i = top; i-- > 0;) {
      const QrLevel& level = plan.levels[i];
      const QrTallParams p{.rows = level.rows,
                           .columns = n,
                           .blocks = level.blocks,
                           .block_rows = level.block_rows,
                           .tiles = ceil_div<uint32_t>(level.block_rows, QR_TALL_ROWS),
                           .with_signs = i == 0};
      if (i == 0) {
        encoder.kernel("qr_tall_signs").buffer(0, level_q[0]).buffer(1, joined[1]).buffer(2, r).buffer(3, signs);
        encoder.bytes(4, p);
        encoder.dispatch_threadgroups({batch}, {256});
        if (params.q_columns == 0) continue;
      }
      encoder.kernel("qr_tall_combine").buffer(0, level_q[i]).buffer(1, joined[i + 1]).buffer(2, signs);
      encoder.buffer(3, joined[i]).bytes(4, p);
      encoder.dispatch_threadgroups({grid_side(int64_t{batch} * level.blocks * p.tiles)}, {256});
    }
  });
}

// LAPACK's blocked geqrf and orgqr: each panel's reflectors, gathered in V and T, are applied to all columns on its
// right; then from the last panel to the first to the columns of the identity, which gives Q.
void blocked(const QrPlan& plan, const Tensor& a, const Shape& s, const Tensor& q, const Tensor& r) {
  const uint32_t m = grid_side(s.m), n = grid_side(s.n), batch = grid_side(s.batch);
  const uint32_t count = std::min(m, n);
  Tensor work = new_tensor(a.sizes(), ScalarType::Float, a);
  torch::stable::copy_(work, a);
  const Tensor factors = new_tensor({s.batch, plan.panels, QR_PANEL, QR_PANEL}, ScalarType::Float, a);

  auto panel = [&](uint32_t i) -> QrPanelParams {
    const uint32_t first = i * QR_PANEL;
    return {m, n, first, std::min<uint32_t>(QR_PANEL, count - first), i, plan.panels};
  };
  gpu::encode(a, [&](gpu::Encoder& encoder) {
    auto update = [&](const QrPanelParams& of, const Tensor& target, uint32_t from, uint32_t to, bool transpose) {
      const uint32_t tiles = ceil_div<uint32_t>(to - from, QR_UPDATE_COLUMNS);
      encoder.kernel("qr_update").buffer(0, work).buffer(1, factors).buffer(2, target);
      encoder.bytes(3, QrUpdateParams{of, from, to, tiles, transpose});
      encoder.dispatch_threadgroups({grid_side(int64_t{tiles} * batch)}, {QR_UPDATE_THREADS});
    };
    for (uint32_t i = 0; i < plan.panels; ++i) {
      const QrPanelParams p = panel(i);
      const QrPanelKernel kernel = qr_panel_kernel(m - p.first);
      encoder.kernel(kernel.name).buffer(0, work).buffer(1, factors).bytes(2, p);
      encoder.dispatch_threadgroups({batch}, {kernel.threads});
      update(p, work, p.first + p.width, n, true);
    }
    encoder.kernel("qr_upper").buffer(0, r).bytes(1, QrResultParams{grid_side(s.r_rows), n, m}).buffer(2, work);
    dispatch_elements(encoder, r.numel());
    if (s.q_columns == 0) return;
    const uint32_t q_columns = grid_side(s.q_columns);
    encoder.kernel("qr_identity").buffer(0, q).bytes(1, QrResultParams{m, q_columns, m});
    dispatch_elements(encoder, q.numel());
    for (uint32_t i = plan.panels; i-- > 0;) update(panel(i), q, i * QR_PANEL, q_columns, false);
  });
}

}  // namespace

std::tuple<Tensor, Tensor> qr(const Tensor& input, const std::string& mode) {
  const ScalarType dtype = input.scalar_type();
  check(dtype == ScalarType::Float, "metalcore::qr: A must be float32, not ", dtype_name(dtype));
  const std::vector<int64_t> sizes(input.sizes().begin(), input.sizes().end());
  const Shape s = shape_of(sizes, mode);
  std::vector<int64_t> q_sizes = sizes, r_sizes = sizes;
  q_sizes.back() = s.q_columns;
  r_sizes[r_sizes.size() - 2] = s.r_rows;
  if (mode == "r") q_sizes = {0};
  const Tensor q = new_tensor(q_sizes, ScalarType::Float, input), r = new_tensor(r_sizes, ScalarType::Float, input);
  if (s.batch == 0) return {q, r};

  const QrPlan plan = plan_qr(s.m, s.n, s.q_columns, gpu::tuning(input));
  if (plan.variant == QrVariant::empty) {
    if (q.numel() > 0)  // A has no columns, and Q in mode complete is the identity
      gpu::encode(q, [&](gpu::Encoder& encoder) {
        encoder.kernel("qr_identity").buffer(0, q).bytes(1, QrResultParams{grid_side(s.m), grid_side(s.m), 0});
        dispatch_elements(encoder, q.numel());
      });
  } else if (plan.variant == QrVariant::blocked) {
    blocked(plan, input, s, q, r);
  } else {
    const Matrices a = matrices(input);
    const QrParams params = params_of(a, s);
    plan.variant == QrVariant::tall ? tall(plan, a.tensor, params, q, r) : small(plan, a.tensor, params, q, r);
  }
  return {q, r};
}

namespace {

// explain("qr", shape, mode=…). Of the blocked variant's many dispatches the first of each kernel.
Explanation explain(const Request& request) {
  check(request.shapes.size() == 1, "metalcore::qr: explain needs the shape of A");
  const Shape s = shape_of(request.shapes[0], request.option("mode", "reduced"));
  const QrPlan plan = plan_qr(s.m, s.n, s.q_columns, gpu::tuning(request.device_type));
  const uint32_t batch = grid_side(s.batch);
  Explanation e{name_of(plan.variant), plan.why, {}};
  auto step = [&](const std::string& kernel, int64_t groups, uint32_t threads) {
    e.steps.push_back({kernel, {grid_side(groups)}, {threads}});
  };
  auto tiles = [&](int64_t columns) { return ceil_div<int64_t>(columns, QR_UPDATE_COLUMNS) * batch; };
  switch (plan.variant) {
    case QrVariant::empty: break;
    case QrVariant::simd: step(plan.simd_kernel, ceil_div(batch, plan.matrices_per_threadgroup), 128); break;
    case QrVariant::block:
    case QrVariant::tall:
      for (const QrLevel& level : plan.levels) step(level.kernel, int64_t{batch} * level.blocks, level.threads);
      if (plan.levels.size() > 1) step("qr_tall_signs", batch, 256);
      if (plan.levels.size() > 1 && s.q_columns > 0)
        step("qr_tall_combine",
             int64_t{batch} * plan.levels[0].blocks * ceil_div<uint32_t>(plan.levels[0].block_rows, QR_TALL_ROWS), 256);
      break;
    case QrVariant::blocked:
      step(qr_panel_kernel(grid_side(s.m)).name, batch, qr_panel_kernel(grid_side(s.m)).threads);
      if (s.n > QR_PANEL) step("qr_update", tiles(s.n - QR_PANEL), QR_UPDATE_THREADS);
      e.steps.push_back({"qr_upper", {grid_side(s.batch * s.r_rows * s.n)}, {256}, true});
      if (s.q_columns > 0) {
        e.steps.push_back({"qr_identity", {grid_side(s.batch * s.m * s.q_columns)}, {256}, true});
        step("qr_update", tiles(s.q_columns), QR_UPDATE_THREADS);
      }
      break;
  }
  return e;
}

const ExplainOp explain_qr("qr", explain);

}  // namespace
}  // namespace metalcore

STABLE_TORCH_LIBRARY_FRAGMENT(metalcore, m) {
  m.def("qr(Tensor A, str mode) -> (Tensor, Tensor)");
}

METALCORE_KERNELS(m) {
  m.impl("qr", TORCH_BOX(&metalcore::qr));
}
