
#include "qr.h"
#include "../../gpu/cost.h"

#include <algorithm>

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
    const double flops = 4.0 * p.rows * p.columns * std::max(p.columns, p.q_columns);
    const double bytes = 4.0 * p.rows * (p.columns + p.q_columns) + 4.0 * p.r_rows * p.columns;
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

}  // namespace metalcore
