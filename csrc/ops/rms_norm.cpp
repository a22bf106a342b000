// rms_norm and add_rms_norm, over the last dimensions.
#include "../../kernels/rms_norm.h"
#include "rows.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <tuple>

namespace metalcore {
namespace {

using MaybeTensor = std::optional<Tensor>;

struct Shape {
  int64_t rows;
  int64_t length;
};

// The last `dims` dimensions are normalized together.
Shape shape_of(const char* op, Sizes sizes, int64_t dims) {
  check(0 < dims && dims <= static_cast<int64_t>(sizes.size()), "metalcore::", op, ": cannot normalize the last ", dims,
        " of ", sizes.size(), " dimensions");
  Shape shape{1, 1};
  for (size_t d = 0; d < sizes.size(); ++d) (d + dims < sizes.size() ? shape.rows : shape.length) *= sizes[d];
  return shape;
}

void check_like(const char* op, const char* argument, const Tensor& tensor, const Tensor& as) {
  check_same_device(op, argument, tensor, as);
  check_same_dtype(op, argument, tensor, as);
  check_same_shape(op, argument, tensor, as);
}

// Kernels take a weight of the rows' dtype or of float32. A weight of another dtype is converted first.
MaybeTensor kernel_weight(const char* op, const MaybeTensor& weight, const Tensor& x, const Shape& shape) {
  if (!weight) return std::nullopt;
  check_float(op, "weight", *weight);
  check_same_device(op, "weight", *weight, x);
  check(weight->numel() == shape.length, "metalcore::", op, ": weight must have ", shape.length, " elements, not ",
        weight->numel());
  const ScalarType dtype = weight->scalar_type();
  if (dtype == x.scalar_type() || dtype == ScalarType::Float) return as_contiguous(*weight);
  return as_contiguous(torch::stable::to(*weight, ScalarType::Float));
}

// The kernels of all variants except "thread" come in two layouts of the rows: `aligned`, and any.
gpu::Recording& kernel(gpu::Recording& recording, const char* op, const RowPlan& plan, const char* stage, bool aligned,
                       ScalarType rows, ScalarType weight) {
  return recording.kernel(op, "_", plan.variant, stage, aligned && !plan.threads ? "_aligned_" : "_", suffix(rows),
                          rows == weight ? "" : "_float");
}

bool all_aligned16(std::initializer_list<const Rows*> rows, const MaybeTensor& weight, int64_t length) {
  return std::all_of(rows.begin(), rows.end(),
                     [&](const Rows* r) { return aligned16(r->tensor, r->stride, length); }) &&
         (!weight || aligned16(*weight, 0, length));
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
SplitPlan plan_split(const Shape& shape, const Tensor& on, int64_t least_rows) {
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
bool better_split(const Shape& shape, const Tensor& on) {
  const int64_t fill = gpu::parallelism(on).fill_threadgroups;
  return shape.length * (fill - 2 * shape.rows) > kWalkedInADispatch * fill;
}

std::string why_split(const RowPlan& plan, int64_t length) {
  return std::to_string(plan.splits) + " threadgroups share a row of " + std::to_string(length) + ", in two dispatches";
}

SplitPlan plan_forward(const Shape& shape, const Tensor& on, const RowKernels& kernels) {
  const RowPlan plan = plan_rows(shape.rows, shape.length, 1, on, kernels);
  const bool looped = std::strcmp(plan.variant, "looped") == 0;
  return looped && better_split(shape, on) ? plan_split(shape, on, 1) : SplitPlan{plan, 0};
}

// Without a residual the kernels do not touch `residual` and `sum`, but Metal needs a buffer for each argument.
std::tuple<Tensor, Tensor> normalize(const char* op, const Tensor& input, const MaybeTensor& residual, int64_t dims,
                                     const MaybeTensor& weight_, double eps) {
  check_float(op, "x", input);
  if (residual) check_like(op, "residual", *residual, input);
  const Shape shape = shape_of(op, input.sizes(), dims);
  const MaybeTensor weight = kernel_weight(op, weight_, input, shape);
  const ScalarType dtype = input.scalar_type();
  const Tensor y = new_like(input);
  const Tensor sum = residual ? new_like(input) : y;
  if (shape.rows == 0 || shape.length == 0) return {y, sum};

  const Rows x = rows_of(input, shape.length), added = residual ? rows_of(*residual, shape.length) : x;
  RowKernels kernels = one_array(shape.length);
  kernels.split = false;  // what plan_forward() decides
  const SplitPlan split = plan_forward(shape, input, kernels);
  const RowPlan& plan = split.rows;
  gpu::note_plan(residual ? "add_rms_norm" : op, plan.variant, [&] {
    return split.chunk_rows ? why_split(plan, shape.length) + ", since there are few"
                            : why_rows(plan, shape.length, 1, input, kernels);
  });
  const RmsNormParams params{
      .length = grid_side(shape.length),
      .rows = grid_side(shape.rows),
      .eps = static_cast<float>(eps),
      .has_weight = weight.has_value(),
      .has_residual = residual.has_value(),
      .splits = plan.splits,
      .share = plan.share,
      .chunk_rows = split.chunk_rows,
      .x_stride = x.stride,
      .residual_stride = added.stride,
  };
  const bool aligned = all_aligned16({&x, &added}, weight, shape.length);
  const bool shared = split.chunk_rows > 0;
  const Tensor parts = new_tensor({shared ? plan.splits * shape.rows : 0}, ScalarType::Float, input);
  const ScalarType weight_dtype = weight ? weight->scalar_type() : dtype;
  const Tensor& weights = weight ? *weight : x.tensor;  // Metal needs a buffer for each argument
  gpu::record(y, [&](gpu::Recording& recording) {
    if (shared) {
      kernel(recording, op, plan, "_squares", aligned, dtype, dtype);
      recording.buffer(0, x.tensor).buffer(1, added.tensor).buffer(2, sum).buffer(3, parts).bytes(4, params);
      dispatch(recording, plan);
      kernel(recording, op, plan, "", aligned, dtype, weight_dtype);
      recording.buffer(0, x.tensor).buffer(1, weights).buffer(2, y).buffer(3, sum).buffer(4, parts).bytes(5, params);
      dispatch(recording, plan);
      return;
    }
    kernel(recording, op, plan, "", aligned, dtype, weight_dtype);
    recording.buffer(0, x.tensor).buffer(1, added.tensor).buffer(2, weights);
    recording.buffer(3, y).buffer(4, sum).bytes(5, params);
    dispatch(recording, plan);
  });
  return {y, sum};
}

Tensor rms_norm(const Tensor& x, int64_t dims, const MaybeTensor& weight, double eps) {
  return std::get<0>(normalize("rms_norm", x, std::nullopt, dims, weight, eps));
}

std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual, int64_t dims,
                                        const MaybeTensor& weight, double eps) {
  return normalize("rms_norm", x, residual, dims, weight, eps);
}

// How the backward kernels share the rows, and the parts of the weight's gradient that they make. There are as many
// parts as teams of threads that keep one in registers. Where a thread takes a row, a separate kernel makes one for
// each chunk of rows.
struct BackwardPlan {
  SplitPlan rows;
  RowKernels kernels;
  int64_t chunk_rows, chunks;
};

// A thread has 4 elements of short rows and of float32, which take 16 bytes then, and 8 of others.
constexpr int64_t kShortRow = 256;
constexpr int64_t kLeastChunk = 8;

BackwardPlan plan_backward(const Shape& shape, const Tensor& on) {
  constexpr RowKernels block1 = {false, "block1", 4, 1024, false}, block2 = {false, "block2", 8, 1024, false};
  const int64_t size = on.element_size();
  const bool few = shape.length <= (size == 2 ? kShortRow : block1.block_elements * block1.block_threads);
  const RowKernels& kernels = few ? block1 : block2;
  RowPlan plan = plan_rows(shape.rows, shape.length, 1, on, kernels);
  if (plan.threads) {
    const int64_t chunk_rows = std::max<int64_t>(32, ceil_div<int64_t>(shape.rows, 256));
    return {{plan, 0}, kernels, chunk_rows, ceil_div(shape.rows, chunk_rows)};
  }
  if (std::strcmp(plan.variant, "looped") == 0) {
    const SplitPlan split = plan_split(shape, on, kLeastChunk);
    return {split, kernels, split.chunk_rows, split.rows.grid.y};
  }
  const bool simd = std::strncmp(plan.variant, "simd", 4) == 0;
  if (plan.variant == block1.block) plan.grid.x = ceil_div<uint32_t>(plan.grid.x, RMS_NORM_BLOCK1_ROWS(size));
  plan.grid.x = std::min(plan.grid.x, std::max(1u, row_tuning(on).row_threads / plan.threadgroup.x));
  const int64_t teams = int64_t{plan.grid.x} * (simd ? plan.threadgroup.x / gpu::kSimdWidth : 1);
  return {{plan, 0}, kernels, 1, std::min(teams, shape.rows)};
}

// Sums the parts of the weight's gradient. A thread takes a column where the parts are few, and a simdgroup where they
// are many.
void record_weight(gpu::Recording& recording, const Tensor& partial, const Tensor& gradient,
                   const RmsNormWeightParams& params) {
  constexpr uint32_t kFewChunks = 16;
  const bool by_thread = row_tuning(gradient).simd_row == 0 || params.chunks <= kFewChunks;
  const char* stem = by_thread ? "rms_norm_weight_thread" : "rms_norm_weight_block";
  recording.kernel(stem, "_", suffix(gradient.scalar_type()));
  recording.buffer(0, partial).buffer(1, gradient).bytes(2, params);
  by_thread ? recording.dispatch_threads({params.length}, {256})
            : recording.dispatch_threadgroups({ceil_div(params.length, 32u)}, {512});
}

// Returns the gradients of x and of the weight (empty if it is not wanted). With a residual, `x` is the sum x +
// residual, and `sum_grad` is the gradient that reaches this sum other than through y.
std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& grad, const Tensor& input, const MaybeTensor& sum_grad,
                                             int64_t dims, const MaybeTensor& weight_, double eps, bool weight_wanted) {
  const char* op = "rms_norm_backward";
  check_float(op, "x", input);
  check_like(op, "grad", grad, input);
  if (sum_grad) check_like(op, "sum_grad", *sum_grad, input);
  check(!weight_wanted || weight_, "metalcore::", op, ": there is no weight to differentiate by");
  const Shape shape = shape_of(op, input.sizes(), dims);
  const MaybeTensor weight = kernel_weight(op, weight_, input, shape);
  const ScalarType dtype = input.scalar_type();
  const int64_t none[1] = {0};

  const Tensor gx = new_like(input);
  Tensor gw = weight_wanted ? new_like(*weight_) : new_tensor(Sizes(none, 1), dtype, input);
  if (shape.rows == 0 || shape.length == 0) {
    if (weight_wanted) torch::stable::zero_(gw);
    return {gx, gw};
  }
  const Rows x = rows_of(input, shape.length), g = rows_of(grad, shape.length);
  const Rows added = sum_grad ? rows_of(*sum_grad, shape.length) : g;
  const BackwardPlan plan = plan_backward(shape, input);
  const RowPlan& rows = plan.rows.rows;
  gpu::note_plan(op, rows.variant, [&] {
    return plan.rows.chunk_rows ? why_split(rows, shape.length) : why_rows(rows, shape.length, 1, input, plan.kernels);
  });
  const bool aligned = all_aligned16({&x, &g, &added}, weight, shape.length);
  const ScalarType weight_dtype = weight ? weight->scalar_type() : dtype;
  const bool shared = plan.rows.chunk_rows > 0;
  // Whether a threadgroup has all rows of its columns, so that it makes the weight's gradient itself.
  const bool whole = shared && weight_wanted && plan.chunks == 1 && gw.scalar_type() == weight_dtype;
  const bool partial_wanted = weight_wanted && !whole;
  const int64_t partial_sizes[2] = {partial_wanted ? plan.chunks : 0, shape.length};
  const Tensor scales = new_tensor({rows.threads ? shape.rows : 0}, ScalarType::Float, input);
  const Tensor partial = new_tensor(Sizes(partial_sizes, 2), ScalarType::Float, input);
  const Tensor parts = new_tensor({shared ? 2 * rows.splits * shape.rows : 0}, ScalarType::Float, input);
  const RmsNormParams params{
      .length = grid_side(shape.length),
      .rows = grid_side(shape.rows),
      .eps = static_cast<float>(eps),
      .has_weight = weight.has_value(),
      .has_residual = sum_grad.has_value(),
      .streams = grid_side(plan.chunks),
      .partial = partial_wanted,
      .splits = rows.splits,
      .share = rows.share,
      .chunk_rows = plan.rows.chunk_rows,
      .whole = whole,
      .x_stride = x.stride,
      .residual_stride = added.stride,
      .grad_stride = g.stride,
  };
  const RmsNormWeightParams stages{
      .length = params.length,
      .rows = params.rows,
      .chunk_rows = grid_side(plan.chunk_rows),
      .chunks = grid_side(plan.chunks),
      .aligned = aligned,
      .x_stride = x.stride,
      .grad_stride = g.stride,
  };
  const Tensor& weights = weight ? *weight : x.tensor;  // Metal needs a buffer for each argument
  gpu::record(gx, [&](gpu::Recording& recording) {
    if (shared) {
      kernel(recording, op, rows, "_sums", aligned, dtype, weight_dtype);
      recording.buffer(0, g.tensor).buffer(1, x.tensor).buffer(2, weights).buffer(3, parts).bytes(4, params);
      dispatch(recording, rows);
    }
    kernel(recording, op, rows, "", aligned, dtype, weight_dtype);
    recording.buffer(0, g.tensor).buffer(1, x.tensor).buffer(2, weights).buffer(3, added.tensor).buffer(4, gx);
    recording.buffer(5, rows.threads ? scales : partial_wanted ? partial : gx).bytes(6, params);
    if (shared) recording.buffer(7, parts).buffer(8, whole ? gw : gx);
    dispatch(recording, rows);
    if (!partial_wanted) return;
    if (rows.threads) {
      recording.kernel("rms_norm_weight_partial_", suffix(dtype));
      recording.buffer(0, g.tensor).buffer(1, x.tensor).buffer(2, scales).buffer(3, partial).bytes(4, stages);
      recording.dispatch_threads({grid_side(ceil_div<int64_t>(shape.length, 4)), stages.chunks}, {256});
    }
    record_weight(recording, partial, gw, stages);
  });
  return {gx, gw};
}

}  // namespace
}  // namespace metalcore

STABLE_TORCH_LIBRARY_FRAGMENT(metalcore, m) {
  m.def("rms_norm(Tensor x, int dims, Tensor? weight, float eps) -> Tensor");
  m.def("add_rms_norm(Tensor x, Tensor residual, int dims, Tensor? weight, float eps) -> (Tensor, Tensor)");
  m.def(
      "rms_norm_backward(Tensor grad, Tensor x, Tensor? sum_grad, int dims, Tensor? weight, float eps, "
      "bool weight_wanted) -> (Tensor, Tensor)");
}

METALCORE_KERNELS(m) {
  m.impl<&metalcore::rms_norm>("rms_norm");
  m.impl<&metalcore::add_rms_norm>("add_rms_norm");
  m.impl<&metalcore::rms_norm_backward>("rms_norm_backward");
}
