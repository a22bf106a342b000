// softmax in memory that the caller has.
#pragma once

#include "../common/common.h"

namespace metalcore {

// y = softmax(scale * x) over the last dimension. y is contiguous and has the shape of x; `scale` is positive.
void softmax_into(const Tensor& y, const Tensor& x, double scale);

}  // namespace metalcore
