// Takes the place of PyTorch's header of this path in libmetalcore. Fills work; what would need a copy throws, and C
// functions take nothing for which ops make one.
#pragma once

#include <torch/csrc/stable/tensor.h>

namespace torch::stable {

Tensor zero_(const Tensor& tensor);
Tensor fill_(const Tensor& tensor, double value);  // float32

Tensor transpose(const Tensor& tensor, int64_t a, int64_t b);  // a view
[[noreturn]] Tensor contiguous(const Tensor& tensor);
[[noreturn]] Tensor clone(const Tensor& tensor);
[[noreturn]] Tensor empty_like(const Tensor& tensor);
[[noreturn]] Tensor to(const Tensor& tensor, Tensor::ScalarType type);

}  // namespace torch::stable
