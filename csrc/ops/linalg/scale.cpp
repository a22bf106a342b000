#include "scale.h"

#include "../../../kernels/linalg/scale.h"
#include "matrices.h"

#include <algorithm>

namespace metalcore {

namespace {

ScaleParams params_of(int64_t rows, int64_t columns, int64_t batch) {
  constexpr int64_t kElements = 16384, kParts = 1024;  // enough for a threadgroup; each one reads all parts' results
  const int64_t part_rows = std::max(ceil_div(kElements, columns), ceil_div(rows, kParts));
  return {.batch_stride = 0,
          .row_stride = 0,
          .column_stride = 0,
          .matrices = grid_side(batch),
          .rows = grid_side(rows),
          .columns = grid_side(columns),
          .parts = grid_side(ceil_div(rows, part_rows)),
          .part_rows = grid_side(part_rows)};
}

}  // namespace

Scaled scaled(const Tensor& input) {
  const Tensor scales = new_tensor(batch_sizes(input, {1, 1}), ScalarType::Float, input);
  const Tensor result = new_tensor(input.sizes(), ScalarType::Float, input);
  if (input.numel() == 0) {
    Tensor ones = scales;
    torch::stable::fill_(ones, 1.0);
    return {result, scales};
  }
  const Matrices a = matrices(input);
  ScaleParams p = params_of(a.rows, a.columns, a.batch);
  p.batch_stride = a.batch_stride, p.row_stride = a.row_stride, p.column_stride = a.column_stride;
  const Tensor magnitudes = new_tensor({a.batch, p.parts}, ScalarType::Int, input);
  const gpu::Size groups{grid_side(a.batch * p.parts)}, threads{SCALE_THREADS};
  gpu::record(input, [&](gpu::Recording& recording) {
    recording.kernel("scale_magnitudes").buffer(0, a.tensor).buffer(1, magnitudes).bytes(2, p);
    recording.dispatch_threadgroups(groups, threads);
    recording.kernel("scale_matrices").buffer(0, a.tensor).buffer(1, magnitudes).buffer(2, result).buffer(3, scales);
    recording.bytes(4, p).dispatch_threadgroups(groups, threads);
  });
  return {result, scales};
}

}  // namespace metalcore
