// The error of a submission whose kernels the GPU's own compiler refuses. Nothing of the recording has run. Operators
// (csrc/ops/common/operator.h) and kernels in the place of PyTorch's (csrc/ops/common/replacement.h) leave such a call
// to PyTorch.
#pragma once

#include <stdexcept>

namespace metalcore::gpu {

struct KernelRefused : std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace metalcore::gpu
