// The triangular factor T of a product of reflectors, H₀ H₁ … = I - V T Vᵀ (Schreiber and Van Loan 1989; LAPACK's
// larft).
#pragma once

#include <metal_stdlib>

#include "qr.h"

// Makes row l of T from the products v_iᵀ v_k (i < k) in products[i * stride + k], with tau_k in products[k * stride +
// k]. It needs no other row of T.
template <typename From, typename To>
inline void write_factor(From products, uint stride, To t, uint t_stride, uint l) {
  float row[QR_PANEL];
#pragma unroll
  for (uint k = 0; k < QR_PANEL; ++k) {
    float sum = 0.0f;
#pragma unroll
    for (uint i = 0; i < k; ++i) sum = metal::fma(row[i], products[i * stride + k], sum);  // row[i] is zero before l
    const float tau = products[k * stride + k];
    row[k] = k < l ? 0.0f : k == l ? tau : -tau * sum;
    t[l * t_stride + k] = row[k];
  }
}
