// Ops over rows (softmax, norms): which variant of kernels/common/rows.h a shape takes.
#pragma once

#include "../gpu/limits.h"
#include "../gpu/tuning.h"
#include "common.h"

#include <optional>

namespace metalcore {

struct RowTuning {
  const char* family;
  // Reductions over rows: up to this length a thread takes a row by itself …
  uint32_t thread_row = 16;
  // … up to this one a simdgroup does, of which `simd_rows` share a threadgroup …
  uint32_t simd_row = 512;
  uint32_t simd_rows = 8;
  // … up to this one a threadgroup keeps the row in registers; beyond, `looped_threads` walk it twice.
  uint32_t block_row = 16384;
  uint32_t looped_threads = 1024;
  // Sums over rows: about so many threads share the rows between them.
  uint32_t row_threads = 65536;
};
extern const gpu::Table<RowTuning> row_tuning;

struct RowPlan {
  const char* variant;  // as in the kernels' names
  gpu::Size grid;       // in threadgroups, for "thread" in threads
  gpu::Size threadgroup;
  bool threads;
  // "split": how many threadgroups share a row, and how many elements each has (a multiple of what 16 bytes hold).
  uint32_t splits = 1, share = 0;
};

// What registers allow the kernels of an op: whether a simdgroup's thread may hold sixteen elements of a row ("simd4"),
// how many a thread of the block kernel holds, and how many threads that may have. And whether there are kernels for
// rows that several threadgroups share.
struct RowKernels {
  bool simd4;
  const char* block;
  uint32_t block_elements;
  uint32_t block_threads;
  bool split;
};
// Kernels with one array in registers. Long rows have more elements in each thread: more of them on their way at once.
constexpr RowKernels kOneArray = {true, "block4", 16, 128, true}, kOneLongArray = {true, "block8", 32, 512, true};
inline const RowKernels& one_array(int64_t length) {
  return length <= int64_t{kOneArray.block_elements} * kOneArray.block_threads ? kOneArray : kOneLongArray;
}

// `inner` is the distance of a row's elements; 1 for rows that are contiguous.
RowPlan plan_rows(int64_t rows, int64_t length, int64_t inner, const Tensor& on, const RowKernels& kernels);
std::string why_rows(const RowPlan& plan, int64_t length, int64_t inner, const Tensor& on, const RowKernels& kernels);

// What the threadgroups that share a row leave to the second dispatch: so many float32 numbers each. None where a row
// is one threadgroup's.
std::optional<Tensor> new_parts(const RowPlan& plan, int64_t rows, int64_t numbers, const Tensor& like);

inline void dispatch(gpu::Recording& recording, const RowPlan& plan) {
  plan.threads ? recording.dispatch_threads(plan.grid, plan.threadgroup)
               : recording.dispatch_threadgroups(plan.grid, plan.threadgroup);
}

// A tensor seen as rows of its last dimensions: rows are contiguous and `stride` elements apart.
struct Rows {
  Tensor tensor;
  int64_t stride;
};
// The tensor itself where it can be seen so, else a contiguous copy. `length` is the product of the last dimensions.
Rows rows_of(const Tensor& tensor, int64_t length);
inline Rows contiguous_rows_of(const Tensor& tensor, int64_t length) { return {as_contiguous(tensor), length}; }

// Whether rows of `length` elements, `stride` apart, begin and end at multiples of 16 bytes.
bool aligned16(const Tensor& tensor, int64_t stride, int64_t length);

}  // namespace metalcore
