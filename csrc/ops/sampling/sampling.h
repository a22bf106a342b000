// What C functions call, and what sample and topk share. x has two dimensions; all else is contiguous.
#pragma once

#include "../common/common.h"

#include <algorithm>
#include <optional>

namespace metalcore {

// Draws a class (int64) for each row of logits, of which there are some. `options`, float32, has SampleOptions of each
// row in the place of the four numbers.
void sample_into(const Tensor& classes, const Tensor& x, const Tensor& uniform, double temperature, int64_t top_k,
                 double top_p, double min_p, const MaybeTensor& options = std::nullopt);

// The values (rows, k) and indices (int64) of the largest or smallest k numbers of each row, for k up to
// TOP_K_LONG_MOST.
void topk_into(const Tensor& values, const Tensor& indices, const Tensor& x, bool largest);

// What is kept of rows of logits or probabilities, by one limit (float32) a row; `kind` is one of RENORM_….
void renorm_into(const Tensor& y, const Tensor& x, const Tensor& limits, int64_t kind);

// How many threads share a row from which the largest numbers are selected.
inline uint32_t selection_threads(int64_t length, uint32_t most) {
  constexpr int64_t kLeastNumbers = 4;  // of a thread
  const int64_t simdgroups = (length + kLeastNumbers * gpu::kSimdWidth - 1) / (kLeastNumbers * gpu::kSimdWidth);
  return static_cast<uint32_t>(std::min<int64_t>(simdgroups * gpu::kSimdWidth, most));
}

}  // namespace metalcore
