// Hermitian matrices by tridiagonal form: the reduction, the way back, and the problem in between.
#pragma once

#include "../../gpu/tuning.h"
#include "../common/common.h"

#include <tuple>

namespace metalcore {

struct TridiagonalTuning {
  const char* family;
  uint32_t panels_above = 512;  // a trailing matrix of more rows is reduced in panels
  uint32_t panel_columns = 32;
  gpu::Count column_threads = gpu::per_core(gpu::kFilling * 32);  // that share the columns after the panels
};
extern const gpu::Table<TridiagonalTuning> tridiagonal_tuning;

// The reflectors of a matrix are rows, padded with zeros to blocks of the back-transformation.
constexpr uint32_t reflector_block(int64_t n) { return n > 1024 ? 512 : 256; }

// A times `scales` (*), powers of two that bring the largest entries to about one, is Q T Qᴴ: `diagonal` (batch, n) and
// `beside` (batch, n - 1) are T's, and Q is the product of I - tau[i] vᵢ vᵢᵀ for the rows vᵢ of `reflectors` (batch,
// n rounded up to blocks, pitch), whose first entries are zeros before the leading 1 at i. For complex matrices these
// are 2 n real reflectors (kernels/linalg/tridiagonalize.h), and their product with the diagonal matrix of `phases`
// (batch, n), complex64, is Q.
struct Tridiagonal {
  Tensor diagonal, beside, scales, reflectors, tau, phases;
};

// The largest complex matrices: a thread has four of a row's entries.
constexpr int64_t kLargestComplexTridiagonal = 2048;

// float32 or complex64 matrices of any strides, of which only one triangle is read, n > 0.
Tridiagonal tridiagonalize(const Tensor& a, bool upper);

// Q times z (batch, n, n), float32, which it may overwrite.
Tensor apply_reflectors(const Tridiagonal& t, const Tensor& z);

// Divides the eigenvalues (batch, n) of scaled matrices by the scales (batch), in place.
void unscale(const Tensor& eigenvalues, const Tensor& scales);

// Returns the eigenvalues (*, n), ascending, and with `compute_v` the eigenvectors (*, n, n), as columns of row-major
// matrices, of matrices with the diagonals d (*, n) and the off-diagonals e (*, n - 1), both float32. Nothing waits for
// the device. All results of a matrix with a NaN or an infinity are NaN.
std::tuple<Tensor, Tensor> eigh_tridiagonal(const Tensor& d, const Tensor& e, bool compute_v);

}  // namespace metalcore
