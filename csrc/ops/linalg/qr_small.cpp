#include "qr_small.h"

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
  const QrParams p = small_params(a, task);
  const bool simd = plan.variant == QrVariant::simd;
  gpu::record(a.tensor, [&](gpu::Recording& recording) {
    recording.kernel(simd ? plan.simd_kernel : plan.levels[0].kernel)
        .buffer(0, a.tensor)
        .buffer(1, q)
        .buffer(2, r)
        .bytes(3, p)
        .buffer(4, tau);
    if (simd)
      recording.dispatch_threadgroups({ceil_div(p.matrices, plan.matrices_per_threadgroup)}, {128});
    else
      recording.dispatch_threadgroups({p.matrices}, {plan.levels[0].threads});
  });
}

}  // namespace metalcore
