// The second stage of sums over rows (kernels/normalization/column_sums.metal).
#pragma once

#include "../common/common.h"

namespace metalcore {

// Adds up the `chunks` rows of `partial`, float32. Its columns are those of `first` and then, if there is one, those of
// `second`, which has the dtype of `first`.
void record_column_sums(gpu::Recording& recording, const Tensor& partial, int64_t chunks, const Tensor& first,
                        const MaybeTensor& second = std::nullopt);

}  // namespace metalcore
