#include "rows.h"

#include <algorithm>
#include <cstring>

namespace metalcore {

// On the simulator a thread takes a row of any length, except in checking mode.
namespace {
// float4 per thread in the kernels' names: simd1, simd4.
constexpr uint32_t kSimd1 = 1 * 4 * gpu::kSimdWidth, kSimd4 = 4 * kSimd1;
}  // namespace

const gpu::Table<RowTuning> row_tuning(
    "rows",
    {
        {"thread_row", &RowTuning::thread_row, {0, UINT32_MAX}},
        {"simd_row", &RowTuning::simd_row, {0, kSimd4}},
        // The simdgroup kernels have no attribute that promises Metal's pipelines more threads.
        {"simd_rows", &RowTuning::simd_rows, {1, 8}},
        {"block_row", &RowTuning::block_row, {0, 16384}},
        {"looped_threads", &RowTuning::looped_threads, {gpu::kSimdWidth, gpu::kMaxThreads, gpu::kSimdWidth}},
        {"row_threads", &RowTuning::row_threads, {gpu::kMaxThreads, 1 << 22}},
    },
    {
        {.family = "baseline"},
        {.family = "hopper"},
        {.family = "simulator",
         .thread_row = UINT32_MAX,
         .simd_row = 0,
         .simd_rows = 1,
         .block_row = 0,
         .looped_threads = 32,
         .row_threads = 65536},
    });

namespace {

uint32_t longest_simd_row(const RowTuning& tuning, const RowKernels& kernels) {
  return std::min(tuning.simd_row, kernels.simd4 ? kSimd4 : kSimd1);
}
uint32_t longest_block_row(const RowTuning& tuning, const RowKernels& kernels) {
  return std::min(tuning.block_row, kernels.block_threads * kernels.block_elements);
}

// A second dispatch pays only if a threadgroup's part of a row has at least this many elements. Each thread of it reads
// the result of one of the row's threadgroups.
constexpr int64_t kLeastShare = 8192;
constexpr uint32_t kSplitThreads = 256;

// The number of threadgroups that share a long row. It is 1 unless there are so few rows that most of a GPU would idle.
int64_t splits_of(int64_t rows, int64_t length, uint32_t fill_threadgroups, const RowKernels& kernels) {
  if (!kernels.split || 2 * rows > fill_threadgroups) return 1;
  const int64_t wanted =
      ceil_div<int64_t>(2 * fill_threadgroups, rows);  // these threadgroups are small, so twice as many run
  return std::min({wanted, length / kLeastShare, int64_t{kSplitThreads}});
}
}  // namespace

RowPlan plan_rows(int64_t rows, int64_t length, int64_t inner, const Tensor& on, const RowKernels& kernels) {
  const RowTuning& tuning = row_tuning(on);
  const uint32_t count = grid_side(rows);
  // Kernels count a row's elements in 32 bits and step beyond its end.
  check(length <= INT32_MAX, "metalcore: a row of ", length, " elements is longer than kernels take");
  if (inner > 1) {
    const uint32_t across = grid_side(ceil_div<int64_t>(inner, 4));
    return {"columns", {across, grid_side(rows / inner)}, {std::min(across, 256u), 256 / std::min(across, 256u)}, true};
  }
  if (length <= tuning.thread_row) return {"thread", {count}, {256}, true};
  if (length <= longest_simd_row(tuning, kernels)) {
    const uint32_t per_group = std::min(tuning.simd_rows, count);
    return {length <= kSimd1 ? "simd1" : "simd4", {ceil_div(count, per_group)}, {per_group * gpu::kSimdWidth}, false};
  }
  if (length <= longest_block_row(tuning, kernels)) {
    const int64_t threads = ceil_div<int64_t>(length, kernels.block_elements);
    return {kernels.block, {count}, {static_cast<uint32_t>(round_up<int64_t>(threads, gpu::kSimdWidth))}, false};
  }
  if (const int64_t splits = splits_of(rows, length, gpu::parallelism(on).fill_threadgroups, kernels); splits > 1) {
    const int64_t share = round_up<int64_t>(ceil_div(length, splits), 8);
    const uint32_t groups = grid_side(ceil_div(length, share));
    return {"split", {groups, count}, {kSplitThreads}, false, groups, grid_side(share)};
  }
  return {"looped", {count}, {tuning.looped_threads}, false};
}

std::string why_rows(const RowPlan& plan, int64_t length, int64_t inner, const Tensor& on, const RowKernels& kernels) {
  const RowTuning& tuning = row_tuning(on);
  const std::string row = "a row of " + std::to_string(length);
  const uint32_t simd_row = longest_simd_row(tuning, kernels), block_row = longest_block_row(tuning, kernels);
  const auto at_most = [](uint32_t limit) { return " (at most " + std::to_string(limit) + ")"; };
  if (inner > 1)
    return "the rows' elements lie " + std::to_string(inner) + " apart: one thread takes four neighbouring rows";
  if (plan.threads)
    return row + (tuning.thread_row == UINT32_MAX ? "" : at_most(tuning.thread_row)) + " is one thread's work";
  if (std::strncmp(plan.variant, "simd", 4) == 0) return row + at_most(simd_row) + " fits a simdgroup's registers";
  if (std::strncmp(plan.variant, "block", 5) == 0) return row + at_most(block_row) + " fits a threadgroup's registers";
  if (plan.splits > 1)
    return "there are few rows of " + std::to_string(length) + ": " + std::to_string(plan.splits) +
           " threadgroups share one";
  return row + " (more than " + std::to_string(block_row) + ") is walked twice by a threadgroup";
}

MaybeTensor new_parts(const RowPlan& plan, int64_t rows, int64_t numbers, const Tensor& like) {
  if (plan.splits == 1) return std::nullopt;
  return new_tensor({rows * plan.splits * numbers}, ScalarType::Float, like);
}

Rows rows_of(const Tensor& tensor, int64_t length) {
  if (tensor.is_contiguous()) return {tensor, length};
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  int64_t expected = 1, stride = 0;
  bool leading = false;
  for (size_t d = sizes.size(); d-- > 0;) {
    if (!leading && expected == length) leading = true;
    if (sizes[d] == 1) continue;
    if (!leading) {
      if (strides[d] != expected) return contiguous_rows_of(tensor, length);
      expected *= sizes[d];
    } else {
      if (stride == 0) {  // this is the innermost leading dimension
        stride = strides[d];
        if (stride <= 0) return contiguous_rows_of(tensor, length);
        expected = stride;
      }
      if (strides[d] != expected) return contiguous_rows_of(tensor, length);
      expected *= sizes[d];
    }
  }
  return {tensor, stride ? stride : length};
}

bool aligned16(const Tensor& tensor, int64_t stride, int64_t length) {
  // On Metal data_ptr() is the address of the buffer's object, a multiple of 16, plus the offset in bytes.
  const auto multiple = [&](int64_t elements) { return elements * tensor.element_size() % 16 == 0; };
  return multiple(stride) && multiple(length) && reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 16 == 0;
}

}  // namespace metalcore
