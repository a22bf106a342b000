// QR of matrices of any size in panels: kernels/linalg/qr_panel.metal and reflectors.metal.
#pragma once

#include "reflectors.h"

#include <string>
#include <vector>

namespace metalcore {

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
