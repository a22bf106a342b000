// QR of matrices that a simdgroup or a threadgroup holds: kernels/linalg/qr_simd.metal and qr_block.metal.
#pragma once

#include "../../../kernels/linalg/qr.h"
#include "matrices.h"
#include "qr_plan.h"

namespace metalcore {

// What the kernels do (QR_FACTORS, QR_REFLECTORS or QR_FORM), with how many reflectors, and the results' sizes.
struct SmallQr {
  uint32_t task, reflectors;
  uint32_t q_columns, r_rows;
};

// Arguments of the kernels for whole matrices; qr_tall's for blocks of their rows are made of them.
QrParams small_params(const Matrices& a, const SmallQr& task);

// Plan simd or block. `r` takes R or the packed reflectors; tensors that the task does not have may be any.
void run_small(const QrPlan& plan, const Matrices& a, const SmallQr& task, const Tensor& q, const Tensor& r,
               const Tensor& tau);

}  // namespace metalcore
