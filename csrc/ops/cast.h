// cast in memory that the caller has.
#pragma once

#include "common.h"

namespace metalcore {

// The numbers of x in y's dtype, which is another one. y is contiguous and not empty.
void cast_into(const Tensor& y, const Tensor& x);

}  // namespace metalcore
