// embedding in memory that the caller has.
#pragma once

#include "../common.h"

namespace metalcore {

// out[i] = table[indices[i]]. All are contiguous, and indices are int32 or int64. A row that the table does not have is
// NaN.
void embedding_into(const Tensor& out, const Tensor& table, const Tensor& indices);

}  // namespace metalcore
