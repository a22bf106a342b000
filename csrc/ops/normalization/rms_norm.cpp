// rms_norm and add_rms_norm, over the last dimensions.
#include "norms.h"

#include "../../../kernels/normalization/normalization.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <tuple>

namespace metalcore {
namespace {

// The kernels of all variants except "thread" come in two layouts of the rows: `aligned`, and any.
gpu::Recording& kernel(gpu::Recording& recording, const char* op, const RowPlan& plan, const char* stage, bool aligned,
                       ScalarType rows, ScalarType weight) {
  return recording.kernel(op, "_", plan.variant, stage, aligned && !plan.threads ? "_aligned_" : "_", suffix(rows),
                          rows == weight ? "" : "_float");
}

// The rows of a tensor, for kernels of the split variant or of another one.
NestedRows rows_for(bool split, const Tensor& tensor, int64_t length) {
  return split ? flat_rows_of(tensor, length) : nested_rows_of(tensor, length);
}

void check_offset(const char* op, double offset, const MaybeTensor& weight) {
  check(offset == 0 || weight, "metalcore::", op, ": there is no weight to which offset could be added");
}

// Rows that are too long for a threadgroup's registers in two dispatches: threadgroups have `share` elements of some
// rows each, sums first and results then.
constexpr uint32_t kSplitThreads = 512;
constexpr int64_t kSplitColumns = kSplitThreads * 8;  // that they take at a time

struct SplitPlan {
  RowPlan rows;
  uint32_t chunk_rows;
};

// `least_rows` is how many rows a threadgroup has before there are more threadgroups.
SplitPlan plan_split(const NormShape& shape, const Tensor& on, int64_t least_rows) {
  const int64_t fill = gpu::parallelism(on).fill_threadgroups;
  const int64_t share = round_up<int64_t>(
      ceil_div(shape.length, std::min<int64_t>(ceil_div<int64_t>(shape.length, kSplitColumns), fill)), 8);
  const uint32_t splits = grid_side(ceil_div(shape.length, share));
  const int64_t wanted = std::clamp<int64_t>(fill / splits, 1, ceil_div(shape.rows, least_rows));
  const auto chunk_rows = static_cast<uint32_t>(std::min<int64_t>(ceil_div(shape.rows, wanted), RMS_NORM_CHUNK_ROWS));
  const uint32_t chunks = grid_side(ceil_div<int64_t>(shape.rows, chunk_rows));
  return {{"split", {splits, chunks}, {kSplitThreads}, false, splits, grid_side(share)}, chunk_rows};
}

// A threadgroup that walks a row twice has it in the cache the second time, and the sums at once. But few rows leave
// most of a GPU idle for longer than a second dispatch takes.
constexpr int64_t kWalkedInADispatch = 28 * 1024;
bool better_split(const NormShape& shape, const Tensor& on) {
  const int64_t fill = gpu::parallelism(on).fill_threadgroups;
  return shape.length * (fill - 2 * shape.rows) > kWalkedInADispatch * fill;
}

std::string why_split(const RowPlan& plan, int64_t length) {
  return std::to_string(plan.splits) + " threadgroups share a row of " + std::to_string(length) + ", in two dispatches";
}

SplitPlan plan_forward(const NormShape& shape, const Tensor& on, const RowKernels& kernels) {
  const RowPlan plan = plan_rows(shape.rows, shape.length, 1, on, kernels);
  const bool looped = std::strcmp(plan.variant, "looped") == 0 && !norm_tuning(on).few_registers;
  return looped && better_split(shape, on) ? plan_split(shape, on, 1) : SplitPlan{plan, 0};
}

// Fills y, with a residual `sum`, and the rows' scales where they are wanted; all are contiguous.
void normalize_into(const char* op, const Tensor& y, const Tensor& sum, const Tensor& input,
                    const MaybeTensor& residual, int64_t dims, const MaybeTensor& weight_, double eps, double offset,
                    const MaybeTensor& wanted_scales = std::nullopt) {
  const NormShape shape = norm_shape(op, input.sizes(), dims);
  const MaybeTensor weight = kernel_weight(op, weight_, input, shape);
  const ScalarType dtype = input.scalar_type();
  if (shape.rows == 0 || shape.length == 0) return;

  RowKernels kernels = one_array(shape.length);
  kernels.split = false;  // what plan_forward() decides
  const SplitPlan split = plan_forward(shape, input, kernels);
  const RowPlan& plan = split.rows;
  const bool shared = split.chunk_rows > 0;
  const NestedRows x = rows_for(shared, input, shape.length);
  const NestedRows added = residual ? rows_for(shared, *residual, shape.length) : x;
  gpu::note_plan(residual ? "add_rms_norm" : op, plan.variant, [&] {
    return split.chunk_rows ? why_split(plan, shape.length) + ", since there are few"
                            : why_rows(plan, shape.length, 1, input, kernels);
  });
  const RmsNormParams params{
      .length = grid_side(shape.length),
      .rows = grid_side(shape.rows),
      .eps = static_cast<float>(eps),
      .offset = static_cast<float>(offset),
      .has_weight = weight.has_value(),
      .has_residual = residual.has_value(),
      .splits = plan.splits,
      .share = plan.share,
      .chunk_rows = split.chunk_rows,
      .with_scales = wanted_scales.has_value(),
      .x = x.strides,
      .residual = added.strides,
  };
  const bool aligned = all_aligned16({&x, &added}, {&weight}, shape.length) &&
                       aligned16(y, shape.length, shape.length) && aligned16(sum, shape.length, shape.length);
  const MaybeTensor parts =
      shared ? MaybeTensor(new_tensor({plan.splits * shape.rows}, ScalarType::Float, input)) : std::nullopt;
  const ScalarType weight_dtype = weight ? weight->scalar_type() : dtype;
  const MaybeTensor residual_rows = given_if(residual.has_value(), added.tensor);
  gpu::record(y, [&](gpu::Recording& recording) {
    if (shared) {
      kernel(recording, op, plan, "_squares", aligned, dtype, dtype);
      recording.buffer(0, x.tensor).buffer(1, residual_rows).buffer(2, sum).buffer(3, parts).bytes(4, params);
      dispatch(recording, plan);
      kernel(recording, op, plan, "", aligned, dtype, weight_dtype);
      recording.buffer(0, x.tensor).buffer(1, weight).buffer(2, y).buffer(3, sum).buffer(4, parts).bytes(5, params);
      recording.buffer(6, wanted_scales);
      dispatch(recording, plan);
      return;
    }
    kernel(recording, op, plan, "", aligned, dtype, weight_dtype);
    recording.buffer(0, x.tensor).buffer(1, residual_rows).buffer(2, weight);
    recording.buffer(3, y).buffer(4, sum).bytes(5, params).buffer(6, wanted_scales);
    dispatch(recording, plan);
  });
}

std::tuple<Tensor, Tensor> normalize(const char* op, const Tensor& input, const MaybeTensor& residual, int64_t dims,
                                     const MaybeTensor& weight, double eps, double offset) {
  check_float(op, "x", input);
  check_offset(op, offset, weight);
  if (residual) check_like(op, "residual", *residual, input);
  const Tensor y = new_like(input);
  const Tensor sum = residual ? new_like(input) : y;
  normalize_into(op, y, sum, input, residual, dims, weight, eps, offset);
  return {y, sum};
}

Tensor rms_norm(const Tensor& x, int64_t dims, const MaybeTensor& weight, double eps, double offset) {
  return std::get<0>(normalize("rms_norm", x, std::nullopt, dims, weight, eps, offset));
}

std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual, int64_t dims,
                                        const MaybeTensor& weight, double eps, double offset) {
  return normalize("rms_norm", x, residual, dims, weight, eps, offset);
}

// The plan of the derivative, with rows that several threadgroups share instead of rows that one walks twice, where
// registers suffice.
struct BackwardPlan {
  NormBackwardPlan parts;
  SplitPlan rows;
};

constexpr int64_t kLeastChunk = 8;

// Long rows that a threadgroup's registers hold, so that x and the gradient are read once. There are enough rows for
// all threadgroups that a GPU runs at once. A core has registers for one of them.
RowKernels held_kernels(const Tensor& on) {
  return on.element_size() == 2 ? RowKernels{false, "block8", 32, 512, false}
                                : RowKernels{false, "block4", 16, 1024, false};
}
bool better_held(const NormShape& shape, const Tensor& on, bool aligned) {
  const RowKernels kernels = held_kernels(on);
  return aligned && shape.rows >= gpu::parallelism(on).fill_threadgroups &&
         shape.length <= std::min(row_tuning(on).block_row, kernels.block_elements * kernels.block_threads);
}

NormBackwardPlan plan_held(const NormShape& shape, const Tensor& on) {
  const RowKernels kernels = held_kernels(on);
  RowPlan rows = plan_rows(shape.rows, shape.length, 1, on, kernels);
  rows.grid.x = std::min(rows.grid.x, std::max(1u, row_tuning(on).row_threads / gpu::kMaxThreads));
  return {rows, kernels, 1, rows.grid.x};
}

// Rows that one threadgroup would walk twice, as `plan` has them.
BackwardPlan plan_long(NormBackwardPlan plan, const NormShape& shape, const Tensor& on, bool aligned) {
  if (better_held(shape, on, aligned)) {
    const NormBackwardPlan held = plan_held(shape, on);
    return {held, {held.rows, 0}};
  }
  const SplitPlan split = plan_split(shape, on, kLeastChunk);
  plan.chunks = split.rows.grid.y;
  return {plan, split};
}

// Returns the gradients of x and of the weight (empty if it is not wanted). With a residual, `x` is the sum x +
// residual, and `sum_grad` is the gradient that reaches this sum other than through y. `eps` does not matter where the
// rows' scales are given, one float32 value each and contiguous.
std::tuple<Tensor, Tensor> differentiate(const Tensor& grad, const Tensor& input, const MaybeTensor& given_scales,
                                         const MaybeTensor& sum_grad, int64_t dims, const MaybeTensor& weight_,
                                         double eps, double offset, bool weight_wanted) {
  const char* op = "rms_norm_backward";
  check_float(op, "x", input);
  check_like(op, "grad", grad, input);
  if (sum_grad) check_like(op, "sum_grad", *sum_grad, input);
  check_offset(op, offset, weight_);
  check(!weight_wanted || weight_, "metalcore::", op, ": there is no weight to differentiate by");
  const NormShape shape = norm_shape(op, input.sizes(), dims);
  const MaybeTensor weight = kernel_weight(op, weight_, input, shape);
  const ScalarType dtype = input.scalar_type();
  const int64_t none[1] = {0};

  const Tensor gx = new_like(input);
  Tensor gw = weight_wanted ? new_like(*weight_) : new_tensor(Sizes(none, 1), dtype, input);
  if (shape.rows == 0 || shape.length == 0) {
    if (weight_wanted) torch::stable::zero_(gw);
    return {gx, gw};
  }
  const NormBackwardPlan usual = plan_norm_backward(shape, input, sum_grad.has_value());
  const bool is_long = std::strcmp(usual.rows.variant, "looped") == 0 && !norm_tuning(input).few_registers;
  const auto rows_in = [&](const Tensor& tensor) {
    return is_long ? flat_rows_of(tensor, shape.length) : usual.rows_of(tensor, shape.length);
  };
  const NestedRows x = rows_in(input), g = rows_in(grad), added = sum_grad ? rows_in(*sum_grad) : g;
  const bool aligned = all_aligned16({&x, &g, &added}, {&weight}, shape.length);
  const BackwardPlan plan = is_long ? plan_long(usual, shape, input, aligned) : BackwardPlan{usual, {usual.rows, 0}};
  const bool shared = plan.rows.chunk_rows > 0;
  const RowPlan& rows = plan.rows.rows;
  gpu::note_plan(op, rows.variant, [&] {
    return shared ? why_split(rows, shape.length) : why_rows(rows, shape.length, 1, input, plan.parts.kernels);
  });
  const ScalarType weight_dtype = weight ? weight->scalar_type() : dtype;
  // Whether a threadgroup has all rows of its columns, so that it makes the weight's gradient itself.
  const bool whole = shared && weight_wanted && plan.parts.chunks == 1 && gw.scalar_type() == weight_dtype;
  const bool partial_wanted = weight_wanted && !whole;
  const auto floats = [&](bool wanted, Sizes sizes) {
    return wanted ? MaybeTensor(new_tensor(sizes, ScalarType::Float, input)) : std::nullopt;
  };
  const bool separate = !shared && plan.parts.separate();  // the weight's gradient is another kernel's
  const MaybeTensor scales = floats(separate, {shape.rows});
  const MaybeTensor partial = floats(partial_wanted, {plan.parts.chunks, shape.length});
  const MaybeTensor parts = floats(shared, {2 * rows.splits * shape.rows});
  const RmsNormParams params{
      .length = grid_side(shape.length),
      .rows = grid_side(shape.rows),
      .eps = static_cast<float>(eps),
      .offset = static_cast<float>(offset),
      .has_weight = weight.has_value(),
      .has_residual = sum_grad.has_value(),
      .streams = grid_side(plan.parts.chunks),
      .partial = partial_wanted,
      .splits = rows.splits,
      .share = rows.share,
      .chunk_rows = shared ? plan.rows.chunk_rows : grid_side(plan.parts.chunk_rows),
      .aligned = aligned,
      .whole = whole,
      .with_scales = given_scales.has_value(),
      .x = x.strides,
      .residual = added.strides,
      .grad = g.strides,
  };
  gpu::record(gx, [&](gpu::Recording& recording) {
    if (shared) {
      kernel(recording, op, rows, "_sums", aligned, dtype, weight_dtype);
      recording.buffer(0, g.tensor).buffer(1, x.tensor).buffer(2, weight).buffer(3, parts).bytes(4, params);
      dispatch(recording, rows);
    }
    kernel(recording, op, rows, "", aligned, dtype, weight_dtype);
    recording.buffer(0, g.tensor).buffer(1, x.tensor).buffer(2, weight);
    recording.buffer(3, given_if(sum_grad.has_value(), added.tensor)).buffer(4, gx);
    recording.buffer(5, separate ? scales : partial).bytes(6, params).buffer(7, given_scales);
    if (shared) recording.buffer(8, parts).buffer(9, given_if(whole, gw));
    dispatch(recording, rows);
    if (!partial_wanted) return;
    if (separate) {
      recording.kernel("rms_norm_weight_partial_", suffix(dtype));
      recording.buffer(0, g.tensor).buffer(1, x.tensor).buffer(2, scales).buffer(3, partial).bytes(4, params);
      recording.dispatch_threads({grid_side(ceil_div<int64_t>(shape.length, 4)), params.streams}, {256});
    }
    record_column_sums(recording, *partial, plan.parts.chunks, gw);
  });
  return {gx, gw};
}

std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& grad, const Tensor& x, const MaybeTensor& sum_grad,
                                             int64_t dims, const MaybeTensor& weight, double eps, double offset,
                                             bool weight_wanted) {
  return differentiate(grad, x, std::nullopt, sum_grad, dims, weight, eps, offset, weight_wanted);
}

}  // namespace

