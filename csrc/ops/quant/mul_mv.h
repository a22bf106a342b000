// How products of packed weights and few rows of x are shared out.
#pragma once

#include "../common/common.h"

namespace metalcore {

struct MvPlan {
  uint32_t x_rows;  // of a threadgroup: 1, 2 or 4, as in the kernels' names
  uint32_t simdgroups, group_rows;
};

MvPlan plan_mv(int64_t rows, int64_t length, int64_t x_rows, bool experts, const Tensor& on);

// The rows of x up to which the weights of a product are read as they are.
int64_t most_mv_rows(const Tensor& on);

}  // namespace metalcore
