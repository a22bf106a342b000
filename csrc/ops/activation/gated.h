// Gated activations in memory that the caller has.
#pragma once

#include "../common/common.h"

#include <string>

namespace metalcore {

// y = activation(first half) * second half of the last dimension of x. y is contiguous.
void gated_packed_into(const Tensor& y, const Tensor& x, const std::string& activation);

}  // namespace metalcore
