// rms_norm over the last dimension, in memory that the caller has.
#pragma once

#include "norm_rows.h"

namespace metalcore {

// y and `sum` (x + residual) are contiguous and have the shape of x.
void rms_norm_into(const Tensor& y, const Tensor& x, const MaybeTensor& weight, double eps);
void add_rms_norm_into(const Tensor& y, const Tensor& sum, const Tensor& x, const Tensor& residual,
                       const MaybeTensor& weight, double eps);

}  // namespace metalcore
