// sample in memory that the caller has.
#pragma once

#include "../common/common.h"

#include <optional>

namespace metalcore {

// Draws a class (int64) for each row of logits. Neither x, of two dimensions, nor `uniform`, which is contiguous, is
// empty. `options`, contiguous float32, has SampleOptions of each row in the place of the four numbers.
void sample_into(const Tensor& classes, const Tensor& x, const Tensor& uniform, double temperature, int64_t top_k,
                 double top_p, double min_p, const MaybeTensor& options = std::nullopt);

}  // namespace metalcore
