// How SVD and symmetric eigendecomposition run: the kernels of kernels/linalg/{svd,eigh}_jacobi.metal,
// or the blocked variant of jacobi_blocked.h.
#pragma once

#include "../../gpu/limits.h"
#include "../../gpu/tuning.h"
#include "torch_regions.h"

#include <cstdint>
#include <string>

namespace metalcore {

enum class JacobiVariant { empty, simd, block, blocked, torch, cpu };

const char* name_of(JacobiVariant variant);

struct JacobiTuning {
  const char* family;
  uint32_t sweeps = 24;        // the most sweeps of the blocked variant: fewer may leave a result inexact
  bool few_registers = false;  // whether kernels whose threads hold less take the place of others
  TorchRegions eigh_torch = {};
  TorchRegions svd_torch = {};  // the size is the smaller of rows and columns, here and in what follows
  // jacobi_plan.cpp derives these estimates.
  TorchRegions svd_cpu = {}, eigh_cpu = {};
};
extern const gpu::Table<JacobiTuning> jacobi_tuning;

struct JacobiPlan {
  JacobiVariant variant;
  bool after_qr;  // svd: the matrix is R of a QR decomposition
  std::string why;
  std::string kernel;
  uint32_t matrices_per_threadgroup, threads;
};

// The arithmetic of a small m x n matrix's sweeps, of which 15 are more than are usual: for each pair of columns, dot
// products, and the rotation of the columns and of the vectors.
inline double jacobi_flops(int64_t m, int64_t n) {
  return 15.0 * static_cast<double>(n * n) / 2 * static_cast<double>(12 * m + 6 * n);
}

// The plans for `batch` m x n or n x n matrices.
JacobiPlan plan_svd(int64_t m, int64_t n, int64_t batch, bool full_matrices, bool compute_uv,
                    const JacobiTuning& tuning);
JacobiPlan plan_eigh(int64_t n, int64_t batch, bool compute_v, const JacobiTuning& tuning);

}  // namespace metalcore
