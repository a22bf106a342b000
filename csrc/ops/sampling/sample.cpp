// sample(x, uniform, …) draws a class for each row of logits (rows, classes).

#include "sampling.h"
#include "../../../kernels/sampling/sample.h"
#include "../common/rows.h"

#include <algorithm>
#include <string>

namespace metalcore {
namespace {

Tensor sample(const Tensor& x, const Tensor& uniform_, double temperature, int64_t top_k, double top_p, double min_p,
              const MaybeTensor& options_) {
  const char* op = "sample";
  check_float(op, "x", x);
  check(x.dim() == 2 && x.numel() > 0, "metalcore::", op, ": x must have 2 dimensions and not be empty");
  const int64_t rows = x.sizes()[0], length = x.sizes()[1];
  check_float32(op, "uniform", uniform_);
  check_same_device(op, "uniform", uniform_, x);
  check(uniform_.numel() == rows, "metalcore::", op, ": uniform must have ", rows, " elements, not ", uniform_.numel());
  check(temperature >= 0, "metalcore::", op, ": temperature must not be negative");
  check(length <= INT32_MAX, "metalcore::", op, ": a row of ", length, " elements is longer than kernels take");
  MaybeTensor options;
  if (options_) {
    check_float32(op, "options", *options_);
    check_same_device(op, "options", *options_, x);
    check(options_->numel() == 4 * rows, "metalcore::", op, ": options must have 4 numbers for each row, not ",
          options_->numel());
    options = as_contiguous(*options_);
  }
  const Tensor classes = new_tensor({rows}, ScalarType::Long, x);
  sample_into(classes, x, as_contiguous(uniform_), temperature, top_k, top_p, min_p, options);
  return classes;
}

}  // namespace

void sample_into(const Tensor& classes, const Tensor& x, const Tensor& uniform, double temperature, int64_t top_k,
                 double top_p, double min_p, const MaybeTensor& options) {
  const int64_t rows = x.sizes()[0], length = x.sizes()[1];
  const Rows logits = rows_of(x, length);
  gpu::note_plan("sample", "group", [] { return std::string("a threadgroup has a row"); });
  gpu::record(classes, [&](gpu::Recording& recording) {
    recording.kernel("sample_", suffix(x.scalar_type())).buffer(0, logits.tensor).buffer(1, uniform).buffer(2, classes);
    recording.bytes(3, SampleParams{.length = grid_side(length),
                                    .per_row = options.has_value(),
                                    .options = {.temperature = static_cast<float>(temperature),
                                                .top_k = static_cast<float>(std::clamp<int64_t>(top_k, 0, length)),
                                                .top_p = static_cast<float>(top_p),
                                                .min_p = static_cast<float>(min_p)},
                                    .x_stride = logits.stride});
    recording.buffer(4, options);
    recording.dispatch_threadgroups({grid_side(rows)}, {selection_threads(length, row_tuning(x).looped_threads)});
  });
}

}  // namespace metalcore

STABLE_TORCH_LIBRARY_FRAGMENT(metalcore, m) {
  m.def(
      "sample(Tensor x, Tensor uniform, float temperature, int top_k, float top_p, float min_p, Tensor? options=None) "
      "-> Tensor");
}

METALCORE_KERNELS(m) { m.impl<&metalcore::sample>("sample"); }
