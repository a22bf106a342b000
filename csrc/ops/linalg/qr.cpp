// qr(A, mode) -> (Q, R): Householder QR of float32 matrices of any strides. Results are row-major.
#include "qr.h"

#include "../../../kernels/linalg/qr.h"
#include "cpu_route.h"
#include "matrices.h"
#include "qr_plan.h"
#include "scale.h"

#include <algorithm>
#include <tuple>
#include <vector>

namespace metalcore {
namespace {

struct Shape {
  int64_t m, n, batch;
  int64_t q_columns, r_rows;
};

// The errors are PyTorch's.
Shape shape_of(const std::vector<int64_t>& sizes, const std::string& mode) {
  const MatrixShape shape = check_matrices("qr", sizes);
  check(mode == "reduced" || mode == "complete" || mode == "r", "qr received unrecognized mode '", mode,
        "' but expected one of 'reduced' (default), 'r', or 'complete'");
  Shape s{};
  s.m = shape.rows, s.n = shape.columns, s.batch = shape.batch;
  const int64_t k = std::min(s.m, s.n);
  s.q_columns = mode == "complete" ? s.m : mode == "reduced" ? k : 0;
  s.r_rows = mode == "complete" ? s.m : k;
  return s;
}

// Each level factors the stacked R of the level before. Then, from the last level to the first, each level's Q is
// multiplied by the Q after it. Mode r does this too, to learn the signs of R's rows, except for the matrix's own Q.
void factor_tall(const QrPlan& plan, const Tensor& a, const QrParams& params, const Tensor& q, const Tensor& r) {
  const uint32_t n = params.columns, batch = params.matrices;
  const size_t top = plan.levels.size() - 1;
  std::vector<Tensor> level_q, level_r, joined;  // joined[i]: level i's Q times those of the levels after it
  for (const QrLevel& level : plan.levels) {
    level_q.push_back(new_tensor({batch, level.rows, n}, ScalarType::Float, a));
    level_r.push_back(level.blocks == 1 ? r : new_tensor({batch, level.blocks * n, n}, ScalarType::Float, a));
  }
  for (size_t i = 0; i < top; ++i) joined.push_back(i == 0 ? q : new_tensor(level_q[i].sizes(), ScalarType::Float, a));
  joined.push_back(level_q[top]);
  const Tensor signs = new_tensor({batch, n}, ScalarType::Float, a);

  gpu::record(a, [&](gpu::Recording& recording) {
    for (size_t i = 0; i <= top; ++i) {
      const QrLevel& level = plan.levels[i];
      QrParams p = params;
      if (i > 0) p.batch_stride = int64_t{level.rows} * n, p.row_stride = n, p.column_stride = 1;
      p.matrices = batch * level.blocks;
      p.rows = level.rows;
      p.blocks = level.blocks;
      p.block_rows = level.block_rows;
      p.q_columns = p.r_rows = n;
      recording.kernel(level.kernel).buffer(0, i == 0 ? a : level_r[i - 1]).buffer(1, level_q[i]).buffer(2, level_r[i]);
      recording.bytes(3, p).buffer(4, signs);  // these kernels do not touch signs
      recording.work(4.0 * batch * level.rows * n * n);
      recording.dispatch_threadgroups({p.matrices}, {level.threads});
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
        recording.kernel("qr_tall_signs").buffer(0, level_q[0]).buffer(1, joined[1]).buffer(2, r).buffer(3, signs);
        recording.bytes(4, p);
        recording.dispatch_threadgroups({batch}, {256});
        if (params.q_columns == 0) continue;
      }
      recording.kernel("qr_tall_combine").buffer(0, level_q[i]).buffer(1, joined[i + 1]).buffer(2, signs);
      recording.buffer(3, joined[i]).bytes(4, p).work(2.0 * batch * level.rows * n * n);
      recording.dispatch_threadgroups({grid_side(int64_t{batch} * level.blocks * p.tiles)}, {256});
    }
  });
}

// LAPACK's blocked geqrf and orgqr.
void factor_blocked(const Tensor& a, const Shape& s, const Tensor& q, const Tensor& r) {
  const uint32_t m = grid_side(s.m), n = grid_side(s.n), batch = grid_side(s.batch);
  const RowMajor work{new_tensor(a.sizes(), ScalarType::Float, a), m, n};
  Tensor work_tensor = work.tensor;
  torch::stable::copy_(work_tensor, a);
  const uint32_t q_columns = grid_side(s.q_columns);
  const Tensor tau = new_tensor({s.batch, std::min(s.m, s.n)}, ScalarType::Float, a);
  const BlockedQr factors(work, tau, batch, std::max(n, q_columns));
  gpu::record(a, [&](gpu::Recording& recording) {
    factors.factor(recording, q_columns > 0);
    recording.kernel("qr_upper")
        .buffer(0, r)
        .bytes(1, QrResultParams{grid_side(s.r_rows), n, m})
        .buffer(2, work.tensor);
    dispatch_elements(recording, r.numel());
    if (q_columns > 0) form_q(recording, factors.reflectors(), {q, m, q_columns});
  });
}

}  // namespace

