#include "column_sums.h"

#include "../../../kernels/normalization/column_sums.h"
#include "../common/rows.h"

namespace metalcore {

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
