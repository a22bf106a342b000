#include "qr_small.h"

namespace metalcore {

Step small_step(const QrPlan& plan, uint32_t batch) {
  if (plan.variant == QrVariant::simd)
    return {plan.simd_kernel, {ceil_div(batch, plan.matrices_per_threadgroup)}, {128}};
  return {plan.levels[0].kernel, {batch}, {plan.levels[0].threads}};
}

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
  const Step step = small_step(plan, p.matrices);
  gpu::encode(a.tensor, [&](gpu::Encoder& encoder) {
    encoder.kernel(step.kernel).buffer(0, a.tensor).buffer(1, q).buffer(2, r).bytes(3, p).buffer(4, tau);
    encoder.dispatch_threadgroups(step.grid, step.threadgroup);
  });
}

}  // namespace metalcore
