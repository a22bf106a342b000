// The activations that the gated and the biased kernels are instantiated for.
#pragma once

#include "../common/common.h"

#include <string>

namespace metalcore {

inline void check_activation(const char* op, const std::string& activation) {
  check(activation == "silu" || activation == "gelu" || activation == "gelu_tanh", "metalcore::", op,
        ": activation must be 'silu', 'gelu' or 'gelu_tanh', not '", activation, "'");
}

}  // namespace metalcore