std::tuple<Tensor, Tensor> rms_norm_with_scales(const Tensor& x, int64_t dims, const MaybeTensor& weight, double eps) {
  const Tensor y = new_like(x);
  Tensor scales = new_statistics(x, dims);
  if (y.numel() == 0) torch::stable::zero_(scales);
  normalize_into("rms_norm", y, y, x, std::nullopt, dims, weight, eps, 0, scales);
  return {y, scales};
}

std::tuple<Tensor, Tensor> rms_norm_backward_of_scales(const Tensor& grad, const Tensor& x, const Tensor& scales,
                                                       int64_t dims, const MaybeTensor& weight, bool weight_wanted) {
  return differentiate(grad, x, as_contiguous(scales), std::nullopt, dims, weight, 0, 0, weight_wanted);
}

void rms_norm_into(const Tensor& y, const Tensor& x, const MaybeTensor& weight, double eps) {
  normalize_into("rms_norm", y, y, x, std::nullopt, 1, weight, eps, 0);
}

void add_rms_norm_into(const Tensor& y, const Tensor& sum, const Tensor& x, const Tensor& residual,
                       const MaybeTensor& weight, double eps) {
  normalize_into("rms_norm", y, sum, x, residual, 1, weight, eps, 0);
}

}  // namespace metalcore

STABLE_TORCH_LIBRARY_FRAGMENT(metalcore, m) {
  m.def("rms_norm(Tensor x, int dims, Tensor? weight, float eps, float offset) -> Tensor");
  m.def(
      "add_rms_norm(Tensor x, Tensor residual, int dims, Tensor? weight, float eps, float offset) -> (Tensor, Tensor)");
  m.def(
      "rms_norm_backward(Tensor grad, Tensor x, Tensor? sum_grad, int dims, Tensor? weight, float eps, "
      "float offset, bool weight_wanted) -> (Tensor, Tensor)");
}

METALCORE_KERNELS(m) {
  m.impl<&metalcore::rms_norm>("rms_norm");
  m.impl<&metalcore::add_rms_norm>("add_rms_norm");
  m.impl<&metalcore::rms_norm_backward>("rms_norm_backward");
}
