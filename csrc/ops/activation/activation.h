// What activations share, and the functions for memory of the caller.
#pragma once

#include "../common/common.h"

#include <string>

namespace metalcore {

// Refuses what the gated and the biased kernels are not instantiated for.
inline void check_activation(const char* op, const std::string& activation) {
  check(activation == "silu" || activation == "gelu" || activation == "gelu_tanh", "metalcore::", op,
        ": activation must be 'silu', 'gelu' or 'gelu_tanh', not '", activation, "'");
}

// These write to memory that the caller has.
//
// y = activation(first half) * second half of the last dimension of x. y is contiguous.
void gated_packed_into(const Tensor& y, const Tensor& x, const std::string& activation);

// y = softmax(scale * x) over the last dimension. y is contiguous and has the shape of x; `scale` is positive.
void softmax_into(const Tensor& y, const Tensor& x, double scale);

}  // namespace metalcore
