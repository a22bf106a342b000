// The variant of kernels/common/rows.h that a shape takes, for ops over rows (softmax, norms).
#pragma once

#include "../../gpu/limits.h"
#include "../../gpu/tuning.h"
#include "common.h"

namespace metalcore {

struct RowTuning {
  const char* family;
  // These are for reductions over rows. Up to this length a thread takes a whole row.
  uint32_t thread_row = 16;
  // Up to this length a simdgroup takes a row, and `simd_rows` simdgroups share a threadgroup.
  uint32_t simd_row = 512;
  uint32_t simd_rows = 8;
  // Up to this length a threadgroup keeps a row in registers. `looped_threads` threads read a longer row twice.
  uint32_t block_row = 16384;
  uint32_t looped_threads = 1024;
  // For sums over rows, about so many threads share all rows: a core of an Apple GPU has registers for 1024 threads
  // whose kernel needs all that such a threadgroup may have (104 halves each, by Mesa's table of AGX).
  gpu::Count row_threads = gpu::per_core(1024);
};
extern const gpu::Table<RowTuning> row_tuning;

struct RowPlan {
  const char* variant;  // as in the kernels' names
  gpu::Size grid;       // in threadgroups, for "thread" in threads
  gpu::Size threadgroup;
  bool threads;
  // Variant "split": the number of threadgroups that share a row, and the elements of each (a multiple of 16 bytes).
  uint32_t splits = 1, share = 0;
};

// The kernels that an op has. Registers limit them: whether a simdgroup's thread may hold sixteen elements of a row
// ("simd4"), the elements that a thread of the block kernel holds, and that kernel's most threads. `split` says whether
// there are kernels for rows that several threadgroups share.
struct RowKernels {
  bool simd4;
  const char* block;
  uint32_t block_elements;
  uint32_t block_threads;
  bool split;
};
// Kernels with one array in registers. For long rows a thread has more elements, so that more loads run at once.
constexpr RowKernels kOneArray = {true, "block4", 16, 128, true}, kOneLongArray = {true, "block8", 32, 512, true};
inline const RowKernels& one_array(int64_t length) {
  return length <= int64_t{kOneArray.block_elements} * kOneArray.block_threads ? kOneArray : kOneLongArray;
}

// `inner` is the distance of a row's elements, which is 1 for contiguous rows.
RowPlan plan_rows(int64_t rows, int64_t length, int64_t inner, const Tensor& on, const RowKernels& kernels);
std::string why_rows(const RowPlan& plan, int64_t length, int64_t inner, const Tensor& on, const RowKernels& kernels);

// Memory for what the threadgroups that share a row give to the second dispatch: `numbers` float32 values each. There
// is none if no threadgroups share a row.
MaybeTensor new_parts(const RowPlan& plan, int64_t rows, int64_t numbers, const Tensor& like);

inline void dispatch(gpu::Recording& recording, const RowPlan& plan) {
  plan.threads ? recording.dispatch_threads(plan.grid, plan.threadgroup)
               : recording.dispatch_threadgroups(plan.grid, plan.threadgroup);
}

// A tensor as rows of its last dimensions. A row is contiguous, and rows begin `stride` elements apart.
struct Rows {
  Tensor tensor;
  int64_t stride;
};
// The tensor itself if its strides allow that, or a contiguous copy. `length` is the product of the last dimensions.
Rows rows_of(const Tensor& tensor, int64_t length);
inline Rows contiguous_rows_of(const Tensor& tensor, int64_t length) { return {as_contiguous(tensor), length}; }

// Whether rows of `length` elements, `stride` apart, begin and end at multiples of 16 bytes.
bool aligned16(const Tensor& tensor, int64_t stride, int64_t length);

// The number of elements between a multiple of 16 bytes and the tensor's first element.
inline uint32_t start_of(const Tensor& tensor) {
  return static_cast<uint32_t>(reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 16 / tensor.element_size());
}

}  // namespace metalcore
