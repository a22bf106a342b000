// QR of matrices that fit in a simdgroup or a threadgroup: kernels/linalg/qr_simd.metal and qr_block.metal.
#pragma once

#include "../../../kernels/linalg/qr.h"
#include "matrices.h"
#include "qr_plan.h"

namespace metalcore {

// What the kernels do (QR_FACTORS, QR_REFLECTORS or QR_FORM), the number of reflectors, and the results' sizes.
struct SmallQr {
  uint32_t task, reflectors;
  uint32_t q_columns, r_rows;
};

// Arguments of the kernels for whole matrices. qr_tall.metal's arguments for blocks of rows begin as these.
QrParams small_params(const Matrices& a, const SmallQr& task);

// plan.variant must be simd or block. `r` becomes R or the packed reflectors. For results that the task does not have,
// any tensor will do.
void run_small(const QrPlan& plan, const Matrices& a, const SmallQr& task, const Tensor& q, const Tensor& r,
               const Tensor& tau);

}  // namespace metalcore
