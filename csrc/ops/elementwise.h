// Elementwise ops: y[i] = op(a[i]) or op(a[i], b[i]). kernels/common/elementwise_kernels.h has the kernels, which
// are instantiated under the op's name.
#pragma once

#include "common.h"

namespace metalcore {

// Returns a new tensor like `inputs[0]`, with its strides if it is dense, as torch.empty_like does. All inputs must
// have the same shape, dtype and device.
Tensor elementwise(const char* op, std::initializer_list<Tensor> inputs);

}  // namespace metalcore
