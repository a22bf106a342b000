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
  BlockedQr(const RowMajor& a, const Tensor& tau, uint32_t batch, uint32_t columns, const gpu::Tuning& tuning);

  // With T of the last block only where Q will be wanted.
  void factor(gpu::Encoder& encoder, bool q_wanted) const;
  const BlockReflectors& reflectors() const { return reflectors_; }

  // The first dispatch of each kernel, for explanations.
  static std::vector<Step> steps(uint32_t rows, uint32_t columns, uint32_t batch, bool q_wanted,
                                 const gpu::Tuning& tuning);

 private:
  void panel(gpu::Encoder& encoder, Reflectors of) const;

  RowMajor a_;
  Tensor tau_;
  uint32_t batch_;
  BlockReflectors reflectors_;
  Tensor panel_factor_;     // T of the panel at work
  Tensor sums_[2], state_;  // of panels that several threadgroups share
};

// The first columns of the identity.
void identity(gpu::Encoder& encoder, const RowMajor& q);
// LAPACK's orgqr: H₀ H₁ … on them. T of all blocks is there.
void form_q(gpu::Encoder& encoder, const BlockReflectors& reflectors, const RowMajor& q);

// A thread for each element.
void dispatch_elements(gpu::Encoder& encoder, int64_t count);

}  // namespace metalcore
