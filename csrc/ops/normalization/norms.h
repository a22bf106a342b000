// layer_norm, group_norm and rms_norm, for PyTorch's operators and C functions.
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

// rms_norm: y, and the scales 1 / sqrt(mean(x^2) + eps) of the rows in float32: of x's sizes, with ones for those of a
// row.
std::tuple<Tensor, Tensor> rms_norm_with_scales(const Tensor& x, int64_t dims, const MaybeTensor& weight, double eps);
// The gradients of x and of the weight (empty if it is not wanted).
std::tuple<Tensor, Tensor> rms_norm_backward_of_scales(const Tensor& grad, const Tensor& x, const Tensor& scales,
                                                       int64_t dims, const MaybeTensor& weight, bool weight_wanted);

// Over the last dimension, in memory that the caller has. y and `sum` (x + residual) are contiguous and have the shape
// of x.
void rms_norm_into(const Tensor& y, const Tensor& x, const MaybeTensor& weight, double eps);
void add_rms_norm_into(const Tensor& y, const Tensor& sum, const Tensor& x, const Tensor& residual,
                       const MaybeTensor& weight, double eps);

}  // namespace metalcore
