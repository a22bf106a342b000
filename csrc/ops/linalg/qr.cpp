// qr(A, mode) -> (Q, R): Householder QR of matrices of any strides, float32 or complex64. Results are
// row-major.
//
// qr_pivoted(A, columns, rcond) -> (W, order, rank): QR with column pivoting of A's first `columns` columns. W, the
// transpose, holds R, the reflectors below its diagonal, and in the columns after them Qᵀ times A's. Its rows of a
// number at or above the rank mean nothing.
#include "qr.h"

#include "../../../kernels/linalg/qr.h"
#include "../../gpu/cost.h"
#include "cpu_route.h"
#include "matrices.h"

#include <algorithm>
#include <tuple>
#include <vector>

namespace metalcore {

QrParams small_params(const Matrices& a, const SmallQr& task) {
  return {.batch_stride = a.batch_stride,
          .row_stride = a.row_stride,
          .column_stride = a.column_stride,
          .matrices = grid_side(a.batch),
          .rows = grid_side(a.rows),
          .columns = grid_side(a.columns),
          .blocks = 1,
          .block_rows = grid_side(a.rows),
          .reflectors = task.reflectors,
          .q_columns = task.q_columns,
          .r_rows = task.r_rows,
          .task = task.task};
}

void run_small(const QrPlan& plan, const Matrices& a, const SmallQr& task, const Tensor& q, const Tensor& r,
               const Tensor& tau) {
  QrParams p = small_params(a, task);
  const bool simd = plan.variant == QrVariant::simd;
  gpu::record(a.tensor, [&](gpu::Recording& recording) {
    const double size = a.tensor.element_size() / 4.0;  // a complex product has four real ones
    const double flops = 4.0 * size * size * p.rows * p.columns * std::max(p.columns, p.q_columns);
    const double bytes = 4.0 * size * (p.rows * (1.0 * p.columns + p.q_columns) + 1.0 * p.r_rows * p.columns);
    gpu::in_pieces(recording, a.batch, {flops, bytes}, [&](const gpu::Piece& piece) {
      const auto optional = [&](bool wanted, const Tensor& tensor, int64_t elements_each) {
        return wanted ? piece.of(tensor, elements_each) : gpu::view_of(tensor);
      };
      p.matrices = grid_side(piece.count);
      recording.kernel(simd ? plan.simd_kernel : plan.levels[0].kernel).buffer(0, piece.of(a.tensor, a.batch_stride));
      recording.buffer(1, optional(p.q_columns > 0, q, int64_t{p.rows} * p.q_columns));
      recording.buffer(2, optional(p.task != QR_FORM, r, int64_t{p.r_rows} * p.columns)).bytes(3, p);
      recording.buffer(4, optional(p.task != QR_FACTORS, tau, p.reflectors));
      recording.work(piece.work.flops, piece.work.bytes);
      if (simd)
        recording.dispatch_threadgroups({ceil_div(p.matrices, plan.matrices_per_threadgroup)}, {128});
      else
        recording.dispatch_threadgroups({p.matrices}, {plan.levels[0].threads});
    });
  });
}

namespace {

constexpr uint32_t kPanelRows = QR_PANEL_THREADS * QR_PANEL_ROWS;  // the most that one threadgroup holds

uint32_t slabs_of(uint32_t rows) { return ceil_div<uint32_t>(rows, QR_SLAB_ROWS); }

uint32_t panel_threads(uint32_t rows) { return round_up(ceil_div<uint32_t>(rows, QR_PANEL_ROWS), gpu::kSimdWidth); }

}  // namespace

BlockedQr::BlockedQr(const RowMajor& a, const Tensor& tau, uint32_t batch, uint32_t columns)
    : a_(a), tau_(tau), batch_(batch), reflectors_(a, tau, batch, std::min(a.rows, a.columns), columns) {
  panel_factor_ = new_tensor({batch, QR_PANEL, QR_PANEL}, ScalarType::Float, a.tensor);
  if (a.rows <= kPanelRows) return;
  for (Tensor& sums : sums_) sums = new_tensor({batch, slabs_of(a.rows) + 1, QR_PANEL}, ScalarType::Float, a.tensor);
  state_ = new_tensor({batch, QR_SLAB_STATE}, ScalarType::Float, a.tensor);
}

void BlockedQr::factor_panel(gpu::Recording& recording, ReflectorRange range) const {
  const uint32_t rows = a_.rows - range.first;
  QrPanelParams p{a_.rows, a_.columns, range.first, range.width, reflectors_.count(), slabs_of(rows), 0};
  const double entries = 1.0 * batch_ * rows * range.width;
  auto bind = [&](const char* kernel) {
    recording.kernel(kernel).buffer(0, a_.tensor).buffer(1, panel_factor_).buffer(2, tau_).bytes(3, p);
  };
  if (rows <= kPanelRows) {
    bind("qr_panel");
    recording.work(4 * entries * range.width, 8 * entries);
    recording.dispatch_threadgroups({batch_}, {panel_threads(rows)});
    return;
  }
  uint32_t turn = 0;
  auto slabs = [&](const char* kernel) {
    bind(kernel);
    recording.work(4 * entries, 8 * entries);  // of one column
    recording.buffer(4, sums_[turn % 2]).buffer(5, sums_[(turn + 1) % 2]).buffer(6, state_);
    recording.dispatch_threadgroups({grid_side(int64_t{batch_} * p.slabs)}, {QR_SLAB_THREADS});
    ++turn;
  };
  slabs("qr_panel_maxima");
  slabs("qr_panel_scale");
  for (; p.step + 1 < QR_PANEL; ++p.step) slabs("qr_panel_step");
  slabs("qr_panel_last");
}

// Each panel of a block is applied to the block's other columns, and then the whole block to the columns on its right.
void BlockedQr::factor(gpu::Recording& recording, bool for_q) const {
  for (uint32_t b = 0; b < reflectors_.blocks(); ++b) {
    const ReflectorRange block = reflectors_.block(b);
    const uint32_t end = block.first + block.width;
    for (uint32_t first = block.first; first < end; first += QR_PANEL) {
      const ReflectorRange panel{first, std::min<uint32_t>(QR_PANEL, end - first)};
      factor_panel(recording, panel);
      reflectors_.apply_narrow(recording, panel, panel_factor_, first + panel.width, end);
    }
    if (for_q || end < a_.columns) reflectors_.factor_and_update(recording, b);
  }
}

void dispatch_elements(gpu::Recording& recording, int64_t count) {
  recording.dispatch_threads({grid_side(count)}, {256});
}

void set_identity(gpu::Recording& recording, const RowMajor& q) {
  recording.kernel(std::string("qr_identity") + complex_suffix(q.tensor))
      .buffer(0, q.tensor)
      .bytes(1, QrResultParams{q.rows, q.columns, 0});
  dispatch_elements(recording, q.tensor.numel());
}

// The blocks go from the last to the first, so that none changes a column before its own.
void form_q(gpu::Recording& recording, const BlockReflectors& reflectors, const RowMajor& q) {
  set_identity(recording, q);
  for (uint32_t i = reflectors.blocks(); i-- > 0;)
    reflectors.apply(recording, i, q, reflectors.block(i).first, q.columns, false);
}

namespace {

// Few matrices of more elements take a dispatch a step, with a threadgroup for every few columns.
constexpr int64_t kAlone = 1 << 16, kFew = 16;

std::tuple<Tensor, Tensor, Tensor> qr_pivoted(const Tensor& input, int64_t columns, double rcond) {
  check_float32("qr_pivoted", "A", input);
  const MatrixShape shape = check_matrices("qr_pivoted", input);
  check(0 <= columns && columns <= shape.columns, "metalcore::qr_pivoted: A has no ", columns, " columns");
  Tensor w = new_tensor(batch_sizes(input, {shape.columns, shape.rows}), ScalarType::Float, input);
  const Tensor order = new_tensor(batch_sizes(input, {columns}), ScalarType::Long, input);
  Tensor rank = new_tensor(batch_sizes(input, {}), ScalarType::Long, input);
  if (shape.batch == 0) return {w, order, rank};
  torch::stable::copy_(w, transposed(input));
  if (columns == 0) return {w, order, torch::stable::fill_(rank, 0.0)};

  const bool steps = shape.rows * shape.columns > kAlone && shape.batch <= kFew;
  gpu::note_plan("qr_pivoted", steps ? "steps" : "block", [&] {
    return times(shape.rows, shape.columns) +
           (steps ? ": threadgroups share the columns of each step" : ": one threadgroup takes each");
  });
  const int64_t state_size = 3 * columns + QR_PIVOTED_STATE;
  const Tensor state = new_tensor({shape.batch, state_size}, ScalarType::Float, input);
  QrPivotedParams p{.rows = grid_side(shape.rows),
                    .columns = grid_side(columns),
                    .others = grid_side(shape.columns - columns),
                    .step = 0,
                    .rcond = static_cast<float>(rcond)};
  const uint32_t batch = grid_side(shape.batch);
  gpu::record(w, [&](gpu::Recording& recording) {
    const auto dispatch = [&](const char* kernel, int64_t columns_shared) {
      recording.kernel(kernel).buffer(0, w).buffer(1, state).buffer(2, order).buffer(3, rank).bytes(4, p);
      const uint32_t simdgroups = QR_PIVOTED_THREADS / 32;
      const gpu::Size grid = columns_shared < 0
                                 ? gpu::Size{batch}
                                 : gpu::Size{grid_side(ceil_div<int64_t>(columns_shared, simdgroups)), batch};
      recording.dispatch_threadgroups(grid, {QR_PIVOTED_THREADS});
    };
    if (!steps) {
      recording.work(4.0 * shape.batch * shape.rows * columns * shape.columns);
      return dispatch("qr_pivoted", -1);
    }
    dispatch("qr_pivoted_start", columns);
    for (p.step = 0; p.step < std::min(p.rows, p.columns); ++p.step) {
      dispatch("qr_pivoted_step", -1);
      if (p.step + 1 < shape.columns) dispatch("qr_pivoted_update", shape.columns - p.step - 1);
    }
  });
  return {w, order, rank};
}

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
  check_number("qr", "A", input);
  const std::vector<int64_t> sizes = sizes_of(input);
  const Shape s = shape_of(sizes, mode);
  std::vector<int64_t> q_sizes = sizes, r_sizes = sizes;
  q_sizes.back() = s.q_columns;
  r_sizes[r_sizes.size() - 2] = s.r_rows;
  if (mode == "r") q_sizes = {0};
  const ScalarType dtype = input.scalar_type();
  const Tensor q = new_tensor(q_sizes, dtype, input), r = new_tensor(r_sizes, dtype, input);
  if (s.batch == 0) return {q, r};

  const QrPlan plan = plan_qr(s.m, s.n, s.batch, s.q_columns, is_complex(input), qr_tuning(input));
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
  check_matrices_of_numbers("qr", input);
  const auto [a, scales] = scaled(input);
  const auto [q, r] = qr(a, "reduced");
  return {q, r, scales};
}

}  // namespace metalcore

STABLE_TORCH_LIBRARY_FRAGMENT(metalcore, m) {
  m.def("qr_pivoted(Tensor A, int columns, float rcond) -> (Tensor, Tensor, Tensor)");
  m.def("qr(Tensor A, str mode) -> (Tensor, Tensor)");
  m.def("qr_scaled(Tensor A) -> (Tensor, Tensor, Tensor)");
}

METALCORE_KERNELS(m) {
  m.impl<&metalcore::qr_pivoted>("qr_pivoted");
  m.impl<&metalcore::qr>("qr");
  m.impl<&metalcore::qr_scaled>("qr_scaled");
}
