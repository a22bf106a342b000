// sample(x, uniform, …) draws a class for each row of logits (rows, classes).
// topk(x, k, largest): values and indices of rows. renorm(x, limits, kind): what is kept of rows of logits or of
// probabilities.
#include "sampling.h"

#include "../../../kernels/sampling/sampling.h"
#include "../common/rows.h"

#include <algorithm>
#include <bit>
#include <string>
#include <tuple>

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

// The number of threadgroups that share a row of logits. It is 1 unless there are so few rows that most of a GPU idles.
uint32_t parts_of(const Tensor& x) {
  constexpr int64_t kLeastShare = 1024;  // elements, for which a second dispatch pays
  const int64_t rows = x.sizes()[0], length = x.sizes()[1];
  const int64_t fill = gpu::parallelism(x).fill_threadgroups;
  if (2 * rows > fill) return 1;
  const int64_t wanted = ceil_div(2 * fill, rows);
  return static_cast<uint32_t>(std::min({wanted, length / kLeastShare, int64_t{SAMPLE_PART_THREADS}}));
}

void sample_parts_into(const Tensor& classes, const Tensor& x, const Rows& logits, const Tensor& uniform,
                       double temperature, uint32_t most_parts) {
  const int64_t rows = x.sizes()[0], length = x.sizes()[1];
  const int64_t share = round_up<int64_t>(ceil_div<int64_t>(length, most_parts), 8);
  const uint32_t parts = grid_side(ceil_div(length, share));
  gpu::note_plan("sample", "parts", [&] { return "few rows: " + std::to_string(parts) + " threadgroups share one"; });
  const Tensor sums = new_tensor({rows * parts * 2}, ScalarType::Float, x);
  const SamplePartsParams params = {.length = grid_side(length),
                                    .parts = parts,
                                    .share = grid_side(share),
                                    .temperature = static_cast<float>(temperature),
                                    .x_stride = logits.stride};
  gpu::record(classes, [&](gpu::Recording& recording) {
    recording.kernel("sample_parts_", suffix(x.scalar_type())).buffer(0, logits.tensor).buffer(1, sums);
    recording.bytes(2, params).dispatch_threadgroups({parts, grid_side(rows)}, {SAMPLE_PART_THREADS});
    recording.kernel("sample_of_parts_", suffix(x.scalar_type())).buffer(0, logits.tensor).buffer(1, sums);
    recording.bytes(2, params).buffer(3, uniform).buffer(4, classes);
    recording.dispatch_threadgroups({grid_side(rows)}, {SAMPLE_PART_THREADS});
  });
}

}  // namespace

void sample_into(const Tensor& classes, const Tensor& x, const Tensor& uniform, double temperature, int64_t top_k,
                 double top_p, double min_p, const MaybeTensor& options) {
  const int64_t rows = x.sizes()[0], length = x.sizes()[1];
  const Rows logits = rows_of(x, length);
  const bool from_all = !options && (top_k <= 0 || top_k >= length) && top_p >= 1 && min_p <= 0;
  if (const uint32_t parts = from_all ? parts_of(x) : 1; parts > 1) {
    sample_parts_into(classes, x, logits, uniform, temperature, parts);
    return;
  }
  gpu::note_plan("sample", "group", [] { return std::string("a threadgroup has a row"); });
  gpu::record(classes, [&](gpu::Recording& recording) {
    recording.kernel("sample_", suffix(x.scalar_type())).buffer(0, logits.tensor).buffer(1, uniform).buffer(2, classes);
    recording.bytes(3, SampleParams{.length = grid_side(length),
                                    .per_row = options.has_value(),
                                    .options = {.temperature = static_cast<float>(temperature),
                                                .top_k = static_cast<float>(std::clamp<int64_t>(top_k, 0, length)),
                                                .top_p = static_cast<float>(top_p),
                                                .min_p = static_cast<float>(min_p)},
                                    .start = start_of(logits.tensor),
                                    .x_stride = logits.stride});
    recording.buffer(4, options);
    recording.dispatch_threadgroups({grid_side(rows)}, {selection_threads(length, row_tuning(x).looped_threads)});
  });
}

