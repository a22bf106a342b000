// lu_factor_ex(A, pivot) -> (LU, pivots, info) and lu(A, pivot) -> (P, L, U), of matrices of any strides, float32 or
// complex64.
#include "lu.h"

#include "../../gpu/cost.h"
#include "cpu_route.h"

#include <algorithm>
#include <tuple>
#include <vector>

namespace metalcore {

namespace {

void dispatch_elements(gpu::Recording& recording, int64_t count) {
  recording.dispatch_threads({grid_side(count)}, {256});
}

// Whether a kernel can read the rows as float4.
bool loads_vectors(const Matrices& a) {
  return a.column_stride == 1 && a.row_stride % 4 == 0 && a.batch_stride % 4 == 0 &&
         gpu::view_of(a.tensor).offset % 16 == 0;
}

// Factors a batch of contiguous matrices in place, from left to right. Pivots come only from below, so a panel's rows
// begin at its first column's diagonal.
class BlockedLu {
 public:
  BlockedLu(gpu::Recording& recording, const LuFactors& results, const Tensor& panels, const MatrixShape& shape,
            bool pivoting, const LuTuning& tuning)
      : recording_(recording),
        results_(results),
        panels_(panels),
        tuning_(tuning),
        m_(grid_side(shape.rows)),
        n_(grid_side(shape.columns)),
        batch_(grid_side(shape.batch)),
        steps_(std::min(m_, n_)),
        pitch_(grid_side(panels.size(-1))),
        pivoting_(pivoting) {}

  void factor() {
    update(0, 0, std::min<uint32_t>(LU_PANEL, steps_));  // copies the first panel
    for (uint32_t block = 0; block < steps_; block += tuning_.blocked_columns) {
      const uint32_t block_end = std::min(block + tuning_.blocked_columns, steps_);
      const uint32_t end = block_end == steps_ ? n_ : block_end;  // the last panels take all columns
      for (uint32_t first = block; first < block_end; first += LU_PANEL) {
        const uint32_t width = std::min<uint32_t>(LU_PANEL, block_end - first);
        panel(first, width);
        rows(first, width, end);
        if (first + width < block_end) update(first, width, end);
      }
      if (block_end < steps_) {
        top(block, block_end - block);
        update(block, block_end - block, n_);
      }
    }
  }

 private:
  void panel(uint32_t first, uint32_t width) {
    const LuPanel plan = lu_panel(m_ - first);
    recording_.kernel(plan.kernel).buffer(0, panels_).buffer(1, results_.pivots).buffer(2, results_.info);
    recording_.bytes(3, LuPanelParams{m_ - first, width, first, pitch_, steps_, pivoting_});
    const double entries = 1.0 * batch_ * (m_ - first) * width;
    recording_.work(entries * width, 8 * entries);
    recording_.dispatch_threadgroups({batch_}, {plan.threads});
  }

  // Exchanges rows beside the panel, and makes U's rows in the columns before `end`.
  void rows(uint32_t first, uint32_t width, uint32_t end) {
    LuRowsParams p{m_, n_, first, width, end, pitch_, 0, 0, steps_, results_.permutation.has_value()};
    p.column_tiles = std::max(ceil_div<uint32_t>(n_ - width, LU_ROWS_THREADS), 1u);
    p.tiles = p.column_tiles + ceil_div<uint32_t>(m_ - first, LU_ROWS_THREADS);
    recording_.kernel("lu_rows").buffer(0, results_.lu).buffer(1, results_.pivots).buffer(2, panels_);
    recording_.buffer(3, results_.permutation).bytes(4, p);
    recording_.work(1.0 * batch_ * width * width * (end - first), 12.0 * batch_ * width * n_);
    recording_.dispatch_threadgroups({grid_side(int64_t{batch_} * p.tiles)}, {LU_ROWS_THREADS});
  }