std::tuple<Tensor, Tensor> qr(const Tensor& input, const std::string& mode) {
  check_float32("qr", "A", input);
  const std::vector<int64_t> sizes = sizes_of(input);
  const Shape s = shape_of(sizes, mode);
  std::vector<int64_t> q_sizes = sizes, r_sizes = sizes;
  q_sizes.back() = s.q_columns;
  r_sizes[r_sizes.size() - 2] = s.r_rows;
  if (mode == "r") q_sizes = {0};
  const Tensor q = new_tensor(q_sizes, ScalarType::Float, input), r = new_tensor(r_sizes, ScalarType::Float, input);
  if (s.batch == 0) return {q, r};

  const QrPlan plan = plan_qr(s.m, s.n, s.batch, s.q_columns, qr_tuning(input));
  gpu::note_plan("qr", name_of(plan.variant), [&] { return plan.why; });
  const SmallQr task{QR_FACTORS, grid_side(std::min(s.m, s.n)), grid_side(s.q_columns), grid_side(s.r_rows)};
  switch (plan.variant) {
    case QrVariant::empty:  // A has no columns, and in mode complete Q is the identity
      if (q.numel() > 0)
        gpu::record(q,
                    [&](gpu::Recording& recording) { set_identity(recording, {q, grid_side(s.m), grid_side(s.m)}); });
      break;
    case QrVariant::simd:
    case QrVariant::block: run_small(plan, matrices(input), task, s.q_columns > 0 ? q : r, r, r); break;
    case QrVariant::tall: {
      const Matrices a = matrices(input);
      factor_tall(plan, a.tensor, small_params(a, task), q, r);
      break;
    }
    case QrVariant::blocked: factor_blocked(input, s, q, r); break;
    case QrVariant::torch:
    case QrVariant::cpu: {
      const auto [torch_q, torch_r] = call_left<2>(plan.variant, "aten::linalg_qr", input, mode);
      return {as_contiguous(torch_q), as_contiguous(torch_r)};
    }
  }
  return {q, r};
}

std::tuple<Tensor, Tensor, Tensor> qr_scaled(const Tensor& input) {
  check_matrices("qr", input);
  const auto [a, scales] = scaled(input);
  const auto [q, r] = qr(a, "reduced");
  return {q, r, scales};
}

}  // namespace metalcore

STABLE_TORCH_LIBRARY_FRAGMENT(metalcore, m) {
  m.def("qr(Tensor A, str mode) -> (Tensor, Tensor)");
  m.def("qr_scaled(Tensor A) -> (Tensor, Tensor, Tensor)");
}

METALCORE_KERNELS(m) {
  m.impl<&metalcore::qr>("qr");
  m.impl<&metalcore::qr_scaled>("qr_scaled");
}