namespace {

void check_rows(const char* op, const Tensor& x) {
  check_float(op, "x", x);
  check(x.dim() == 2, "metalcore::", op, ": x must have 2 dimensions, not ", x.dim());
  check(x.sizes()[1] <= INT32_MAX, "metalcore::", op, ": a row of ", x.sizes()[1],
        " elements is longer than kernels take");
}

std::tuple<Tensor, Tensor> topk(const Tensor& x, int64_t k, bool largest) {
  const char* const op = "topk";
  check_rows(op, x);
  const int64_t rows = x.sizes()[0], length = x.sizes()[1];
  check(k >= 0 && k <= length && k <= TOP_K_LONG_MOST, "metalcore::", op, ": k is ", k, " for rows of ", length,
        ", and must be at most ", TOP_K_LONG_MOST);
  const Tensor values = new_tensor({rows, k}, x.scalar_type(), x);
  const Tensor indices = new_tensor({rows, k}, ScalarType::Long, x);
  topk_into(values, indices, x, largest);
  return {values, indices};
}

}  // namespace

void topk_into(const Tensor& values, const Tensor& indices, const Tensor& x, bool largest) {
  if (values.numel() == 0) return;
  const int64_t rows = x.sizes()[0], length = x.sizes()[1], k = values.sizes()[1];
  const Rows numbers = rows_of(x, length);
  const bool is_long = k > TOP_K_MOST;
  MaybeTensor sorted;
  if (is_long)
    sorted = new_tensor({rows, 2 * static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(k)))}, ScalarType::Int, x);
  gpu::note_plan("topk", is_long ? "long" : "group", [&] {
    return std::string("a threadgroup has a row, and sorts in ") + (is_long ? "device" : "threadgroup") + " memory";
  });
  gpu::record(values, [&](gpu::Recording& recording) {
    recording.kernel(is_long ? "top_k_long_" : "top_k_", suffix(x.scalar_type()));
    recording.buffer(0, numbers.tensor).buffer(1, values).buffer(2, indices);
    recording.bytes(3, TopKParams{.length = grid_side(length),
                                  .k = grid_side(k),
                                  .smallest = !largest,
                                  .start = start_of(numbers.tensor),
                                  .x_stride = numbers.stride});
    if (sorted) recording.buffer(4, sorted);
    recording.dispatch_threadgroups({grid_side(rows)}, {selection_threads(length, row_tuning(x).looped_threads)});
  });
}

namespace {

Tensor renorm(const Tensor& x, const Tensor& limits_, int64_t kind) {
  const char* const op = "renorm_rows";
  check_rows(op, x);
  check_float32(op, "limits", limits_);
  check_same_device(op, "limits", limits_, x);
  const int64_t rows = x.sizes()[0];
  check(limits_.numel() == rows, "metalcore::", op, ": limits must have ", rows, " elements, not ", limits_.numel());
  check(kind >= RENORM_MASK_TOP_K && kind <= RENORM_TOP_P, "metalcore::", op, ": there is no kind ", kind);
  const Tensor y = new_tensor(x.sizes(), x.scalar_type(), x);
  renorm_into(y, x, as_contiguous(limits_), kind);
  return y;
}

}  // namespace

void renorm_into(const Tensor& y, const Tensor& x, const Tensor& limits, int64_t kind) {
  if (y.numel() == 0) return;
  const int64_t rows = x.sizes()[0], length = x.sizes()[1];
  const Rows numbers = rows_of(x, length);
  gpu::note_plan("renorm_rows", "group", [] { return std::string("a threadgroup has a row"); });
  gpu::record(y, [&](gpu::Recording& recording) {
    recording.kernel("renorm_", suffix(x.scalar_type())).buffer(0, numbers.tensor).buffer(1, limits).buffer(2, y);
    recording.bytes(
        3, RenormParams{.length = grid_side(length), .kind = static_cast<uint32_t>(kind), .x_stride = numbers.stride});
    recording.dispatch_threadgroups({grid_side(rows)}, {selection_threads(length, row_tuning(x).looped_threads)});
  });
}

}  // namespace metalcore

STABLE_TORCH_LIBRARY_FRAGMENT(metalcore, m) {
  m.def(
      "sample(Tensor x, Tensor uniform, float temperature, int top_k, float top_p, float min_p, Tensor? options=None) "
      "-> Tensor");
  m.def("topk(Tensor x, int k, bool largest) -> (Tensor, Tensor)");
  m.def("renorm_rows(Tensor x, Tensor limits, int kind) -> Tensor");
}

METALCORE_KERNELS(m) {
  m.impl<&metalcore::sample>("sample");
  m.impl<&metalcore::topk>("topk");
  m.impl<&metalcore::renorm>("renorm_rows");
}
