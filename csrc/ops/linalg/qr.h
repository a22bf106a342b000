// The QR factorization: what other ops use of it, and how its plans run.
#pragma once

#include "../../../kernels/linalg/qr.h"
#include "matrices.h"
#include "qr_plan.h"
#include "reflectors.h"

#include <string>
#include <tuple>
#include <vector>

namespace metalcore {

// The operator metalcore::qr returns (Q, R) of float32 matrices. The modes are "reduced", "complete" and "r".
std::tuple<Tensor, Tensor> qr(const Tensor& a, const std::string& mode);

// The operator metalcore::qr_scaled returns (Q, R, scale), scale (*, 1, 1): the reduced QR decomposition of each matrix
// times its scale. The scales are powers of two, so that R is in range where A's norms are not.
std::tuple<Tensor, Tensor, Tensor> qr_scaled(const Tensor& a);

// Matrices that fit in a simdgroup or a threadgroup (qr_small.cpp): kernels/linalg/qr_simd.metal and qr_block.metal.

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

// Matrices of any size in panels (qr_blocked.cpp): kernels/linalg/qr_panel.metal and reflectors.metal.

// LAPACK's geqrf in place. It also makes T of the blocks of reflectors.
class BlockedQr {
 public:
  // `a` holds the matrices, and then their factors. The reflectors will be applied to at most `columns` columns.
  BlockedQr(const RowMajor& a, const Tensor& tau, uint32_t batch, uint32_t columns);

  // Makes T of the last block only with `for_q`, because only Q needs it.
  void factor(gpu::Recording& recording, bool for_q) const;
  const BlockReflectors& reflectors() const { return reflectors_; }

 private:
  void factor_panel(gpu::Recording& recording, ReflectorRange range) const;

  RowMajor a_;
  Tensor tau_;
  uint32_t batch_;
  BlockReflectors reflectors_;
  Tensor panel_factor_;     // T of the current panel
  Tensor sums_[2], state_;  // scratch memory of panels that several threadgroups share
};

// Sets q to the first columns of the identity.
void set_identity(gpu::Recording& recording, const RowMajor& q);
// LAPACK's orgqr: sets q to the first columns of H₀ H₁ …. T of all blocks must exist.
void form_q(gpu::Recording& recording, const BlockReflectors& reflectors, const RowMajor& q);

// Dispatches a thread for each element.
void dispatch_elements(gpu::Recording& recording, int64_t count);

}  // namespace metalcore
