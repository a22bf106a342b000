#include "../../../kernels/normalization/normalization.h"
#include "../common/rows.h"
#include "norms.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

namespace metalcore {

const gpu::Table<NormTuning> norm_tuning("norm", {{"few_registers", &NormTuning::few_registers}},
                                         {{.family = "baseline"},
                                          {.family = "apple7", .few_registers = true},
                                          {.family = "apple8", .few_registers = true},
                                          {.family = "apple9", .few_registers = true},
                                          {.family = "apple10", .few_registers = true}});

NormShape norm_shape(const char* op, Sizes sizes, int64_t dims) {
  check(0 < dims && dims <= static_cast<int64_t>(sizes.size()), "metalcore::", op, ": cannot normalize the last ", dims,
        " of ", sizes.size(), " dimensions");
  NormShape shape{1, 1};
  for (size_t d = 0; d < sizes.size(); ++d) (d + dims < sizes.size() ? shape.rows : shape.length) *= sizes[d];
  return shape;
}

void check_like(const char* op, const char* argument, const Tensor& tensor, const Tensor& as) {
  check_same_device(op, argument, tensor, as);
  check_same_dtype(op, argument, tensor, as);
  check_same_shape(op, argument, tensor, as);
}

Tensor new_statistics(const Tensor& x, int64_t dims) {
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  std::fill(sizes.end() - dims, sizes.end(), 1);
  return new_tensor(Sizes(sizes.data(), sizes.size()), ScalarType::Float, x);
}

MaybeTensor kernel_weight(const char* op, const MaybeTensor& weight, const Tensor& x, const NormShape& shape) {
  if (!weight) return std::nullopt;
  check_float(op, "weight", *weight);
  check_same_device(op, "weight", *weight, x);
  check(weight->numel() == shape.length, "metalcore::", op, ": weight must have ", shape.length, " elements, not ",
        weight->numel());
  const ScalarType dtype = weight->scalar_type();
  if (dtype == x.scalar_type() || dtype == ScalarType::Float) return as_contiguous(*weight);
  return as_contiguous(torch::stable::to(*weight, ScalarType::Float));
}

namespace {

NestedRows one_stride(const Tensor& tensor, int64_t stride) { return {tensor, {{0, 0}, {stride, 0, 0}}}; }

}  // namespace

NestedRows flat_rows_of(const Tensor& tensor, int64_t length) {
  const Rows rows = rows_of(tensor, length);
  return one_stride(rows.tensor, rows.stride);
}

NestedRows nested_rows_of(const Tensor& tensor, int64_t length) {
  constexpr size_t kLevels = 3;
  if (tensor.is_contiguous()) return one_stride(tensor, length);
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  std::array<int64_t, kLevels> level_sizes{}, level_strides{};
  size_t levels = 0;
  int64_t expected = 1;
  size_t d = sizes.size();
  for (; d > 0 && expected != length; --d) {  // the dimensions of a row
    if (sizes[d - 1] != 1 && strides[d - 1] != expected) return flat_rows_of(tensor, length);
    expected *= sizes[d - 1];
  }
  for (; d > 0; --d) {
    const int64_t size = sizes[d - 1], stride = strides[d - 1];
    if (size == 1) continue;
    if (levels > 0 && stride == level_strides[levels - 1] * level_sizes[levels - 1]) {
      level_sizes[levels - 1] *= size;
    } else {
      if (levels == kLevels) return flat_rows_of(tensor, length);
      level_sizes[levels] = size;
      level_strides[levels++] = stride;
    }
  }
  if (levels <= 1) return one_stride(tensor, levels ? level_strides[0] : length);
  return {
      tensor,
      {{grid_side(level_sizes[0]), grid_side(level_sizes[1])}, {level_strides[0], level_strides[1], level_strides[2]}}};
}

bool all_aligned16(std::initializer_list<const NestedRows*> rows, std::initializer_list<const MaybeTensor*> parameters,
                   int64_t length) {
  const auto aligned = [&](const NestedRows* r) {
    return std::all_of(std::begin(r->strides.strides), std::end(r->strides.strides),
                       [&](int64_t stride) { return aligned16(r->tensor, stride, length); });
  };
  return std::all_of(rows.begin(), rows.end(), aligned) &&
         std::all_of(parameters.begin(), parameters.end(),
                     [&](const MaybeTensor* p) { return !*p || aligned16(**p, 0, length); });
}

NestedRows NormBackwardPlan::rows_of(const Tensor& tensor, int64_t length) const {
  return std::strncmp(rows.variant, "block", 5) == 0 ? flat_rows_of(tensor, length) : nested_rows_of(tensor, length);
}

// Rows of 16-bit elements of these lengths. A thread has 8 of their elements, and 4 of all others: where rows are long,
// that keeps fewer partial sums. Measured on a hopper GPU: a derivative that adds another gradient is no faster then.
constexpr int64_t kShortRow = 256, kLongRow = 2048;

NormBackwardPlan plan_norm_backward(const NormShape& shape, const Tensor& on, bool added) {
  constexpr RowKernels block1 = {false, "block1", 4, 1024, false}, block2 = {false, "block2", 8, 1024, false};
  constexpr RowKernels block2_512 = {false, "block2_512", 8, 512, false};
  const int64_t size = on.element_size();
  const bool many = size == 2 && shape.length > kShortRow && (added || shape.length <= kLongRow);
  const bool few = !many && shape.length <= block1.block_elements * block1.block_threads;
  const RowKernels& kernels = norm_tuning(on).few_registers ? block2_512 : few ? block1 : block2;
  RowPlan plan = plan_rows(shape.rows, shape.length, 1, on, kernels);
  if (plan.threads || std::strcmp(plan.variant, "looped") == 0) {
    const int64_t chunk_rows = std::max<int64_t>(32, ceil_div<int64_t>(shape.rows, 256));
    return {plan, kernels, chunk_rows, ceil_div(shape.rows, chunk_rows)};
  }
  const bool simd = std::strncmp(plan.variant, "simd", 4) == 0;
  if (plan.variant == block1.block) plan.grid.x = ceil_div<uint32_t>(plan.grid.x, RMS_NORM_BLOCK1_ROWS(size));
  plan.grid.x = std::min(plan.grid.x, std::max(1u, row_tuning(on).row_threads / plan.threadgroup.x));
  const int64_t teams = int64_t{plan.grid.x} * (simd ? plan.threadgroup.x / gpu::kSimdWidth : 1);
  return {plan, kernels, 1, std::min(teams, shape.rows)};
}

// A thread takes a column where the chunks are few, and a simdgroup where they are many.
void record_column_sums(gpu::Recording& recording, const Tensor& partial, int64_t chunks, const Tensor& first,
                        const MaybeTensor& second) {
  constexpr int64_t kFewChunks = 16;
  const ColumnSumsParams params{
      .columns = grid_side(first.numel() + (second ? second->numel() : 0)),
      .first = grid_side(first.numel()),
      .chunks = grid_side(chunks),
  };
  const bool by_thread = row_tuning(first).simd_row == 0 || chunks <= kFewChunks;
  recording.kernel(by_thread ? "column_sums_thread_" : "column_sums_block_", suffix(first.scalar_type()));
  recording.buffer(0, partial).buffer(1, first).buffer(2, second).bytes(3, params);
  by_thread ? recording.dispatch_threads({params.columns}, {256})
            : recording.dispatch_threadgroups({ceil_div(params.columns, 32u)}, {512});
}

}  // namespace metalcore
