// Elementwise ops: y[i] = op(a[i]) or op(a[i], b[i]). kernels/common/elementwise_kernels.h has the kernels, which
// are instantiated under the op's name.
#pragma once

#include "../../../kernels/common/strided.h"
#include "common.h"

#include <optional>

namespace metalcore {

// Returns a new tensor like `inputs[0]`, with its strides if it is dense, as torch.empty_like does. All inputs must
// have the same shape, dtype and device. Kernels that take a number take it after their tensors.
Tensor elementwise(const char* op, std::initializer_list<Tensor> inputs, std::optional<float> number = std::nullopt);

// The same in memory that the caller has. All tensors have the same strides, without gaps.
void dense_elementwise_into(const char* op, const Tensor& output, std::initializer_list<Tensor> inputs,
                            std::optional<float> number = std::nullopt);

// The strides that visit the inputs in the output's memory order, or nothing if that needs more dimensions or a longer
// index than the kernels have.
std::optional<StridedParams> strided_params(const Tensor& output, std::initializer_list<Tensor> inputs);

}  // namespace metalcore