  // Makes U's rows on the right of a block.
  void top(uint32_t first, uint32_t width) {
    const uint32_t right = n_ - first - width;
    const LuTopParams p{m_, n_, first, width, ceil_div<uint32_t>(right, LU_ROWS_THREADS)};
    recording_.kernel("lu_top").buffer(0, results_.lu).bytes(1, p);
    recording_.work(1.0 * batch_ * width * width * right, 8.0 * batch_ * width * right);
    recording_.dispatch_threadgroups({grid_side(int64_t{batch_} * p.tiles)}, {LU_ROWS_THREADS});
  }

  // Subtracts the product of `width` columns of L and rows of U in the columns before `end`.
  void update(uint32_t first, uint32_t width, uint32_t end) {
    const uint32_t corner = first + width;
    const uint32_t panel_end = std::min(corner + LU_PANEL, steps_);
    LuUpdateParams p{m_, n_, first, width, corner, end, panel_end, pitch_, 0, 0, n_ % 4 == 0};
    p.column_tiles = ceil_div<uint32_t>(end - corner, LU_UPDATE_TILE);
    p.tiles = p.column_tiles * ceil_div<uint32_t>(m_ - corner, LU_UPDATE_TILE);
    const double updated = 1.0 * batch_ * (m_ - corner) * (end - corner);
    recording_.kernel("lu_update").buffer(0, results_.lu).buffer(1, panels_).bytes(2, p);
    recording_.work(2 * updated * width, 8 * updated);
    recording_.dispatch_threadgroups({grid_side(int64_t{batch_} * p.tiles)}, {LU_UPDATE_THREADS});
  }

