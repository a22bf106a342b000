// QR of matrices of any size, by panels: kernels/linalg/qr_panel.metal and reflectors.metal.
#pragma once

#include "reflectors.h"

#include <string>
#include <vector>

namespace metalcore {

// LAPACK's geqrf in place, and T of the blocks of reflectors that are made.
class BlockedQr {
 public:
  // `a` holds the matrices and takes their factors; `columns` is the most that its reflectors will be applied to.
  BlockedQr(const RowMajor& a, const Tensor& tau, uint32_t batch, uint32_t columns);

  // With T of the last block only where Q will be wanted.
  void factor(gpu::Recording& recording, bool q_wanted) const;
  const BlockReflectors& reflectors() const { return reflectors_; }

 private:
  void panel(gpu::Recording& recording, Reflectors of) const;

  RowMajor a_;
  Tensor tau_;
  uint32_t batch_;
  BlockReflectors reflectors_;
  Tensor panel_factor_;     // T of the panel at work
  Tensor sums_[2], state_;  // of panels that several threadgroups share
};

// The first columns of the identity.
void identity(gpu::Recording& recording, const RowMajor& q);
// LAPACK's orgqr: H₀ H₁ … on them. T of all blocks is there.
void form_q(gpu::Recording& recording, const BlockReflectors& reflectors, const RowMajor& q);

// A thread for each element.
void dispatch_elements(gpu::Recording& recording, int64_t count);

}  // namespace metalcore
