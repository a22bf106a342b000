// rms_norm for callers other than its operators.
#pragma once

#include "norm_rows.h"

#include <tuple>

namespace metalcore {

// y, and the scales 1 / sqrt(mean(x^2) + eps) of the rows in float32: of x's sizes, with ones for those of a row.
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
