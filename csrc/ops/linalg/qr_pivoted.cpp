// qr_pivoted(A, columns, rcond) -> (W, order, rank): QR with column pivoting of A's first `columns` columns. W, the
// transpose, holds R, the reflectors below its diagonal, and in the columns after them Qᵀ times A's. Its rows of a
// number at or above the rank mean nothing.
#include "../../../kernels/linalg/lstsq.h"
#include "matrices.h"

#include <algorithm>
#include <tuple>
#include <vector>

namespace metalcore {
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

}  // namespace
}  // namespace metalcore

STABLE_TORCH_LIBRARY_FRAGMENT(metalcore, m) {
  m.def("qr_pivoted(Tensor A, int columns, float rcond) -> (Tensor, Tensor, Tensor)");
}

METALCORE_KERNELS(m) { m.impl<&metalcore::qr_pivoted>("qr_pivoted"); }
