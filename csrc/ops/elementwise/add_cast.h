// add and cast in memory that the caller has.
#pragma once

#include "../common/common.h"

namespace metalcore {

// sum = x + y. All are contiguous, and `sum` may be x or y.
void add_into(const Tensor& sum, const Tensor& x, const Tensor& y);

// y = x in the dtype of y, which is contiguous and has the shape of x.
void cast_into(const Tensor& y, const Tensor& x);

}  // namespace metalcore
