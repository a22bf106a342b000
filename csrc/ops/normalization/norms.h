// layer_norm and group_norm, with their derivatives.
#pragma once

#include "norm_rows.h"

#include <tuple>

namespace metalcore {

// y, means and scales of the rows.
std::tuple<Tensor, Tensor, Tensor> layer_norm(const Tensor& x, int64_t dims, const MaybeTensor& weight,
                                              const MaybeTensor& bias, double eps);
// Returns the gradients of x, of the weight and of the bias; the last two together or not at all (they are empty). With
// a residual, `x` is the sum x + residual, and `sum_grad` is the gradient that reaches this sum other than through y.
std::tuple<Tensor, Tensor, Tensor> layer_norm_backward(const Tensor& grad, const Tensor& x, const Tensor& means,
                                                       const Tensor& scales, const MaybeTensor& sum_grad, int64_t dims,
                                                       const MaybeTensor& weight, bool parameters_wanted);

// y, means and scales of the groups.
std::tuple<Tensor, Tensor, Tensor> group_norm(const Tensor& x, int64_t groups, const MaybeTensor& weight,
                                              const MaybeTensor& bias, double eps);
// The gradients as those of layer_norm.
std::tuple<Tensor, Tensor, Tensor> group_norm_backward(const Tensor& grad, const Tensor& x, const Tensor& means,
                                                       const Tensor& scales, int64_t groups, const MaybeTensor& weight,
                                                       bool parameters_wanted);

}  // namespace metalcore