  gpu::Recording& recording_;
  const LuFactors& results_;
  const Tensor& panels_;
  const LuTuning& tuning_;
  const uint32_t m_, n_, batch_, steps_, pitch_;
  const bool pivoting_;
};

void factor_blocked(const LuFactors& results, const MatrixShape& shape, bool pivoting, const LuTuning& tuning) {
  const Tensor panels = new_tensor({shape.batch, LU_PANEL, shape.rows}, ScalarType::Float, results.lu);
  gpu::record(results.lu, [&](gpu::Recording& recording) {
    if (const MaybeTensor& permutation = results.permutation) {
      recording.kernel("lu_identity_permutation").buffer(0, permutation);
      recording.bytes(1, LuResultParams{.rows = grid_side(shape.rows)});
      dispatch_elements(recording, permutation->numel());
    }
    BlockedLu(recording, results, panels, shape, pivoting, tuning).factor();
  });
}

}  // namespace

void lu_small(const LuPlan& plan, const LuSmall& task, const LuFactors& results) {
  const Matrices& a = task.a;
  LuParams p{};
  p.a_batch = a.batch_stride, p.a_row = a.row_stride, p.a_column = a.column_stride;
  if (task.b) p.b_batch = task.b->batch_stride, p.b_row = task.b->row_stride, p.b_column = task.b->column_stride;
  p.lu_batch = a.rows * a.columns, p.lu_row = a.columns;
  p.x_row = task.x_row, p.x_column = task.x_column;
  p.matrices = grid_side(a.batch);
  p.rows = grid_side(a.rows), p.columns = grid_side(a.columns);
  p.right = grid_side(task.b_columns), p.tile = plan.tile;
  p.tiles = plan.tile > 0 ? ceil_div(p.right, plan.tile) : 1;
  p.given = task.given;
  p.identity = !task.b;
  p.pivoting = task.pivoting;
  p.factors = task.factors;
  p.sources = results.permutation.has_value();
  p.pivots_batch = std::min(p.rows, p.columns);
  p.row_threads = plan.row_threads;
  if (loads_vectors(a)) p.as_float4 |= LU_VECTORS_A;
  if (task.b && loads_vectors(*task.b)) p.as_float4 |= LU_VECTORS_B;
  if (a.columns % 4 == 0) p.as_float4 |= LU_VECTORS_LU;
  if (task.x_column == 1 && task.x_row % 4 == 0) p.as_float4 |= LU_VECTORS_X;
  const Tensor& info = results.info;
  gpu::record(a.tensor, [&](gpu::Recording& recording) {
    const double n = static_cast<double>(std::max(a.rows, a.columns));
    const double size = a.tensor.element_size() / 4.0;  // a complex product has four real ones
    const double flops =
        size * size * n * n * (n * p.tiles + 2 * p.right);  // each tile's threads factor the matrix again
    gpu::in_pieces(recording, a.batch, {flops, 8 * size * n * (n * p.tiles + p.right)}, [&](const gpu::Piece& piece) {
      p.matrices = grid_side(piece.count);
      const gpu::BufferView own_info = piece.of(info, 1), own_a = piece.of(a.tensor, a.batch_stride);
      const auto optional = [&](bool wanted, const Tensor& tensor, int64_t elements_each) {
        return wanted ? piece.of(tensor, elements_each) : gpu::BufferView{};
      };
      const gpu::BufferView lu = optional(task.factors, results.lu, p.lu_batch);
      const gpu::BufferView pivots = optional(task.factors || task.given, results.pivots, p.pivots_batch);
      const gpu::BufferView sources = optional(p.sources, results.permutation.value_or(info), p.rows);
      recording.kernel(plan.kernel).buffer(0, own_a);
      if (plan.variant == LuVariant::block) {
        recording.buffer(1, lu).buffer(2, pivots).buffer(3, own_info).buffer(4, sources).bytes(5, p);
      } else {
        recording.buffer(1, task.b ? piece.of(task.b->tensor, p.b_batch) : gpu::BufferView{})
            .buffer(2, lu)
            .buffer(3, pivots);
        recording.buffer(4, own_info).buffer(5, sources);
        recording.buffer(6, task.x ? piece.of(*task.x, a.rows * p.right) : gpu::BufferView{}).bytes(7, p);
      }
      recording.work(piece.work.flops, piece.work.bytes);
      recording.dispatch_threadgroups({grid_side(ceil_div<int64_t>(piece.count * p.tiles, plan.matrices))},
                                      {plan.threads});
    });
  });
}

Tensor lu_permutation(const Tensor& pivots, int64_t rows) {
  std::vector<int64_t> sizes = sizes_of(pivots);
  const int64_t steps = sizes.back();
  sizes.back() = rows;
  const Tensor permutation = new_tensor(sizes, ScalarType::Int, pivots);
  if (permutation.numel() == 0) return permutation;
  const Tensor packed = as_contiguous(pivots);
  gpu::record(pivots, [&](gpu::Recording& recording) {
    recording.kernel("lu_permutation").buffer(0, packed).buffer(1, permutation);
    recording.bytes(2, LuResultParams{.rows = grid_side(rows), .columns = 0, .pivots = grid_side(steps)});
    recording.dispatch_threadgroups({grid_side(permutation.numel() / rows)}, {gpu::kSimdWidth});
  });
  return permutation;
}

namespace {

Tensor permuted(const Tensor& b, const Tensor& permutation, const Tensor& x, LuPermuteParams p) {
  const MatrixShape s = matrix_shape(x.sizes());
  p.rows = grid_side(s.rows), p.columns = grid_side(s.columns);
  gpu::record(x, [&](gpu::Recording& recording) {
    recording.kernel(std::string("lu_permute") + complex_suffix(x))
        .buffer(0, b)
        .buffer(1, permutation)
        .buffer(2, x)
        .bytes(3, p);
    dispatch_elements(recording, x.numel());
  });
  return x;
}

}  // namespace

Tensor lu_permute(const Tensor& input, const Tensor& permutation, bool transpose) {
  const Matrices b = matrices(input);
  return permuted(
      b.tensor, permutation, new_like(input),
      {.b_batch = b.batch_stride, .b_row = b.row_stride, .b_column = b.column_stride, .transpose = transpose});
}

Tensor lu_permuted_identity(const Tensor& like, const Tensor& permutation) {
  return permuted(permutation, permutation, new_like(like), {.identity = true});
}

LuFactors lu_factors(const Tensor& input, bool pivoting, bool with_permutation) {
  const MatrixShape shape = matrix_shape(input.sizes());
  const int64_t steps = std::min(shape.rows, shape.columns);
  LuTuning tuning = lu_tuning(input);
  if (!pivoting) tuning.cpu = {};  // PyTorch's op on the CPU always exchanges rows
  const LuPlan plan = plan_lu(shape.rows, shape.columns, shape.batch, 0, is_complex(input), tuning);
  gpu::note_plan("lu_factor", name_of(plan.variant), [&] { return plan.why; });
  if (is_left(plan.variant)) {
    auto [lu, pivots, info] = call_left<3>(plan.variant, "aten::linalg_lu_factor_ex", input, pivoting, false);
    LuFactors results{as_contiguous(lu), as_contiguous(pivots), info, std::nullopt};
    if (with_permutation) results.permutation = lu_permutation(results.pivots, shape.rows);
    return results;
  }
  LuFactors results{new_like(input), new_tensor(batch_sizes(input, {steps}), ScalarType::Int, input),
                    new_tensor(batch_sizes(input, {}), ScalarType::Int, input), std::nullopt};
  if (with_permutation) results.permutation = new_tensor(batch_sizes(input, {shape.rows}), ScalarType::Int, input);
  if (plan.variant == LuVariant::empty) {
    torch::stable::zero_(results.info);
    if (results.permutation) results.permutation = lu_permutation(results.pivots, shape.rows);
  } else if (plan.variant == LuVariant::blocked) {
    torch::stable::copy_(results.lu, input);
    factor_blocked(results, shape, pivoting, tuning);
  } else {
    lu_small(plan, {matrices(input), nullptr, nullptr, 0, 0, 0, pivoting, true}, results);
  }
  return results;
}

namespace {

std::tuple<Tensor, Tensor, Tensor> lu_factor_ex(const Tensor& a, bool pivot) {
  check_matrices_of_numbers("lu_factor_ex", a);
  const LuFactors results = lu_factors(a, pivot, false);
  return {results.lu, results.pivots, results.info};
}

// P is empty without pivoting, as in PyTorch.
std::tuple<Tensor, Tensor, Tensor> lu(const Tensor& a, bool pivot) {
  const MatrixShape s = check_matrices_of_numbers("lu", a);
  const LuFactors results = lu_factors(a, pivot, pivot);
  const int64_t k = std::min(s.rows, s.columns);
  const ScalarType dtype = a.scalar_type();
  const Tensor p = new_tensor(pivot ? batch_sizes(a, {s.rows, s.rows}) : std::vector<int64_t>{0}, dtype, a);
  const Tensor l = new_tensor(batch_sizes(a, {s.rows, k}), dtype, a);
  const Tensor u = new_tensor(batch_sizes(a, {k, s.columns}), dtype, a);
  gpu::record(a, [&](gpu::Recording& recording) {
    auto extract = [&](const Tensor& result, uint32_t part) {
      if (result.numel() == 0) return;
      recording.kernel(std::string("lu_part") + complex_suffix(a))
          .buffer(0, results.lu)
          .buffer(1, pivot ? *results.permutation : results.pivots);
      recording.buffer(2, result).bytes(3, LuResultParams{.rows = grid_side(s.rows),
                                                          .columns = grid_side(s.columns),
                                                          .pivots = grid_side(k),
                                                          .matrices = 0,
                                                          .part = part});
      dispatch_elements(recording, result.numel());
    };
    extract(p, LU_PART_P);
    extract(l, LU_PART_L);
    extract(u, LU_PART_U);
  });
  return {p, l, u};
}

}  // namespace
}  // namespace metalcore

STABLE_TORCH_LIBRARY_FRAGMENT(metalcore, m) {
  m.def("lu_factor_ex(Tensor A, bool pivot) -> (Tensor, Tensor, Tensor)");
  m.def("lu(Tensor A, bool pivot) -> (Tensor, Tensor, Tensor)");
}

METALCORE_KERNELS(m) {
  m.impl<&metalcore::lu_factor_ex>("lu_factor_ex");
  m.impl<&metalcore::lu>("lu");
}
