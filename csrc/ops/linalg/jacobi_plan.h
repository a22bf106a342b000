// How SVD and symmetric eigendecomposition run: which kernels of kernels/linalg/{svd,eigh}_jacobi.metal, or
// the blocked variant of jacobi_blocked.h.
#pragma once

#include "../../gpu/tuning.h"

#include <cstdint>
#include <string>

namespace metalcore {

enum class JacobiVariant { empty, simd, block, blocked, torch };

const char* name_of(JacobiVariant variant);

struct JacobiPlan {
  JacobiVariant variant;
  bool after_qr;  // svd: of the R of a QR decomposition
  std::string why;
  std::string kernel;
  uint32_t matrices_per_threadgroup, threads;
};

// Of batches of m x n matrices.
JacobiPlan plan_svd(int64_t m, int64_t n, int64_t batch, bool full_matrices, bool compute_uv,
                    const gpu::Tuning& tuning);
JacobiPlan plan_eigh(int64_t n, int64_t batch, bool compute_v, const gpu::Tuning& tuning);

}  // namespace metalcore
