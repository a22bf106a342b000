// topk and renorm_rows in memory that the caller has. x has two dimensions; all else is contiguous.
#pragma once

#include "../common/common.h"

namespace metalcore {

// The values (rows, k) and indices (int64) of the largest or smallest k numbers of each row, for k up to
// TOP_K_LONG_MOST.
void topk_into(const Tensor& values, const Tensor& indices, const Tensor& x, bool largest);

// What is kept of rows of logits or probabilities, by one limit (float32) a row; `kind` is one of RENORM_….
void renorm_into(const Tensor& y, const Tensor& x, const Tensor& limits, int64_t kind);

}  // namespace metalcore
