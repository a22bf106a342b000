// How a Cholesky factorization runs: which kernels of kernels/linalg/cholesky_*.metal, over which grids.
#pragma once

#include "../../gpu/limits.h"
#include "../../gpu/tuning.h"
#include "left_to_torch.h"

#include <cstdint>
#include <string>

namespace metalcore {

enum class CholeskyVariant { empty, simd, block, blocked, torch };

const char* name_of(CholeskyVariant variant);

struct CholeskyPlan {
  CholeskyVariant variant;
  std::string why;
  const char* kernel;  // simd, block
  uint32_t matrices_per_threadgroup;
  uint32_t threads;  // of a threadgroup
  uint32_t panels;   // blocked
};

struct CholeskyTuning {
  const char* family;
  // Matrices of up to so many rows go to a threadgroup, larger ones are factored in panels. Upper factors, which cost
  // PyTorch a copy more, are never left to it.
  uint32_t block_rows = 128;
  LeftToTorch torch = {};
};
extern const gpu::Table<CholeskyTuning> cholesky_tuning;

// Of `batch` matrices, n x n.
CholeskyPlan plan_cholesky(int64_t n, int64_t batch, bool upper, const CholeskyTuning& tuning);

// Panel i of an n x n matrix, and the threadgroups and threads that it takes.
struct CholeskyPanel {
  uint32_t first, width, slices, threads;
};
CholeskyPanel cholesky_panel(uint32_t n, uint32_t i);

}  // namespace metalcore
