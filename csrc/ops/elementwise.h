// Elementwise ops: y[i] = op(a[i]) or op(a[i], b[i]). The kernels are those of kernels/common/elementwise_kernels.h,
// instantiated under the op's name.
#pragma once

#include "common.h"

namespace metalcore {

// A new tensor like `inputs[0]`, with its strides where it is dense (as torch.empty_like). Inputs have one shape, dtype
// and device.
Tensor elementwise(const char* op, std::initializer_list<Tensor> inputs);

}  // namespace metalcore
